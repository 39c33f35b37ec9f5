"""Tokenizers: sentencepiece models and Hugging Face's tokenizer.json files.

A tokenizer.json makes special tokens from text that spells them out. Sentencepiece never makes control tokens, such as
</s>, from text, nor text from them; tools/chat/control_tokens.py does that with either type.
"""

import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

from moba_train.errors import DataError
from moba_train.foreign_files import TOKENIZER_BYTES, read_foreign, read_foreign_json

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
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


class TextTokenizer(Protocol):
    """Interface of a tokenizer that generation and fine-tuning need."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all are below it."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, or None if the tokenizer has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without tokens that mark its beginning or end.

        Raises UnicodeEncodeError, a ValueError, for half of a surrogate pair, which JSON can hold and UTF-8 cannot.
        """
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
        """Number of token ids; all are below it."""
        return self.processor.vocab_size()

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, or None if the model has none."""
        return self.processor.eos_id() if self.processor.eos_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens that are spelt out in it are plain text."""
        return self.processor.encode(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without control tokens."""
        return self.processor.decode(list(tokens))


def load_tokenizer(path: str | Path, roots: Sequence[Path] | None = None) -> Tokenizer:
    """Load a sentencepiece model. Raises DataError when `path` is not one, or does not lie below one of `roots`."""
    try:
        model = read_foreign(Path(path), TOKENIZER_BYTES, roots)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{path} is not a readable sentencepiece model ({error}); make one with `moba-data train-tokenizer`"
        ) from error
    return Tokenizer(processor, Path(path).name, hashlib.sha256(model).hexdigest())


class HuggingFaceTokenizer:
    """A tokenizer.json. The end of a document is the `eos_token` that the files in the same folder name
    (`special_tokens`).

    Raises DataError when a file cannot be read or does not lie below one of `roots`, or the package tokenizers is not
    installed.
    """

    def __init__(self, path: Path, roots: Sequence[Path] | None = None) -> None:
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise DataError(f"{path} needs the package tokenizers; run `pip install tokenizers`") from error
        try:
            content = read_foreign(path, TOKENIZER_BYTES, roots)
            self.library: Any = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{path} is not a readable tokenizer.json: {error}") from error
        # The file may ask for truncation or padding, which is meant for batches of prompts.
        self.library.no_truncation()
        self.library.no_padding()
        self.sha256 = hashlib.sha256(content).hexdigest()
        """SHA-256 of the file, in hexadecimal."""
        self._eos = special_tokens(path.parent, roots).get("eos_token")

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all are below it."""
        return max(self.library.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, or None if the folder names none."""
        return None if self._eos is None else self.library.token_to_id(self._eos)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens that are spelt out in it, as by chat templates, become these tokens."""
        text.encode()  # the library's own error, a TypeError, does not say what is wrong
        return self.library.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with special tokens spelt out."""
        return self.library.decode(list(tokens), skip_special_tokens=False)


def load_text_tokenizer(path: str | Path, roots: Sequence[Path] | None = None) -> TextTokenizer:
    """Load a tokenizer.json, a folder with one, or a sentencepiece model.

    roots: folders below which its files must lie, links followed; None: anywhere

    Raises DataError when it cannot be read.
    """
    if str(path).startswith(TIKTOKEN):
        raise DataError(
            f"{path} given; tiktoken encodings work with `moba-data tokenize` only. Give a sentencepiece model, a "
            "tokenizer.json, or a folder with one"
        )
    path = tokenizer_file(path)
    return HuggingFaceTokenizer(path, roots) if path.suffix == ".json" else load_tokenizer(path, roots)
