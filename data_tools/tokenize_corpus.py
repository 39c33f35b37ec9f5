"""From text to a corpus: split the input into shards, tokenize missing parts in several processes, merge them in order.

A part (parts.py) becomes one corpus for each split, and a report. The report is written last, and marks the part as
finished. If documents are compared (filter_documents.py), this comes first.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.corpus_writer import IndexedDatasetWriter, dtype_for
from data_tools.documents import (
    DOCUMENT_BYTES,
    Shard,
    cut_shards,
    shard_bytes,
)
from data_tools.duplicates import check_similarity
from data_tools.encoders import Encoder, load_encoder
from data_tools.filter_documents import compare_documents, filter_file, read_comparison
from data_tools.outputs import (
    already_made,
    choose_split,
    corpus_prefixes,
    list_skipped,
    locked_folder,
    splits,
    write_errors,
)
from data_tools.parts import (
    LeftOutRecords,
    Part,
    TokenizeOptions,
    delete_parts_of_other_work,
    empty_folder,
    in_processes,
    readable,
)
from data_tools.progress import ByteProgress
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError
from moba_train.output_files import write_atomically

BATCH_BYTES = 1 << 20
"""Text that is passed to the engine at a time."""
CHECKED_CHARACTERS = 1 << 15
"""Text of each part on which the engine is compared with the tokenizer's own library."""


@dataclass(frozen=True)
class PartReport:
    """Result of a part."""

    size: int
    """Size of the input in bytes."""
    tokens: int
    bad: list[str]
    """Skipped records, as "file:line: reason"."""
    empty: int = 0
    """Empty documents, which are left out."""


def read_report(part: Part) -> PartReport:
    """The report of a finished part."""
    return PartReport(**json.loads(part.report_file.read_text(encoding="utf-8")))


def make_part(part: Part) -> PartReport:
    """Tokenize one shard.

    Where the engine is not exact on the first documents, the tokenizer's own library encodes all. Raises DataError for
    an unreadable record if `fail_on_error`.
    """
    options = part.options
    encoder = _cached_encoder(options.tokenizer, options.eos, options.bos)
    dtype = dtype_for(encoder.vocab_size)
    bos = np.array([] if encoder.bos_id is None else [encoder.bos_id], dtype=dtype)
    eos = np.array([encoder.eos_id] if options.append_eos else [], dtype=dtype)
    left_out = LeftOutRecords()
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(f"{part.prefix}{split}", dtype))
            for split in splits(options.holdout)
        ]
        unchecked = True
        for documents in _batches(part, left_out):
            texts = [document.decode() for document in documents]
            if unchecked:
                encoder = encoder.checked(_first(texts, CHECKED_CHARACTERS))
                unchecked = False
            for document, ids in zip(documents, encoder.encode(texts), strict=True):
                writers[choose_split(document, options.holdout)].add_document(np.concatenate((bos, ids, eos)))
        report = PartReport(
            shard_bytes(part.shard), sum(writer.tokens for writer in writers), left_out.bad, left_out.empty
        )
    write_atomically(part.report_file, json.dumps(asdict(report)))
    return report


def _batches(part: Part, left_out: LeftOutRecords) -> Iterator[list[bytes]]:
    """Yield the documents of `readable` that are not dropped, about `BATCH_BYTES` at a time."""
    batch: list[bytes] = []
    size = 0
    for number, (_, document) in enumerate(readable(part, left_out)):
        if number in part.dropped:
            continue
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _first(texts: Sequence[str], characters: int) -> list[str]:
    """The first `characters` characters of `texts`, the last text truncated."""
    found = []
    for text in texts:
        found.append(text[:characters])
        characters -= len(text)
        if characters <= 0:
            break
    return found


@functools.cache
def _cached_encoder(tokenizer: str, eos: str | None, bos: str | None) -> Encoder:
    return load_encoder(tokenizer, True, eos, bos)


@dataclass(frozen=True)
class TokenizeResult:
    """Result of `tokenize_corpus`."""

    corpora: dict[str, IndexedDataset]
    """Corpora, by prefix."""
    bad: list[str]
    """Skipped records, as "file:line: reason"."""
    empty: int
    """Empty texts and empty files, which are no documents."""
    parts: int
    """Number of parts."""
    resumed_parts: int
    """Number of parts that an earlier run had finished."""
    engine: str
    """Name of the engine that encoded the text."""
    already_complete: bool
    """True if identical corpora existed before, so that nothing was done."""
    filtered: dict[str, Any] | None = None
    """Report of the comparison of documents (`compare_documents`); None without."""


