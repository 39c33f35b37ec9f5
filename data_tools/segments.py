"""Sentencepiece's ids for the price of a dictionary look-up, for the models where that is provably the same.

BPE joins neighbouring pieces when the joined piece is in the vocabulary. Where no piece of the vocabulary holds a
certain pair of neighbouring characters, nothing is ever joined across such a pair, and the text on both sides can be
encoded apart. Most BPE models have no piece with a space behind another character, or with a letter beside a sign, so
text falls into segments that recur all the time; each is encoded once and remembered.
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
"""Cuts before a space and around a line end."""
_SIGNS = r"\x00-\x09\x0b-\x1f!-@\[-`{-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\u2000-\u206f"
PARTS = re.compile(rf"[{SPACE}]*(?:[^{SPACE}\n{_SIGNS}]+|[{_SIGNS}]+|\n)|[{SPACE}]+")
"""Cuts also between the digits and signs of ASCII, Latin-1 and general punctuation, and everything else."""
REMEMBERED = 1 << 19
"""Segments kept at most, about 200 bytes each; then forgotten all at once."""
BPE = 2


class _Segments(dict[str, bytes]):
    """The ids of segments, as bytes, encoded when they are first asked for."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._processor, self._dtype = processor, dtype

    def __missing__(self, segment: str) -> bytes:
        if len(self) >= REMEMBERED:
            self.clear()
        ids = self[segment] = array(self._dtype.char, self._processor.encode(segment)).tobytes()
        return ids


class _Words(dict[str, bytes]):
    """The same for words, put together from their parts: a new word rarely has a new part."""

    def __init__(self, parts: _Segments) -> None:
        super().__init__()
        self._parts = parts

    def __missing__(self, word: str) -> bytes:
        if len(self) >= REMEMBERED:
            self.clear()
        ids = self[word] = b"".join(map(self._parts.__getitem__, PARTS.findall(word)))
        return ids


class SegmentedSentencepiece:
    """Encodes like `processor`; made by `of`."""

    def __init__(self, model: Any, dtype: np.dtype[Any], in_parts: bool) -> None:
        self._prefix = " " if model.normalizer_spec.add_dummy_prefix else ""
        self._dtype = dtype
        model.normalizer_spec.add_dummy_prefix = False
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        segments = _Segments(processor, dtype)
        self._ids: dict[str, bytes] = _Words(segments) if in_parts else segments

    @staticmethod
    def of(processor: sentencepiece.SentencePieceProcessor, dtype: np.dtype[Any]) -> "SegmentedSentencepiece | None":
        """The fast way to the ids of `processor`, or None where they could differ."""
        schema: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
        model = schema.ModelProto.FromString(processor.serialized_model_proto())
        normalizer, trainer = model.normalizer_spec, model.trainer_spec
        kinds = {piece.type for piece in model.pieces}
        independent = (
            trainer.model_type == BPE
            and trainer.byte_fallback  # else unknown characters of both sides become one token
            and not normalizer.precompiled_charsmap
            and not normalizer.remove_extra_whitespaces
            and normalizer.escape_whitespaces
            and not trainer.treat_whitespace_as_suffix
            and model.SentencePiece.USER_DEFINED not in kinds  # these are found before anything is joined
        )
        pieces = [piece.piece for piece in model.pieces if piece.type == model.SentencePiece.NORMAL]
        if not independent or not _whole(WORDS, pieces):
            return None
        return SegmentedSentencepiece(model, dtype, _whole(PARTS, pieces))

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The ids of each text."""
        ids = self._ids.__getitem__
        return [
            np.frombuffer(b"".join(map(ids, WORDS.findall(self._prefix + text if text else ""))), dtype=self._dtype)
            for text in texts
        ]


def _whole(cuts: re.Pattern[str], pieces: list[str]) -> bool:
    """Whether no piece of the vocabulary would be cut. Cuts depend on two neighbouring characters alone."""
    return all(len(cuts.findall(piece)) == 1 for piece in pieces)
