"""Files of tokenizers, sentencepiece models and Hugging Face's tokenizer.json: hashes and sizes.

Training needs no more of them: text is the tools' business (tools/text_tokenizer.py).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from moba_train.errors import DataError
from moba_train.foreign_files import TOKENIZER_BYTES, read_foreign, read_foreign_json

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
TIKTOKEN = "tiktoken:"
"""Prefix of tiktoken encodings, which some commands accept instead of a file."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Names of a tokenizer in a Hugging Face folder, which may have it in both forms."""


def tokenizer_file(path: str | Path) -> Path:
    """File of the tokenizer at `path`; in a folder, its tokenizer.json."""
    path = Path(path)
    return path / "tokenizer.json" if path.is_dir() else path


def tokenizer_hash(path: str | Path) -> str:
    """SHA-256 of the tokenizer's file, in hexadecimal: the `tokenizer_sha256` of the corpora that it makes. Raises
    ForeignFileError when it is not a regular file, OSError when it cannot be read."""
    return hashlib.sha256(read_foreign(tokenizer_file(path), TOKENIZER_BYTES)).hexdigest()


def tokenizer_hashes(path: str | Path) -> list[str]:
    """`tokenizer_hash` of the tokenizer at `path`, then of its other form in the same Hugging Face folder. An export of
    a model that was trained with a sentencepiece model has both that and an equal tokenizer.json."""
    file = tokenizer_file(path)
    others = [file.with_name(name) for name in TOKENIZERS if file.name in TOKENIZERS and name != file.name]
    return [tokenizer_hash(form) for form in (file, *others) if form == file or form.is_file()]


def read_sentencepiece(path: Path, roots: Sequence[Path] | None = None) -> tuple[Any, str]:
    """A sentencepiece model, as `SentencePieceProcessor`, and its SHA-256. Raises DataError when `path` is not one, or
    does not lie below one of `roots`."""
    try:
        model = read_foreign(path, TOKENIZER_BYTES, roots)
        return sentencepiece.SentencePieceProcessor(model_proto=model), hashlib.sha256(model).hexdigest()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{path} is not a readable sentencepiece model ({error}); make one with `moba-data train-tokenizer`"
        ) from error


def vocabulary_size(path: str | Path) -> int:
    """Number of token ids of the tokenizer at `path`; all are below it. Raises DataError when it cannot be read."""
    file = tokenizer_file(path)
    if file.suffix != ".json":
        size: int = read_sentencepiece(file)[0].vocab_size()
        return size
    try:
        contents = read_foreign_json(file, TOKENIZER_BYTES)
        pieces = contents["model"]["vocab"]  # of Unigram a list, with scores
        ids = [*(pieces.values() if isinstance(pieces, dict) else range(len(pieces)))]
        ids += [token["id"] for token in contents.get("added_tokens") or ()]
        return max(map(int, ids), default=-1) + 1
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(f"{file} is not a readable tokenizer.json: {error}") from error