def tokenize_corpus(files: Sequence[str], output: str, options: TokenizeOptions, workers: int) -> TokenizeResult:
    """Tokenize `files` into the corpus `output`, or into `output`-train and `output`-valid with a holdout.

    Raises DataError when the tokenizer or all of the input cannot be used, or when `output` cannot be written or is a
    different corpus.
    """
    outputs = corpus_prefixes(output, options.holdout)
    if options.duplicates is not None:
        check_similarity(options.duplicates)
    tokenizer = load_encoder(options.tokenizer, True, options.eos, options.bos)
    if options.append_eos and tokenizer.eos_id is None:
        raise DataError(f"{options.tokenizer} has no end-of-document token; give --eos TOKEN or --no-append-eos")
    shards = cut_shards(files)
    if not shards:
        raise DataError("every --input file is empty: there is no document")
    work = _work_fingerprint(shards, options, tokenizer)
    comparison = _comparison_fingerprint(work, options)
    folder = Path(f"{output}.parts")
    parts = [Part(str(folder / f"{number:06d}"), shard, options) for number, shard in enumerate(shards)]
    bad: list[str] = []
    empty = 0
    resumed = len(parts)
    with write_errors(output), locked_folder(folder):
        already_complete = already_made(dict.fromkeys(outputs, work))
        filtered = read_comparison(output, comparison) if options.compares else None
        compare = options.compares and (filtered is None or not already_complete)
        if compare or not already_complete:
            delete_parts_of_other_work(folder, comparison)
        if compare:
            dropped, filtered = compare_documents(parts, output, comparison, workers)
            parts = [replace(part, dropped=numbers) for part, numbers in zip(parts, dropped, strict=True)]
        if not already_complete:
            if not options.compares:
                filter_file(output).unlink(missing_ok=True)
            resumed = _make_missing_parts(parts, workers)
            reports = [read_report(part) for part in parts]
            bad = [record for report in reports for record in report.bad]
            empty = sum(report.empty for report in reports) + sum(os.path.getsize(file) == 0 for file in files)
            list_skipped(output, bad)
            if not any(report.tokens for report in reports):
                raise DataError(_no_document(bad, empty, filtered))
            _merge(parts, outputs, options, tokenizer, work)
        empty_folder(folder)
    corpora = {prefix: IndexedDataset(prefix) for prefix in outputs}
    return TokenizeResult(corpora, bad, empty, len(parts), resumed, tokenizer.engine, already_complete, filtered)


def _no_document(bad: Sequence[str], empty: int, filtered: dict[str, Any] | None) -> str:
    if filtered and filtered["documents"] and not filtered["kept"]:
        return f"none of the {filtered['documents']:,} documents stays: all share text with --evaluations"
    if not bad:
        return f"the --input files hold no document: {empty:,} texts or files are empty"
    return f"none of the {len(bad):,} records can be read: {bad[0]}"


def _make_missing_parts(parts: Sequence[Part], workers: int) -> int:
    """Make the parts that no earlier run finished, and return the number of parts that were finished already."""
    earlier = [read_report(part) for part in parts if part.report_file.exists()]
    waiting = [part for part in parts if not part.report_file.exists()]
    total = sum(shard_bytes(part.shard) for part in parts)
    with ByteProgress("tokenize", total, done=sum(report.size for report in earlier)) as progress:
        for report in in_processes(make_part, waiting, workers):
            progress.advance(report.size, report.tokens)
    return len(earlier)


def _merge(
    parts: Sequence[Part], outputs: Sequence[str], options: TokenizeOptions, tokenizer: Encoder, work: str
) -> None:
    info: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id if options.append_eos else None,
        "work": work,
    }
    for split, prefix in zip(splits(options.holdout), outputs, strict=True):
        with IndexedDatasetWriter(prefix, dtype_for(tokenizer.vocab_size), info) as writer:
            for part in parts:
                writer.merge(f"{part.prefix}{split}")


def _work_fingerprint(shards: Sequence[Shard], options: TokenizeOptions, tokenizer: Encoder) -> str:
    """SHA-256 of everything the corpus depends on; input files enter by size and modification time."""
    given = asdict(options) | {"tokenizer": tokenizer.sha256, "eos": tokenizer.eos_id, "fast": None}
    if options.document_bytes == DOCUMENT_BYTES:
        del given["document_bytes"]  # defaults do not enter, so that a new option leaves the corpora that exist valid
    if options.encoding_errors == "strict":
        del given["encoding_errors"]
    if options.duplicates is None:
        del given["duplicates"]
    del given["evaluations"], given["drop_contaminated"]
    if options.drop_contaminated:
        given["evaluations"] = _evaluation_files(options)
    work = {
        "chunks": [[asdict(chunk) for chunk in shard] for shard in shards],
        "times": {chunk.path: os.stat(chunk.path).st_mtime_ns for shard in shards for chunk in shard},
        "options": given,
    }
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()


def _comparison_fingerprint(work: str, options: TokenizeOptions) -> str:
    """SHA-256 of everything that the comparison of documents depends on; `work` if there is none with evaluations."""
    if not options.evaluations:
        return work
    return hashlib.sha256(json.dumps([work, _evaluation_files(options)]).encode()).hexdigest()


def _evaluation_files(options: TokenizeOptions) -> list[tuple[str, int, int]]:
    """Path, size and modification time of each file of evaluations."""
    return [(file, os.path.getsize(file), os.stat(file).st_mtime_ns) for file in options.evaluations]
