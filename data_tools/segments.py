"""Sentencepiece encoding by dictionary look-up, for models where it provably gives the same ids.

BPE merges neighbouring pieces when the merged piece is in the vocabulary. If no piece of the vocabulary contains a
certain pair of neighbouring characters, no merge ever crosses such a pair, and the text on either side can be encoded
separately. Most BPE models have no piece with a space after another character, or with a letter next to a punctuation
mark, so text splits into segments that recur often. Each segment is encoded once and cached.
"""

import importlib
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

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
    """Cache of the ids of words, as bytes; a missing word is concatenated from its parts, which are rarely new."""

    def __init__(self, parts: _Segments) -> None:
        super().__init__()
        self._parts = parts

    def __missing__(self, word: str) -> bytes:
        if len(self) >= CACHED_SEGMENTS:
            self.clear()
        ids = self[word] = b"".join(map(self._parts.__getitem__, PARTS.findall(word)))
        return ids


class SegmentedSentencepiece:
    """Encodes like a sentencepiece processor, but faster; made by `from_processor`."""

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
    """Whether `pattern` splits no piece of the vocabulary. A split depends only on two neighbouring characters."""
    return all(len(pattern.findall(piece)) == 1 for piece in pieces)
