"""Text to token ids with any of three kinds of tokenizers, each with a fast engine that gives the very same ids.

sentencepiece models    data_tools/segments.py, where the vocabulary proves it exact; else sentencepiece itself
tokenizer.json files    fastokens where it is installed and knows the model; else Hugging Face's tokenizers
tiktoken encodings      the same engines' order: fastokens, else tiktoken

benchmarks/tokenize.py measures them; a part of the work begins by comparing the engine with the original library.
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
    """Of the file or the vocabulary, in hexadecimal."""
    vocab_size: int
    """Token ids are below this."""
    eos_id: int | None
    """Token id of the end of a document, if the tokenizer says one."""
    id_of: Callable[[str], int | None]
    """Token id of a special token, None when there is none."""
    reference: Encode
    """Ids of each text, by the library the tokenizer was made with."""
    engine: str
    """Name of what `encode` uses."""
    encode: Encode
    """The same ids, faster where `engine` is not that library."""
    bos_id: int | None = None
    """Token id that documents are to begin with, if any."""

    def check(self, texts: Sequence[str]) -> None:
        """Raises DataError when the engine and the original library differ on one of `texts`."""
        if self.encode is self.reference:
            return
        for text, found, expected in zip(texts, self.encode(texts), self.reference(texts), strict=True):
            if not np.array_equal(found, expected):
                raise DataError(
                    f"engine {self.engine} and the original library of {self.name} give other ids for "
                    f"{text[:60]!r}...; give --engine reference"
                )


def load_encoder(tokenizer: str, fast: bool = True, eos: str | None = None, bos: str | None = None) -> Encoder:
    """The tokenizer at a path (a sentencepiece model, tokenizer.json, or a folder with it), or tiktoken:NAME.

    fast: use the fastest exact engine at hand. eos: the token to end documents with, in place of the tokenizer's own.
    bos: the token to begin them with. Raises DataError when it cannot be loaded, a package is missing, or it has no
    token `eos` or `bos`.
    """
    path = tokenizer_file(tokenizer)
    if tokenizer.startswith(TIKTOKEN):
        encoder = _tiktoken(tokenizer.removeprefix(TIKTOKEN), fast)
    else:
        encoder = _hugging_face(path, fast) if path.suffix == ".json" else _sentencepiece(path, fast)
    if eos is not None:
        encoder = replace(encoder, eos_id=_known("--eos", eos, encoder))
    return encoder if bos is None else replace(encoder, bos_id=_known("--bos", bos, encoder))


def _known(option: str, token: str, encoder: Encoder) -> int:
    if (found := encoder.id_of(token)) is None:
        raise DataError(f"{option} {token!r} is no token of {encoder.name}")
    return found


def _sentencepiece(path: Path, fast: bool) -> Encoder:
    tokenizer = load_tokenizer(path)
    processor = tokenizer.processor
    dtype = dtype_for(tokenizer.vocab_size)

    def id_of(token: str) -> int | None:
        found = processor.piece_to_id(token)
        return None if found == processor.unk_id() else found

    def reference(texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        return [np.array(processor.encode(text), dtype=dtype) for text in texts]

    engine, encode = "sentencepiece", reference
    segmented = SegmentedSentencepiece.of(processor, dtype) if fast else None
    if segmented is not None:
        engine, encode = "segments", segmented.encode
    size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
    return Encoder(tokenizer.name, tokenizer.sha256, size, eos_id, id_of, reference, engine, encode)


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
    engine = "fastokens" if encode else "tokenizers"
    encode = encode or reference
    size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
    return Encoder(path.name, tokenizer.sha256, size, eos_id, library.token_to_id, reference, engine, encode)


def _tiktoken(name: str, fast: bool) -> Encoder:
    try:
        tiktoken: Any = importlib.import_module("tiktoken")
    except ImportError as error:
        raise DataError(f"{TIKTOKEN}{name} needs the package tiktoken; run `pip install tiktoken`") from error
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # an unknown name, or whatever the download of a known one raises
        raise DataError(f"tiktoken cannot load the encoding {name!r}: {error}") from error
    dtype = dtype_for(encoding.n_vocab)
    specials = encoding._special_tokens
    eos_id = specials.get("<|endoftext|>")

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
    engine = "fastokens" if encode else "tiktoken"
    full_name, size = f"{TIKTOKEN}{name}", encoding.n_vocab
    return Encoder(full_name, sha256, size, eos_id, specials.get, reference, engine, encode or reference)


def _fastokens(load: Callable[[Any], Any], dtype: npt.DTypeLike) -> Encode | None:
    """Encoding by the fastokens package, or None where it is not installed or does not know the tokenizer."""
    try:
        tokenizer = load(importlib.import_module("fastokens"))
    except (ImportError, ValueError, RuntimeError, OSError, TypeError):
        return None

    def encode(texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        ids, offsets = tokenizer.encode_batch_flat(list(texts))
        ends = np.frombuffer(offsets, dtype=np.uint64)[1:-1].astype(np.int64)
        return np.split(np.frombuffer(ids, dtype=np.uint32).astype(dtype), ends)

    return encode
