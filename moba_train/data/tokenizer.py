"""Sentencepiece models and what a corpus must remember of them; tokenizer.json files, to speak to a model."""

import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

from moba_train.errors import DataError

TIKTOKEN = "tiktoken:"
"""What the name of a tiktoken encoding begins with, where one is allowed."""
COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)
"""What a Hugging Face folder says about text, besides the model."""


def tokenizer_file(path: str | Path) -> Path:
    """The file of the tokenizer at `path`; a folder's is its tokenizer.json."""
    path = Path(path)
    return path / "tokenizer.json" if path.is_dir() else path


def special_tokens(folder: Path) -> dict[str, str]:
    """What Hugging Face's tokenizer_config.json in `folder` says of `eos_token` and the like, by name; empty without
    the file. Raises DataError when it cannot be read."""
    file = folder / "tokenizer_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        named = {key: value for key, value in config.items() if key.endswith("_token")}
        texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise DataError(f"{file} is not a tokenizer's config: {error!r}") from error
    return {key: text for key, text in texts.items() if isinstance(text, str)}


class TextTokenizer(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, or None."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without any that mark its beginning or end."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of these tokens."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """A loaded sentencepiece model."""

    processor: sentencepiece.SentencePieceProcessor
    name: str
    """File name, without the folder."""
    sha256: str
    """Of the file, in hexadecimal."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.processor.vocab_size()

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, if the model has one."""
        return self.processor.eos_id() if self.processor.eos_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        """See `TextTokenizer`."""
        return self.processor.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `TextTokenizer`."""
        return self.processor.decode(list(tokens))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Raises DataError when `path` is not a sentencepiece model."""
    try:
        model = Path(path).read_bytes()
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path} is not a readable sentencepiece model ({error}); make one with `moba-data train-tokenizer`"
        ) from error
    return Tokenizer(processor, Path(path).name, hashlib.sha256(model).hexdigest())


class HuggingFaceTokenizer:
    """A tokenizer.json, and the end of a document that the tokenizer_config.json beside it names.

    Raises DataError when a file cannot be read, or the package tokenizers is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise DataError(f"{path} needs the package tokenizers; run `pip install tokenizers`") from error
        try:
            content = path.read_bytes()
            self.library: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{path} is not a readable tokenizer.json: {error}") from error
        # A file may cut or pad, which is for batches of prompts.
        self.library.no_truncation()
        self.library.no_padding()
        self.sha256 = hashlib.sha256(content).hexdigest()
        """Of the file, in hexadecimal."""
        self._eos = special_tokens(path.parent).get("eos_token")

    @property
    def vocab_size(self) -> int:
        """See `TextTokenizer`."""
        return max(self.library.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eos_id(self) -> int | None:
        """See `TextTokenizer`."""
        return None if self._eos is None else self.library.token_to_id(self._eos)

    def encode(self, text: str) -> list[int]:
        """See `TextTokenizer`. Special tokens in the text, as chat templates write them, are read as such."""
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """See `TextTokenizer`."""
        return self.library.decode(list(tokens), skip_special_tokens=False)


def load_text_tokenizer(path: str | Path) -> TextTokenizer:
    """A tokenizer.json, or a folder with one, else a sentencepiece model. Raises DataError when it cannot be read."""
    if str(path).startswith(TIKTOKEN):
        raise DataError(
            f"{path} given; tiktoken encodings are for `moba-data tokenize` alone. Give a sentencepiece model, a "
            "tokenizer.json, or a folder with one"
        )
    path = tokenizer_file(path)
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else load_tokenizer(path)


def tokenizer_files(path: Path) -> list[Path]:
    """The tokenizer at `path` and the files beside it that belong to it in a Hugging Face folder."""
    folder = path if path.is_dir() else path.parent
    beside = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    return beside if path.is_dir() or path in beside else [path, *beside]
