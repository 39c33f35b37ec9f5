"""Special tokens, as the files of a Hugging Face folder name them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moba_train.data.tokenizer import TOKENIZER_CONFIG
from moba_train.errors import DataError
from moba_train.foreign_files import read_foreign_json

SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"


def special_tokens(folder: Path, roots: Sequence[Path] | None = None) -> dict[str, str]:
    """Special tokens such as `eos_token` of a Hugging Face folder, by name: those in its tokenizer_config.json, and
    others in its special_tokens_map.json; empty without these files.

    Raises DataError when a file cannot be read, or does not lie below one of `roots`.
    """
    read = (read_object(folder / name, roots) for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG))
    return {key: text for contents in read for key, text in token_texts(contents).items()}


def token_texts(contents: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens in tokenizer_config.json or special_tokens_map.json, which give each as text or as an object."""

    def texts() -> Iterator[tuple[str, str]]:
        for key, value in contents.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                yield key, text

    return dict(texts())


def read_object(file: Path, roots: Sequence[Path] | None) -> dict[str, Any]:
    """The object in a JSON file; empty without the file. Raises DataError."""
    try:
        contents = read_foreign_json(file, roots=roots) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not isinstance(contents, dict):
        raise DataError(f"{file} holds no JSON object")
    return contents
