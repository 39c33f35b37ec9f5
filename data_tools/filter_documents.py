"""Documents that do not become part of a corpus: those that repeat an earlier one, or share text with evaluations.

Each part of the input is scanned by any process: what documents are compared by is written into one file. From these
files of all parts, in order, one process chooses the documents that go, and makes the report. The choice depends on the
input and the options only.
"""

import contextlib
import functools
import io
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_tools.contamination import EvaluationTexts
from data_tools.documents import shard_bytes
from data_tools.duplicates import PERMUTATIONS, Repeat, digest, find_repeats, signature
from data_tools.outputs import replace_file
from data_tools.parts import LeftOutRecords, Part, in_processes, readable
from data_tools.progress import ByteProgress
from moba_train.output_files import write_atomically

EXAMPLES = 10
"""Examples of each kind in the report."""
SHOWN_CHARACTERS = 120
"""Characters of an example."""

Place = tuple[int, int]
"""A document: its part, and its number there."""
Excerpts = Callable[[Iterable[int]], dict[int, dict[str, str]]]
"""Reads some documents again: the file, and the beginning of the text."""


def filter_file(output: str) -> Path:
    """File with the report of the comparison of documents."""
    return Path(f"{output}.filter.json")


def read_comparison(output: str, comparison: str) -> dict[str, Any] | None:
    """The report of this comparison, if it was made."""
    with contextlib.suppress(OSError, ValueError):
        report: dict[str, Any] = json.loads(filter_file(output).read_bytes())
        if report.get("comparison") == comparison:
            return report
    return None


def compare_documents(
    parts: Sequence[Part], output: str, comparison: str, workers: int
) -> tuple[list[frozenset[int]], dict[str, Any]]:
    """Numbers of the documents of each part that go, and the report, which is written.

    comparison: fingerprint of all that the report depends on

    Parts that an earlier run has scanned are not scanned again. Raises DataError when a file of evaluations cannot be
    read, and the errors of `in_processes`.
    """
    options = parts[0].options
    evaluations = _cached_evaluations(options.evaluations) if options.evaluations else None  # errors before the work
    waiting = [part for part in parts if not part.scan_file.exists()]
    total = sum(shard_bytes(part.shard) for part in parts)
    with ByteProgress("compare", total, done=total - sum(shard_bytes(part.shard) for part in waiting)) as progress:
        for size in in_processes(scan_part, waiting, workers):
            progress.advance(size)
    dropped, report = _choose(parts, evaluations)
    report = {"comparison": comparison, **report}
    content = json.dumps(report, indent=1, ensure_ascii=False)
    replace_file(filter_file(output), content.encode(errors="backslashreplace"))  # names of files may not be UTF-8
    return dropped, report


_cached_evaluations = functools.cache(EvaluationTexts)


def scan_part(part: Part) -> int:
    """Write what the documents of a part are compared by. Returns the size of its input in bytes."""
    options = part.options
    evaluations = _cached_evaluations(options.evaluations) if options.evaluations else None
    near = options.duplicates is not None and options.duplicates < 1
    digests = []
    signatures = []
    runs = [np.empty(0, np.uint64)]
    for _, document in readable(part, LeftOutRecords()):
        digests.append(digest(document))
        signatures += [signature(document)] if near else []
        runs += [evaluations.shared(document)] if evaluations else []
    file = io.BytesIO()
    np.savez(
        file,
        digests=np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2),
        signatures=np.array(signatures, np.uint32).reshape(-1, PERMUTATIONS),
        shared=np.repeat(np.arange(len(runs) - 1), [len(found) for found in runs[1:]]),
        runs=np.concatenate(runs),
    )
    write_atomically(part.scan_file, file.getvalue())
    return shard_bytes(part.shard)


