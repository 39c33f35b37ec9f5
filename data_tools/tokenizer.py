"""A sentencepiece model and what a corpus must remember of it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from moba_train.errors import DataError


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
