"""Tokenizers of text: sentencepiece models and Hugging Face's tokenizer.json files.

A tokenizer.json makes special tokens from text that spells them out. Sentencepiece never makes control tokens, such as
</s>, from text, nor text from them; `ChatTokenizer` does that with either type.

The library that reads tokenizer.json ends its process, or fills the memory, with rules that are forged. It therefore
works in a `ConfinedProcess` (tools/tokenizers_work.py).
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import sentencepiece

from moba_train.config.model import LARGEST_WIDTH
from moba_train.data.tokenizer import TIKTOKEN, TOKENIZER_CONFIG, read_sentencepiece, tokenizer_file
from moba_train.errors import DataError
from moba_train.foreign_files import TOKENIZER_BYTES, read_foreign, read_foreign_json
from moba_train.tools.confined_process import ConfinedProcess, WorkLimits

SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"

SECONDS = 30
"""Processor time for a request, and as much for every `TEXT_PER_LIMIT` bytes of its text."""
TEXT_PER_LIMIT = 1 << 19
"""30 s for half a MiB: a twentieth of the speed of honest files (benchmarks/results/tokenize-cpu.json)."""
MEMORY = 1 << 30
"""Bytes for a request, with `MEMORY_PER_FILE_BYTE` and `MEMORY_PER_TEXT_BYTE` for each byte of the two."""
MEMORY_PER_FILE_BYTE = 60
MEMORY_PER_TEXT_BYTE = 400
"""A text of 8 MB takes tokenizers 0.23 135 bytes for each of its own."""
REPLY = 1 << 20
"""Bytes of an answer, with `REPLY_PER_BYTE` for each byte of the request."""
REPLY_PER_BYTE = 200


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


class Tokenizer:
    """A loaded sentencepiece model.

    name: of the file, without the folder; sha256: of the file, in hexadecimal
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, name: str, sha256: str) -> None:
        self.processor = processor
        self.name = name
        self.sha256 = sha256
        self.vocab_size: int = processor.vocab_size()
        self.eos_id = processor.eos_id() if processor.eos_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens that are spelt out in it are plain text."""
        return self.processor.encode(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without control tokens."""
        return self.processor.decode(list(tokens))


def load_tokenizer(path: str | Path, roots: Sequence[Path] | None = None) -> Tokenizer:
    """Load a sentencepiece model. Raises DataError when `path` is not one, or does not lie below one of `roots`."""
    processor, sha256 = read_sentencepiece(Path(path), roots)
    return Tokenizer(processor, Path(path).name, sha256)


class HuggingFaceTokenizer:
    """A tokenizer.json. The end of a document is the `eos_token` that the files in the same folder name
    (`special_tokens`).

    Raises DataError when a file cannot be read or does not lie below one of `roots`, the package tokenizers is not
    installed, or the work exceeds a limit.
    """

    def __init__(self, path: Path, roots: Sequence[Path] | None = None) -> None:
        if find_spec("tokenizers") is None:
            raise DataError(f"{path} needs the package tokenizers; run `pip install tokenizers`")
        self._path = path
        try:
            content = read_foreign(path, TOKENIZER_BYTES, roots)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable tokenizer.json: {error}") from error
        self._file_memory = MEMORY_PER_FILE_BYTE * len(content)
        module = "moba_train.tools.tokenizers_work"
        self._process = ConfinedProcess(module, f"the tokenizer {path}", LARGEST_WIDTH, content, self._limits(0))
        self.sha256 = hashlib.sha256(content).hexdigest()
        """SHA-256 of the file, in hexadecimal."""
        self.vocab_size: int
        """Number of token ids; all are below it."""
        self.has_fast_engine: bool
        """True if the package fastokens is installed and supports this file."""
        (self.vocab_size, self.has_fast_engine), _ = self._call(["facts"])
        eos = special_tokens(path.parent, roots).get("eos_token")
        self.eos_id = None if eos is None else self.token_to_id(eos)
        """Token id of the end of a document, or None if the folder names none."""

    def token_to_id(self, token: str) -> int | None:
        """Token id of a token, or None if the vocabulary lacks it."""
        found: int | None = self._call(["token_to_id", token])[0]
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens that are spelt out in it, as by chat templates, become these tokens."""
        (ids,) = self.encode_batch([text])
        found: list[int] = ids.tolist()
        return found

    def encode_batch(self, texts: Sequence[str], fast: bool = False) -> list[npt.NDArray[np.uint32]]:
        """Token ids of each text, by the library or by the fast engine."""
        encoded = [text.encode() for text in texts]
        counts, ids = self._call(["encode", fast, [*map(len, encoded)]], b"".join(encoded))
        return np.split(np.frombuffer(ids, dtype=np.uint32), np.cumsum(counts)[:-1]) if counts else []

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with special tokens spelt out."""
        text: str = self._call(["decode", [*map(int, tokens)]])[0]
        return text

    def _call(self, request: list[Any], content: bytes = b"") -> tuple[Any, memoryview]:
        try:
            return self._process.call(request, content, self._limits(len(content)))
        except ValueError as error:
            problem = str(error)
            raise DataError(problem if str(self._path) in problem else f"{self._path} {problem}") from None

    def _limits(self, size: int) -> WorkLimits:
        memory = MEMORY + self._file_memory + MEMORY_PER_TEXT_BYTE * size
        return WorkLimits(SECONDS * (1 + size // TEXT_PER_LIMIT), memory, REPLY, REPLY_PER_BYTE)


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


class ChatTokenizer:
    """A tokenizer of either type whose special tokens a text may spell out, as chat templates write it."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.eos_id = tokenizer.eos_id
        # Sentencepiece never makes control tokens, such as </s>, from text.
        processor = tokenizer.processor if isinstance(tokenizer, Tokenizer) else None
        controls = filter(processor.is_control, range(processor.vocab_size())) if processor else ()
        self._names: dict[int, str] = {token: processor.id_to_piece(token) for token in controls} if processor else {}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens that are spelt out in it become these tokens."""
        if not self._names:
            return self._tokenizer.encode(text)
        ids = {name: token for token, name in self._names.items()}
        parts = re.split("(" + "|".join(map(re.escape, ids)) + ")", text)
        return [token for part in parts for token in ([ids[part]] if part in ids else self._tokenizer.encode(part))]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with special tokens spelt out."""
        text = ""
        for is_control, group in itertools.groupby(tokens, key=self._names.__contains__):
            found = [*group]
            text += "".join(map(self._names.__getitem__, found)) if is_control else self._tokenizer.decode(found)
        return text


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
