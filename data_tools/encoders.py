"""Token ids of text with three types of tokenizers, each with a fast engine that gives identical ids.

sentencepiece models    `SegmentedSentencepiece` if the vocabulary proves that it is exact, otherwise sentencepiece
tokenizer.json files    fastokens if it is installed and supports the model, otherwise Hugging Face's tokenizers
tiktoken encodings      fastokens if it is installed and supports the encoding, otherwise tiktoken

On new text, one core makes 0.82M tokens/s with sentencepiece and 1.53M with its fast engine (5.30M on text seen
before), 0.33M with tokenizers and 31.4M with fastokens, 1.87M with tiktoken and 7.1M with fastokens
(benchmarks/results/tokenize-cpu.json). The two engines of a tokenizer.json work in a process with limits since then
(tools/text_tokenizer.py): on text seen before, tokenizers is as fast as in this one, and fastokens goes from 322 to
107 MB/s. Every part of the work first compares the engine with the tokenizer's own
library.
"""

import base64
import hashlib
import importlib
import json
import logging
import re
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from data_tools.corpus_writer import dtype_for
from moba_train.data.tokenizer import TIKTOKEN, tokenizer_file
from moba_train.errors import DataError
from moba_train.tools.text_tokenizer import HuggingFaceTokenizer, load_tokenizer

logger = logging.getLogger(__name__)

SPACE = " \u2581"  # sentencepiece writes a space as U+2581, and takes U+2581 for one
WORDS = re.compile(rf"[{SPACE}]*[^{SPACE}\n]+|[{SPACE}]*\n|[{SPACE}]+")
"""Splits before a space and around a line end."""
_SIGNS = r"\x00-\x09\x0b-\x1f!-@\[-`{-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\u2000-\u206f"
PARTS = re.compile(rf"[{SPACE}]*(?:[^{SPACE}\n{_SIGNS}]+|[{_SIGNS}]+|\n)|[{SPACE}]+")
"""Also splits between the digits and signs of ASCII, Latin-1 and general punctuation, and everything else."""
CACHED_SEGMENTS = 1 << 19
"""Largest number of segments in the cache, about 200 bytes each; a full cache is emptied."""
BPE = 2
"""`trainer_spec.model_type` of BPE models."""


class _Segments(dict[str, bytes]):
    """Cache of the ids of segments, as bytes; a missing segment is encoded."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._processor = processor
        self._dtype = dtype

    def __missing__(self, segment: str) -> bytes:
        if len(self) >= CACHED_SEGMENTS:
            self.clear()
        ids = self[segment] = array(self._dtype.char, self._processor.encode(segment)).tobytes()
        return ids


class _Words(dict[str, bytes]):
    """Cache of the ids of words, as bytes. A missing word is concatenated from its parts, which are rarely new."""

    def __init__(self, parts: _Segments) -> None:
        super().__init__()
        self._parts = parts

    def __missing__(self, word: str) -> bytes:
        if len(self) >= CACHED_SEGMENTS:
            self.clear()
        ids = self[word] = b"".join(map(self._parts.__getitem__, PARTS.findall(word)))
        return ids


class SegmentedSentencepiece:
    """Sentencepiece encoding by dictionary look-up, for models that provably get equal ids; made by `from_processor`.

    BPE merges neighbouring pieces when the merged piece is in the vocabulary. If no piece of the vocabulary contains a
    certain pair of neighbouring characters, no merge ever crosses such a pair, and the text on either side can be
    encoded separately. Most BPE models have no piece with a space after another character, or with a letter next to a
    punctuation mark, so text splits into segments that recur often. Each segment is encoded once and cached.
    """

    def __init__(self, model: Any, dtype: np.dtype[Any], in_parts: bool) -> None:
        self._prefix = " " if model.normalizer_spec.add_dummy_prefix else ""
        self._dtype = dtype
        model.normalizer_spec.add_dummy_prefix = False
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        segments = _Segments(processor, dtype)
        self._ids: dict[str, bytes] = _Words(segments) if in_parts else segments

    @staticmethod
    def from_processor(
        processor: sentencepiece.SentencePieceProcessor, dtype: np.dtype[Any]
    ) -> "SegmentedSentencepiece | None":
        """A fast encoder with the ids of `processor`, or None if its ids could differ."""
        schema: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
        model = schema.ModelProto.FromString(processor.serialized_model_proto())
        normalizer = model.normalizer_spec
        trainer = model.trainer_spec
        piece_types = {piece.type for piece in model.pieces}
        independent = (
            trainer.model_type == BPE
            and trainer.byte_fallback  # otherwise unknown characters on both sides become one token
            and not normalizer.precompiled_charsmap
            and not normalizer.remove_extra_whitespaces
            and normalizer.escape_whitespaces
            and not trainer.treat_whitespace_as_suffix
            and model.SentencePiece.USER_DEFINED not in piece_types  # these are matched before any merge
        )
        pieces = [piece.piece for piece in model.pieces if piece.type == model.SentencePiece.NORMAL]
        if not independent or not _keeps_whole(WORDS, pieces):
            return None
        return SegmentedSentencepiece(model, dtype, _keeps_whole(PARTS, pieces))

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Token ids of each text."""
        ids = self._ids.__getitem__
        return [
            np.frombuffer(b"".join(map(ids, WORDS.findall(self._prefix + text if text else ""))), dtype=self._dtype)
            for text in texts
        ]


def _keeps_whole(pattern: re.Pattern[str], pieces: list[str]) -> bool:
    """True if `pattern` splits no piece of the vocabulary. A split depends only on two neighbouring characters."""
    return all(len(pattern.findall(piece)) == 1 for piece in pieces)


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

    def checked(self, texts: Sequence[str]) -> "Encoder":
        """The encoder; where its engine and the tokenizer's own library differ on one of `texts`, with that library as
        its engine, and a warning."""
        if self.encode is self.reference:
            return self
        for text, found, expected in zip(texts, self.encode(texts), self.reference(texts), strict=True):
            if not np.array_equal(found, expected):
                logger.warning(
                    "engine %s and the library of %s give different ids for the text that begins with %r: the slower "
                    "library is taken",
                    self.engine,
                    self.name,
                    text[:60],
                )
                return replace(self, encode=self.reference)
        return self


def load_encoder(tokenizer: str, fast: bool = True, eos: str | None = None, bos: str | None = None) -> Encoder:
    """Load a tokenizer: a sentencepiece model, a tokenizer.json, a folder with one, or tiktoken:NAME.

    fast: True for the fastest installed engine that is exact
    eos: token that ends documents, instead of the tokenizer's own
    bos: token that begins documents

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
    dtype = dtype_for(tokenizer.vocab_size)

    def encoded(texts: Sequence[str], fast: bool = False) -> list[npt.NDArray[Any]]:
        return [ids.astype(dtype) for ids in tokenizer.encode_batch(texts, fast)]

    fast = fast and tokenizer.has_fast_engine
    return Encoder(
        name=path.name,
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        token_to_id=tokenizer.token_to_id,
        reference=encoded,
        engine="fastokens" if fast else "tokenizers",
        encode=partial(encoded, fast=True) if fast else encoded,
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
