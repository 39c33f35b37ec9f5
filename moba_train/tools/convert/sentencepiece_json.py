"""A sentencepiece model as a tokenizer.json with the same ids, which is what transformers reads for every architecture.

The two libraries do not agree on every model, so the result is compared with the original before anything uses it: on a
sample of texts, every piece of the vocabulary, and pieces of the vocabulary in random order.
"""

import importlib
import json
import random
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import sentencepiece

from moba_train.errors import DataError
from moba_train.tools.confined_process import ConfinedProcess, WorkLimits
from moba_train.tools.text_tokenizer import Tokenizer

SPACE = "▁"
"""Sentencepiece's character for a space."""
_UNIGRAM = 1
_BPE = 2
_NEVER = -1e6
"""Score of pieces that text must not become, such as control symbols; scores of others are above -100."""
_RANDOM_TEXTS = 300
_LIMITS = WorkLimits(seconds=600, memory=4 << 30, reply=1 << 20, growth=100)
"""For a vocabulary of 262,144 pieces, each of which is a text to compare."""
_SAMPLE = (
    "The quick brown fox jumps over the lazy dog. It's 1,234.56 km away -- isn't it?\n\n\tYes: \"100 %\" (or so)!\r\n",
    "  two spaces, then  two and   three;    four\n\n\n        indented\n\ttab\t\ttabs   \n",
    " leading space",
    "trailing space ",
    "trailing spaces and newline  \n",
    "   ",
    "\n",
    "def f(x: int) -> dict[str, int]:\n    return {'a': x ** 2, \"b\": x != 0}  # [comment] <tag/> \\n @ $ ^ ~ | `\n",
    "Größe, naïve café, œuvre, ¿dónde?, příliš žluťoučký kůň, İstanbul ıssız, ﬁne ½ № ①\n",
    "Ελληνικά, русский текст, עברית, العربية, हिन्दी, ไทย, 日本語のテキスト、中文文本。한국어\n",
    "emoji 😀 👍🏽 👩‍👩‍👧‍👦 🇩🇪 and symbols → ∑ ∞ ≠ ▁ █ \u00a0 \u200b \u3000 \ufeff e\u0301\n",
    "zzzzzzzzzzzzzzzz----------------================aaaaaaaaaaaaaaaaaaaaaaaa........................",
)
"""Text in several scripts, with runs of spaces, code, emoji and characters that normalisations change."""


def convert_sentencepiece(tokenizer: Tokenizer) -> str:
    """Contents of a tokenizer.json with the ids of `tokenizer`. While `encode_special_tokens` of the package tokenizers
    is set, special tokens that are spelt out in a text are plain text.

    Raises DataError when that package is not installed, it has no such model, its ids differ, or a forged model exceeds
    a limit.
    """
    if find_spec("tokenizers") is None:
        raise DataError("the package tokenizers is missing; run `pip install tokenizers`")
    process = ConfinedProcess(__name__, "the conversion to tokenizer.json", None, b"", _LIMITS)
    try:
        _, contents = process.call(None, tokenizer.processor.serialized_model_proto(), _LIMITS)
    except ValueError as error:
        raise DataError(str(error)) from None
    return str(contents, "utf-8")


def made(_: None, __: memoryview) -> Callable[[None, memoryview], tuple[None, bytes]]:
    """In the child process: return what converts a model."""
    return lambda _, model: (None, _convert(bytes(model)).encode())


def _convert(serialized: bytes) -> str:
    from moba_train.tools.tokenizers_work import named, tokenizers

    processor = sentencepiece.SentencePieceProcessor(model_proto=serialized)
    schema: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    model = schema.ModelProto.FromString(serialized)
    with named("the package tokenizers cannot hold this model"):
        converted = tokenizers.Tokenizer.from_str(json.dumps(_contents(tokenizers, model)))
    converted.encode_special_tokens = True
    for text in _texts(processor):
        expected = processor.encode(text)
        with named("a tokenizer.json of this model cannot be used"):
            ids = converted.encode(text, add_special_tokens=False).ids
            decoded = converted.decode(expected)
        if ids != expected:
            raise DataError(f"a tokenizer.json gives other ids than the sentencepiece model, for instance for {text!r}")
        # Unknown characters have no text, and each library has its own mark for them.
        if processor.unk_id() not in expected and decoded != processor.decode(expected):
            raise DataError(f"a tokenizer.json decodes to other text than the sentencepiece model: {text!r}")
    contents: str = converted.to_str()
    return contents


