"""Text to token ids with three types of tokenizers, each with a fast engine that gives identical ids.

sentencepiece models    data_tools/segments.py if the vocabulary proves that it is exact, else sentencepiece itself
tokenizer.json files    fastokens if it is installed and supports the model, else Hugging Face's tokenizers
tiktoken encodings      fastokens if it is installed and supports the encoding, else tiktoken

benchmarks/tokenize.py measures them. Every part of the work first compares the engine with the tokenizer's own library.
"""

import base64
import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_tools.segments import SegmentedSentencepiece
from moba_train.data.indexed import dtype_for
from moba_train.data.tokenizer import TIKTOKEN, HuggingFaceTokenizer, load_tokenizer, tokenizer_file
from moba_train.errors import DataError

Encode = Callable[[Sequence[str]], list[npt.NDArray[Any]]]


@dataclass(frozen=True)
class Encoder:
    """A loaded tokenizer."""

    name: str
    """File name without the folder, or tiktoken:NAME."""
    sha256: str
    """SHA-256 of the file or the vocabulary, in hexadecimal."""
    vocab_size: int
    """Token ids are below this."""
    eos_id: int | None
    """Token id of the end of a document, or None if the tokenizer names none."""
    token_to_id: Callable[[str], int | None]
    """Token id of a special token, or None if the vocabulary lacks it."""
    reference: Encode
    """Encodes each text with the tokenizer's own library."""
    engine: str
    """Name of the engine behind `encode`."""
    encode: Encode
    """Encodes each text with the engine, which gives the ids of `reference`."""
    bos_id: int | None = None
    """Token id that begins documents, or None."""

    def check(self, texts: Sequence[str]) -> None:
        """Raises DataError when the engine and the tokenizer's own library differ on one of `texts`."""
        if self.encode is self.reference:
            return
        for text, found, expected in zip(texts, self.encode(texts), self.reference(texts), strict=True):
            if not np.array_equal(found, expected):
                raise DataError(
                    f"engine {self.engine} and the library of {self.name} give different ids for the text that "
                    f"begins with {text[:60]!r}; give --engine reference"
                )


def load_encoder(tokenizer: str, fast: bool = True, eos: str | None = None, bos: str | None = None) -> Encoder:
    """Load a tokenizer: a sentencepiece model, a tokenizer.json, a folder with one, or tiktoken:NAME.

    fast  use the fastest installed engine that is exact
    eos   token that ends documents, in place of the tokenizer's own
    bos   token that begins documents

    Raises DataError when the tokenizer cannot be loaded, a package is missing, or there is no token `eos` or `bos`.
    """
    path = tokenizer_file(tokenizer)
    if tokenizer.startswith(TIKTOKEN):
        encoder = _tiktoken(tokenizer.removeprefix(TIKTOKEN), fast)
    else:
        encoder = _hugging_face(path, fast) if path.suffix == ".json" else _sentencepiece(path, fast)
    if eos is not None:
        encoder = replace(encoder, eos_id=_require_token("--eos", eos, encoder))
    return encoder if bos is None else replace(encoder, bos_id=_require_token("--bos", bos, encoder))


def _require_token(option: str, token: str, encoder: Encoder) -> int:
    if (found := encoder.token_to_id(token)) is None:
        raise DataError(f"{option} {token!r} is not a token of {encoder.name}")
    return found


def _sentencepiece(path: Path, fast: bool) -> Encoder:
    tokenizer = load_tokenizer(path)
    processor = tokenizer.processor
    dtype = dtype_for(tokenizer.vocab_size)

    def token_to_id(token: str) -> int | None:
        found = processor.piece_to_id(token)
        return None if found == processor.unk_id() else found

    def reference(texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        return [np.array(processor.encode(text), dtype=dtype) for text in texts]

    segmented = SegmentedSentencepiece.from_processor(processor, dtype) if fast else None
    return Encoder(
        name=tokenizer.name,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        token_to_id=token_to_id,
        reference=reference,
        engine="segments" if segmented else "sentencepiece",
        encode=segmented.encode if segmented else reference,
    )


def _hugging_face(path: Path, fast: bool) -> Encoder:
    tokenizer = HuggingFaceTokenizer(path)
    library = tokenizer.library
    dtype = dtype_for(tokenizer.vocab_size)

    def reference(texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        found = library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=dtype) for encoding in found]

    def load(fastokens: Any) -> Any:
        return fastokens.Tokenizer.from_json_str(library.to_str())

    encode = _fastokens(load, dtype) if fast else None
    return Encoder(
        name=path.name,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        token_to_id=library.token_to_id,
        reference=reference,
        engine="fastokens" if encode else "tokenizers",
        encode=encode or reference,
    )


def load_tiktoken_encoding(name: str) -> Any:
    """An encoding of the package tiktoken. Raises DataError when it cannot be loaded."""
    try:
        tiktoken: Any = importlib.import_module("tiktoken")
    except ImportError as error:
        raise DataError(f"{TIKTOKEN}{name} needs the package tiktoken; run `pip install tiktoken`") from error
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # the name is unknown, or the download of its vocabulary fails in any way
        raise DataError(f"tiktoken cannot load the encoding {name!r}: {error}") from error


def _tiktoken(name: str, fast: bool) -> Encoder:
    encoding = load_tiktoken_encoding(name)
    dtype = dtype_for(encoding.n_vocab)
    specials = encoding._special_tokens

    def reference(texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        return [np.array(encoding.encode_ordinary(text), dtype=dtype) for text in texts]

    ranks = json.dumps([[token.hex(), rank] for token, rank in encoding._mergeable_ranks.items()])
    sha256 = hashlib.sha256(f"{encoding._pat_str}{specials}{ranks}".encode()).hexdigest()

    def load(fastokens: Any) -> Any:
        with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
            for token, rank in encoding._mergeable_ranks.items():
                file.write(b"%s %d\n" % (base64.b64encode(token), rank))
            file.flush()
            return fastokens.Tokenizer.from_tiktoken(file.name, pattern=encoding._pat_str, special_tokens={})

    encode = _fastokens(load, dtype) if fast else None
    return Encoder(
        name=f"{TIKTOKEN}{name}",
        sha256=sha256,
        vocab_size=encoding.n_vocab,
        eos_id=specials.get("<|endoftext|>"),
        token_to_id=specials.get,
        reference=reference,
        engine="fastokens" if encode else "tiktoken",
        encode=encode or reference,
    )


def _fastokens(load: Callable[[Any], Any], dtype: npt.DTypeLike) -> Encode | None:
    """Encoding with the package fastokens, or None if it is not installed or does not support the tokenizer."""
    try:
        tokenizer = load(importlib.import_module("fastokens"))
    except (ImportError, ValueError, RuntimeError, OSError, TypeError):
        return None

    def encode(texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        ids, offsets = tokenizer.encode_batch_flat(list(texts))
        ends = np.frombuffer(offsets, dtype=np.uint64)[1:-1].astype(np.int64)
        return np.split(np.frombuffer(ids, dtype=np.uint32).astype(dtype), ends)

    return encode
