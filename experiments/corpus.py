"""The corpus that the arms of all figures are trained and validated on.

A folder with tokenised corpora: `train`, or several below `train/`, and `valid`, or several below `valid/`. Their
sidecars name the vocabulary. `--quick` makes a small one from the Python sources of this environment, as bytes.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.float8_loss import write_text
from experiments.byte_tokenizer import write_byte_tokenizer
from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.errors import DataError

QUICK_TOKENS = 1 << 19
BYTES = 256
"""Vocabulary of the quick corpus."""


@dataclass(frozen=True)
class Corpus:
    """Tokenised corpora of one folder, and those that a figure adds."""

    folder: Path
    train: tuple[Path, ...]
    """Prefixes, blended by their tokens."""
    validation: tuple[Path, ...]
    vocab_size: int
    tokenizer: Path | None = None
    added: Path | None = None
    """Folder of corpora that a figure has made (`Figure.prepare`)."""

    def data(self) -> dict[str, Any]:
        """The section `data` of a recipe."""
        return {
            "train": [{"path": str(prefix), "weight": IndexedDataset(prefix).tokens} for prefix in self.train],
            "validation": [
                {"path": str(prefix), "weight": IndexedDataset(prefix).tokens} for prefix in self.validation
            ],
            **({"tokenizer": str(self.tokenizer)} if self.tokenizer else {}),
        }

    def find(self, name: str) -> str:
        """The prefix of the corpus that an arm calls `name`. Raises DataError where there is none."""
        for folder in filter(None, (self.added, self.folder)):
            if corpus_file(folder / name, "idx").is_file():
                return str(folder / name)
        raise DataError(f"an arm names the corpus {name!r}, which is neither in {self.folder} nor made by the figure")

    def identity(self) -> dict[str, Any]:
        """What tells this corpus from another one, without paths; the same for every copy."""
        parts = [IndexedDataset(prefix) for prefix in (*self.train, *self.validation)]
        names = "".join(part.fingerprint.name for part in parts)
        return {
            "sha256": hashlib.sha256(names.encode()).hexdigest()[:32],
            "training_tokens": sum(part.tokens for part in parts[: len(self.train)]),
            "validation_tokens": sum(part.tokens for part in parts[len(self.train) :]),
            "vocab_size": self.vocab_size,
        }


def open_corpus(folder: Path, added: Path | None = None) -> Corpus:
    """The corpora in `folder`. Raises DataError where training or validation text or a vocabulary is missing."""
    train, validation = (_prefixes(folder, part) for part in ("train", "valid"))
    sizes = {vocabulary(prefix) for prefix in (*train, *validation)}
    if len(sizes) != 1:
        raise DataError(f"{folder}: its corpora have different vocabularies: {', '.join(map(str, sorted(sizes)))}")
    tokenizer = next((file for file in sorted(folder.glob("tokenizer.*")) if file.suffix in (".model", ".json")), None)
    return Corpus(folder, train, validation, sizes.pop(), tokenizer, added)


def _prefixes(folder: Path, part: str) -> tuple[Path, ...]:
    files = sorted([*folder.glob(f"{part}.idx"), *folder.glob(f"{part}/*.idx")])
    if not files:
        raise DataError(f"{folder}: holds neither {part}.idx nor {part}/*.idx; make it as docs/science.md says")
    return tuple(file.with_suffix("") for file in files)


def vocabulary(prefix: Path) -> int:
    """Vocabulary that a corpus was made with. Raises DataError where its sidecar does not say."""
    info: Mapping[str, Any] = IndexedDataset(prefix).info or {}
    if "vocab_size" not in info:
        raise DataError(f"{corpus_file(prefix, 'json')}: vocab_size is missing; make the corpus with moba-data")
    return int(info["vocab_size"])


def quick_corpus(folder: Path, added: Path | None = None) -> Corpus:
    """Bytes of Python sources, made in `folder` unless they are there."""
    if not corpus_file(folder / "train", "idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder, QUICK_TOKENS)
    tokenizer = folder / "tokenizer.json"
    write_byte_tokenizer(tokenizer)
    return Corpus(folder, (folder / "train",), (folder / "valid",), BYTES, tokenizer, added)
