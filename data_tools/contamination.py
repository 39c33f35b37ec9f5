"""Contamination: runs of words that training documents share with texts of evaluations.

As in GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C), a document is contaminated by an evaluation if they share
a run of 13 words, or a whole text of 8 to 12 words. Shorter texts cannot be checked, and are counted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data_tools.dataset_folders import COLUMNS
from data_tools.documents import DOCUMENT_BYTES, BadRecord, read_lines, too_long
from data_tools.input_files import UnreadableRestError, open_input
from data_tools.word_hashes import run_hashes, word_hashes, words
from moba_train.errors import DataError
from moba_train.foreign_files import parse_json

RUN = 13
"""Words of a run."""
SHORTEST = 8
"""Words of the shortest text that is checked."""


class EvaluationRecord(NamedTuple):
    """One task of an evaluation: a line, a row, or a file of text."""

    file: str
    number: int
    """Line or row, counted from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class EvaluationTexts:
    """Runs of words in the files of evaluations.

    A record of JSON lines, of a JSON list, or of a file with columns has all texts in it, however deep they lie; any
    other file is one text. Raises DataError when a file cannot be read as a whole, or holds no text to check.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self.files = files
        self.records: list[EvaluationRecord] = []
        self.too_short: Counter[str] = Counter()
        """Records of each file that have no text of `SHORTEST` words."""
        hashes: list[npt.NDArray[np.uint64]] = []
        lengths = set()
        for file in files:
            before = len(hashes)
            for number, texts in _records(file):
                runs = [found for text in texts for found in [_text_runs(text)] if found[0]]
                lengths |= {length for length, _ in runs}
                hashes.append(np.unique(np.concatenate([found for _, found in runs] or [np.empty(0, np.uint64)])))
                self.records.append(EvaluationRecord(file, number))
                self.too_short[file] += not runs
            if self.too_short[file] == len(hashes) - before:
                raise DataError(f"--evaluations {file} has no text of at least {SHORTEST} words, so nothing to check")
        owners = np.repeat(np.arange(len(hashes)), [len(found) for found in hashes])
        order = np.argsort(np.concatenate(hashes), kind="stable")
        self._hashes = np.concatenate(hashes)[order]
        self._owners = owners[order]
        self._lengths = sorted(lengths)

    def shared(self, document: bytes) -> npt.NDArray[np.uint64]:
        """Hashes of the runs of words that a document shares with any record, uint64 [n], in ascending order."""
        own = word_hashes(document.decode())
        found = [np.empty(0, np.uint64)]
        for length in self._lengths:
            runs = run_hashes(own, length)
            places = np.minimum(np.searchsorted(self._hashes, runs), len(self._hashes) - 1)
            found.append(runs[self._hashes[places] == runs])
        return np.unique(np.concatenate(found))

    def owners(self, run: int) -> npt.NDArray[np.int64]:
        """Indices of the records that have this run of words, int64 [n]."""
        value = np.uint64(run)
        return self._owners[np.searchsorted(self._hashes, value) : np.searchsorted(self._hashes, value, side="right")]

    def run_words(self, run: int) -> str:
        """Words of a run, read again from the first record that has it."""
        record = self.records[self.owners(run)[0]]
        texts = next(texts for number, texts in _records(record.file) if number == record.number)
        for text in texts:
            length, found = _text_runs(text)
            if len(places := np.flatnonzero(found == np.uint64(run))):
                all_words = [word for piece in words(text) for word in piece]
                return " ".join(all_words[places[0] : places[0] + length])
        raise DataError(f"--evaluations {record.file} has changed while it was read; run the command again")


def _text_runs(text: str) -> tuple[int, npt.NDArray[np.uint64]]:
    """Words of a run, and the hash of each run of a text; 0 for a text that is too short."""
    found = word_hashes(text)
    length = min(len(found), RUN) if len(found) >= SHORTEST else 0
    return length, run_hashes(found, length) if length else np.empty(0, np.uint64)


def _records(file: str) -> Iterator[tuple[int, list[str]]]:
    """Number and texts of each record. Raises DataError where one cannot be read."""
    number = 1
    try:
        for number, value in _values(file):
            yield number, [*_texts(value)]
    except (ValueError, UnreadableRestError) as error:
        raise DataError(f"--evaluations {file}:{number}: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read --evaluations {file}: {error.strerror or error}") from error


def _values(file: str) -> Iterator[tuple[int, Any]]:
    if file.endswith(COLUMNS):
        from data_tools.columns import read_rows  # needs pyarrow

        for number, row in read_rows(file):
            if isinstance(row, BadRecord):
                raise DataError(f"--evaluations {row}")
            yield number, row
        return
    with open_input(file) as stream:
        if ".jsonl" in Path(file).suffixes:
            for number, (line, length) in enumerate(read_lines(stream, DOCUMENT_BYTES), 1):
                if length > DOCUMENT_BYTES:
                    raise ValueError(too_long(DOCUMENT_BYTES))
                if line.strip():
                    yield number, parse_json(line)
            return
        content = stream.read(DOCUMENT_BYTES + 1)
    if len(content) > DOCUMENT_BYTES:
        raise ValueError(too_long(DOCUMENT_BYTES))
    value = parse_json(content) if ".json" in Path(file).suffixes else content.decode()
    yield from enumerate(value if isinstance(value, list) else [value], 1)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