def _choose(parts: Sequence[Part], evaluations: EvaluationTexts | None) -> tuple[list[frozenset[int]], dict[str, Any]]:
    """The documents that go, by the scans of all parts, and the report.

    Contaminated documents that are left out go first, so that none goes as the repeat of one of them. If they are kept,
    documents that repeat others do not count among them.
    """
    options = parts[0].options
    scans = []
    for part in parts:
        with np.load(part.scan_file) as file:
            scans.append(dict(file))
    begins = np.concatenate(([0], np.cumsum([len(found["digests"]) for found in scans])))
    digests = np.concatenate([found["digests"] for found in scans])
    signatures = np.concatenate([found.pop("signatures") for found in scans])
    report: dict[str, Any] = {"documents": len(digests)}

    def place(index: int) -> Place:
        part = int(np.searchsorted(begins, index, side="right")) - 1
        return part, index - int(begins[part])

    def excerpts(indices: Iterable[int]) -> dict[int, dict[str, str]]:
        return _excerpts(parts, {index: place(index) for index in indices})

    documents = np.concatenate([found["shared"] + begin for found, begin in zip(scans, begins, strict=False)])
    runs = np.concatenate([found["runs"] for found in scans])
    dropped = {*documents.tolist()} if options.drop_contaminated else set()
    if options.duplicates is not None:
        repeats = find_repeats(digests, signatures, options.duplicates, dropped)
        report["duplicates"] = {"similarity": options.duplicates, **_duplicates_report(repeats, excerpts)}
        dropped |= repeats.keys()
        remain = ~np.isin(documents, [*repeats])
        documents = documents[remain]
        runs = runs[remain]
    if evaluations is not None:
        found = _contamination_report(documents, runs, evaluations, excerpts)
        report["contamination"] = {"outcome": "left out" if options.drop_contaminated else "kept", **found}
    report["kept"] = len(digests) - len(dropped)
    by_part: list[set[int]] = [set() for _ in parts]
    for part_number, number in map(place, sorted(dropped)):
        by_part[part_number].add(number)
    return [*map(frozenset, by_part)], report


def _excerpts(parts: Sequence[Part], places: dict[int, Place]) -> dict[int, dict[str, str]]:
    """File and beginning of some documents, which are read again."""
    found: dict[Place, dict[str, str]] = {}
    for part in sorted({part for part, _ in places.values()}):
        for number, (path, document) in enumerate(readable(parts[part], LeftOutRecords())):
            if (part, number) in places.values():
                found[part, number] = {"file": path, "begins": document.decode()[:SHOWN_CHARACTERS]}
    return {index: found[place] for index, place in places.items()}


def _duplicates_report(repeats: dict[int, Repeat], excerpts: Excerpts) -> dict[str, Any]:
    near = {index: repeat for index, repeat in repeats.items() if repeat.similarity is not None}
    shown = [*near.items()][:EXAMPLES]
    shown += [item for item in repeats.items() if item[0] not in near][: EXAMPLES - len(shown)]
    found = excerpts(index for document, repeat in shown for index in (document, repeat.kept))
    return {
        "identical": len(repeats) - len(near),
        "near": len(near),
        "examples": [
            {
                "similarity": "identical" if repeat.similarity is None else round(repeat.similarity, 3),
                "removed": found[document],
                "kept": found[repeat.kept],
            }
            for document, repeat in shown
        ],
    }


def _contamination_report(
    documents: npt.NDArray[np.int64],
    runs: npt.NDArray[np.uint64],
    evaluations: EvaluationTexts,
    excerpts: Excerpts,
) -> dict[str, Any]:
    """documents, runs: pairs of a document and the hash of a run that it shares with an evaluation."""
    records: dict[str, set[int]] = defaultdict(set)
    sharing: dict[str, set[int]] = defaultdict(set)
    order = np.argsort(runs, kind="stable")
    found_runs, first = np.unique(runs[order], return_index=True)
    # In time linear in the pairs: documents may hold a whole evaluation, and all of its tasks one sentence.
    for run, readers in zip(found_runs.tolist(), np.split(documents[order], first)[1:], strict=True):
        by_file = defaultdict(set)
        for owner in evaluations.owners(run).tolist():
            by_file[evaluations.records[owner].file].add(owner)
        for file, owners in by_file.items():
            records[file] |= owners
            sharing[file].update(readers.tolist())
    shown = [int(np.argmax(documents == document)) for document in np.unique(documents)[:EXAMPLES]]
    found = excerpts(int(documents[pair]) for pair in shown)
    totals = Counter(record.file for record in evaluations.records)
    return {
        "documents": len(np.unique(documents)),
        "evaluations": {
            file: {
                "records": totals[file],
                "too_short": evaluations.too_short[file],
                "contaminated": len(records[file]),
                "documents": len(sharing[file]),
            }
            for file in evaluations.files
        },
        "examples": [
            {
                "evaluation": str(evaluations.records[evaluations.owners(int(runs[pair]))[0]]),
                "words": evaluations.run_words(int(runs[pair])),
                "document": found[int(documents[pair])],
            }
            for pair in shown
        ],
    }