def _contents(tokenizers: Any, model: Any) -> dict[str, Any]:
    """The contents of tokenizer.json for a sentencepiece model."""
    spec = model.normalizer_spec
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise DataError("a tokenizer.json cannot end words with their space (treat_whitespace_as_suffix)")
    if not spec.escape_whitespaces:
        raise DataError("a tokenizer.json cannot keep spaces as they are (escape_whitespaces: false)")
    added = [
        {"id": index, "content": piece.piece, "special": piece.type != piece.USER_DEFINED, **_EXACT}
        for index, piece in enumerate(model.pieces)
        if piece.type in (piece.UNKNOWN, piece.CONTROL, piece.USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": _normalizer(tokenizers, spec),
        "pre_tokenizer": _pre_tokenizer(model),
        "post_processor": None,
        "decoder": _decoder(spec),
        "model": _model(model),
    }


_EXACT = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""Options of an added token that is matched by its characters alone and takes no spaces around them."""


def _normalizer(tokenizers: Any, spec: Any) -> dict[str, Any]:
    """Characters replaced, spaces removed, a space before the first word, and spaces as `SPACE`, in this order."""
    steps: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        precompiled = tokenizers.normalizers.Precompiled(spec.precompiled_charsmap)
        steps.append(json.loads(precompiled.__getstate__()))
    if spec.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _pre_tokenizer(model: Any) -> dict[str, Any] | None:
    """Pre-tokenizer that isolates characters which the vocabulary lacks, if text could otherwise become a control
    symbol or byte that is spelt with them: `Unigram` rates an unknown character below any piece. None if none is
    needed."""
    if model.trainer_spec.model_type != _UNIGRAM or not model.trainer_spec.byte_fallback:
        return None
    known = {character for piece in model.pieces if piece.type == piece.NORMAL for character in piece.piece}
    excluded = {character for piece in model.pieces if piece.type != piece.NORMAL for character in piece.piece}
    if not (unknown := sorted(excluded - known)):
        return None
    pattern = {"Regex": "|".join(map(re.escape, unknown))}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _decoder(spec: Any) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spec.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _model(model: Any) -> dict[str, Any]:
    """The vocabulary: pieces with scores (unigram), or pieces and the merges that lead to them (BPE)."""
    byte_fallback = model.trainer_spec.byte_fallback
    unknown = next((index for index, piece in enumerate(model.pieces) if piece.type == piece.UNKNOWN), None)
    if model.trainer_spec.model_type == _UNIGRAM:
        scores = [[piece.piece, piece.score if piece.type == piece.NORMAL else _NEVER] for piece in model.pieces]
        return {"type": "Unigram", "unk_id": unknown, "vocab": scores, "byte_fallback": byte_fallback}
    if model.trainer_spec.model_type == _BPE:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else model.pieces[unknown].piece,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
            "vocab": {piece.piece: index for index, piece in enumerate(model.pieces)},
            "merges": list(_merges(model)),
        }
    raise DataError("a tokenizer.json cannot hold a sentencepiece model of words or characters, only unigram and bpe")


def _merges(model: Any) -> Iterator[tuple[str, str]]:
    """Yield every pair of pieces that makes a piece. Sentencepiece first merges the pair whose result has the best
    score."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                yield piece[:cut], piece[cut:]


def _texts(processor: sentencepiece.SentencePieceProcessor) -> Iterator[str]:
    """Yield texts to compare ids on: the sample, all pieces, and random sequences of pieces, always the same ones."""
    pieces = [processor.id_to_piece(index).replace(SPACE, " ") for index in range(processor.vocab_size())]
    yield from _SAMPLE
    yield "".join(_SAMPLE)
    yield from pieces
    draw = random.Random(0)
    for _ in range(_RANDOM_TEXTS):
        yield "".join(draw.choices(pieces, k=draw.randint(2, 60)))
