"""The corpus that the arms of all figures are trained and validated on.

A folder that `moba-data corpus` wrote: `train` and `valid`, whose sidecars name the vocabulary, and the tokenizer.
`--quick` makes a small one from the Python sources of this environment, as bytes.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.python_sources import BYTES, write_text
from data_tools.corpus_writer import IndexedDatasetWriter
from experiments.byte_tokenizer import write_byte_tokenizer
from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.errors import DataError
from moba_train.tools.text_tokenizer import load_text_tokenizer

QUICK_TOKENS = 1 << 19


@dataclass(frozen=True)
class Corpus:
    """Tokenised corpora of one folder, and those that a figure adds."""

    folder: Path
    """With the corpora `train` and `valid`, and others that arms may name."""
    vocab_size: int
    tokenizer: Path | None = None
    added: Path | None = None
    """Folder of corpora that a figure has made (`Figure.prepare`)."""

    def data(self) -> dict[str, Any]:
        """The section `data` of a recipe."""
        return {
            "train": [{"path": self.find("train")}],
            "validation": [{"path": self.find("valid")}],
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
        train, valid = (IndexedDataset(self.folder / name) for name in ("train", "valid"))
        return {
            "train": train.fingerprint.name,
            "valid": valid.fingerprint.name,
            "training_tokens": train.tokens,
            "validation_tokens": valid.tokens,
            "vocab_size": self.vocab_size,
        }


class OwnDocuments(Corpus):
    """No text at all, for figures that make all of their documents."""

    def data(self) -> dict[str, Any]:
        """Nothing: recipes name what the figure has made."""
        return {}

    def identity(self) -> dict[str, Any]:
        """Nothing: the figure's program and its recipes say what the documents are."""
        return {}


def open_corpus(folder: Path) -> Corpus:
    """The corpus that `moba-data corpus` wrote to `folder`. Raises DataError where a part or its vocabulary is not
    there."""
    sizes = set()
    for name in ("train", "valid"):
        info = IndexedDataset(folder / name).info or {}
        if "vocab_size" not in info:
            raise DataError(f"{corpus_file(folder / name, 'json')}: no vocab_size; make it with moba-data corpus")
        sizes.add(int(info["vocab_size"]))
    if len(sizes) > 1:
        raise DataError(f"{folder}: train and valid have different vocabularies: {', '.join(map(str, sorted(sizes)))}")
    tokenizers = (folder / name for name in ("tokenizer.model", "tokenizer.json"))
    return Corpus(folder, sizes.pop(), next((file for file in tokenizers if file.is_file()), None))


def quick_corpus(folder: Path) -> Corpus:
    """Bytes of Python sources, made in `folder` unless they are there."""
    if not corpus_file(folder / "train", "idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder, QUICK_TOKENS)
    tokenizer = folder / "tokenizer.json"
    write_byte_tokenizer(tokenizer)
    return Corpus(folder, BYTES, tokenizer)


def write_short(corpus: Corpus, name: str, prefix: Path, most: int, *, ends: bool = False) -> None:
    """Write the text of `name` in documents of at most `most` tokens, unless it is there. `ends`: each ends with the
    tokenizer's end of text, if it has one."""
    if corpus_file(prefix, "idx").exists():
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    source = IndexedDataset(corpus.find(name))
    eos = load_text_tokenizer(str(corpus.tokenizer)).eos_id if ends and corpus.tokenizer else None
    most -= eos is not None
    with IndexedDatasetWriter(prefix, source.dtype) as writer:
        for document in range(source.documents):
            length = int(source.document_lengths[document])
            for start, stop in pairwise([*range(0, length, most), length]):
                tokens = source.document(document, start, stop)
                writer.add_document(tokens if eos is None else np.append(tokens, tokens.dtype.type(eos)))


def write_joined(source: Path, prefix: Path, least: int) -> None:
    """Write the documents of `source` in random order as documents of at least `least` tokens, of which the last one
    may be shorter, unless they are there: text in which a model attends across documents."""
    if corpus_file(prefix, "idx").exists():
        return
    short = IndexedDataset(source)
    joined: list[np.ndarray] = []
    order = np.random.default_rng(0).permutation(short.documents)
    with IndexedDatasetWriter(prefix, short.dtype) as writer:
        for place, document in enumerate(map(int, order), start=1):
            joined.append(short.document(document))
            if place == short.documents or sum(map(len, joined)) >= least:
                writer.add_document(np.concatenate(joined))
                joined.clear()
