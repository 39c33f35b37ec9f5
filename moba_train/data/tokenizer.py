"""Tokenizers: sentencepiece models and Hugging Face's tokenizer.json files."""

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
"""Prefix of tiktoken encodings, where one is accepted in place of a file."""
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
"""Files of a Hugging Face folder that belong to the tokenizer, not to the model."""


def tokenizer_file(path: str | Path) -> Path:
    """File of the tokenizer at `path`; in a folder, its tokenizer.json."""
    path = Path(path)
    return path / "tokenizer.json" if path.is_dir() else path


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens such as `eos_token` in the tokenizer_config.json of `folder`, by name; empty without the file.

    Raises DataError when the file cannot be read.
    """
    file = folder / "tokenizer_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        tokens = {key: value for key, value in config.items() if key.endswith("_token")}
        texts = {key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()}
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise DataError(f"{file} is not a readable tokenizer config: {error!r}") from error
    return {key: text for key, text in texts.items() if isinstance(text, str)}


class TextTokenizer(Protocol):
    """The interface of a tokenizer that generation and fine-tuning need."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, or None if the tokenizer has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without tokens that mark its beginning or end."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """A loaded sentencepiece model."""

    processor: sentencepiece.SentencePieceProcessor
    name: str
    """File name, without the folder."""
    sha256: str
    """SHA-256 of the file, in hexadecimal."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.processor.vocab_size()

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, or None if the model has none."""
        return self.processor.eos_id() if self.processor.eos_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens that are spelt out in it are plain text."""
        return self.processor.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without control tokens."""
        return self.processor.decode(list(tokens))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a sentencepiece model. Raises DataError when `path` is not one."""
    try:
        model = Path(path).read_bytes()
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path} is not a readable sentencepiece model ({error}); make one with `moba-data train-tokenizer`"
        ) from error
    return Tokenizer(processor, Path(path).name, hashlib.sha256(model).hexdigest())


class HuggingFaceTokenizer:
    """A tokenizer.json. The end of a document is the `eos_token` of the tokenizer_config.json in the same folder.

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
        # The file may ask for truncation or padding, which is meant for batches of prompts.
        self.library.no_truncation()
        self.library.no_padding()
        self.sha256 = hashlib.sha256(content).hexdigest()
        """SHA-256 of the file, in hexadecimal."""
        self._eos = special_tokens(path.parent).get("eos_token")

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return max(self.library.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, or None if the folder names none."""
        return None if self._eos is None else self.library.token_to_id(self._eos)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens that are spelt out in it, as by chat templates, become these tokens."""
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with special tokens spelt out."""
        return self.library.decode(list(tokens), skip_special_tokens=False)


def load_text_tokenizer(path: str | Path) -> TextTokenizer:
    """Load a tokenizer.json, a folder with one, or a sentencepiece model. Raises DataError when it cannot be read."""
    if str(path).startswith(TIKTOKEN):
        raise DataError(
            f"{path} given; tiktoken encodings work with `moba-data tokenize` only. Give a sentencepiece model, a "
            "tokenizer.json, or a folder with one"
        )
    path = tokenizer_file(path)
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else load_tokenizer(path)


def tokenizer_files(path: Path) -> list[Path]:
    """The tokenizer at `path`, and the files in the same folder that belong to it."""
    folder = path if path.is_dir() else path.parent
    companions = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    return companions if path.is_dir() or path in companions else [path, *companions]
