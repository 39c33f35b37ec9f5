"""From text to a corpus: split the input into shards, tokenize missing parts in several processes, merge them in order.

A part is one shard of the input, tokenized once by any process: one corpus for each split, and a report. The report is
written last, and marks the part as finished. The result depends only on the input and the options, not on the number of
processes or on interruptions.
"""

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.corpus_writer import IndexedDatasetWriter, dtype_for
from data_tools.documents import (
    DOCUMENT_BYTES,
    BadRecord,
    EncodingErrors,
    Shard,
    cut_shards,
    read_documents,
    shard_bytes,
)
from data_tools.encoders import Encoder, load_encoder
from data_tools.outputs import (
    already_made,
    choose_split,
    corpus_prefixes,
    list_skipped,
    locked_folder,
    splits,
    write_errors,
)
from data_tools.progress import ByteProgress
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError, LaunchError
from moba_train.output_files import write_atomically

BATCH_BYTES = 1 << 20
"""Text that is passed to the engine at a time."""
CHECKED_CHARACTERS = 1 << 15
"""Text of each part on which the engine is compared with the tokenizer's own library."""


@dataclass(frozen=True)
class TokenizeOptions:
    """Options that determine the tokens of a corpus. Their names enter the fingerprint of the work: keep them."""

    tokenizer: str
    """Argument of `encoders.load_encoder`."""
    text_key: str
    append_eos: bool
    holdout: float
    """Fraction of the documents, selected by their content, that goes to the split "valid"; 0: no split."""
    fail_on_error: bool
    """True if an unreadable record stops the work instead of being skipped."""
    eos: str | None = None
    """Token that ends documents; None: the tokenizer's own."""
    bos: str | None = None
    """Token that begins documents; None: no such token."""
    fast: bool = True
    """True for the fastest exact engine, False for the tokenizer's own library."""
    document_bytes: int = DOCUMENT_BYTES
    """Longest document or JSON line, in bytes."""
    encoding_errors: EncodingErrors = "strict"


@dataclass(frozen=True)
class Part:
    """One shard to tokenize, and the prefix of the files it becomes."""

    prefix: str
    shard: Shard
    options: TokenizeOptions

    @property
    def report_file(self) -> Path:
        """File that exists once the part is finished."""
        return Path(f"{self.prefix}.report")


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

    Raises DataError for an unreadable record if `fail_on_error`, or if the engine is not exact on the first documents.
    """
    options = part.options
    encoder = _cached_encoder(options.tokenizer, options.fast, options.eos, options.bos)
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
                encoder.check(_first(texts, CHECKED_CHARACTERS))
                unchecked = False
            for document, ids in zip(documents, encoder.encode(texts), strict=True):
                writers[choose_split(document, options.holdout)].add_document(np.concatenate((bos, ids, eos)))
        report = PartReport(
            shard_bytes(part.shard), sum(writer.tokens for writer in writers), left_out.bad, left_out.empty
        )
    write_atomically(part.report_file, json.dumps(asdict(report)))
    return report


@dataclass
class LeftOutRecords:
    """Records of a part that do not become documents."""

    bad: list[str] = field(default_factory=list)
    """Unreadable ones, as "file:line: reason"."""
    empty: int = 0
    """Number of empty ones."""


def _batches(part: Part, left_out: LeftOutRecords) -> Iterator[list[bytes]]:
    """Yield the readable documents of a part that are not empty, about `BATCH_BYTES` at a time.

    The others are added to `left_out`; an unreadable one raises DataError if `fail_on_error`.
    """
    batch: list[bytes] = []
    size = 0
    options = part.options
    documents = read_documents(part.shard, options.text_key, options.document_bytes, options.encoding_errors)
    for document in documents:
        if isinstance(document, BadRecord):
            if options.fail_on_error:
                raise DataError(f"{document}; correct the record, or skip such records with --on-error skip")
            left_out.bad.append(str(document))
            continue
        if not document:
            left_out.empty += 1
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
def _cached_encoder(tokenizer: str, fast: bool, eos: str | None, bos: str | None) -> Encoder:
    return load_encoder(tokenizer, fast, eos, bos)


def make_parts(parts: Sequence[Part], workers: int) -> Iterator[PartReport]:
    """Tokenize all `parts` in `workers` processes, and yield the report of each part when it is finished.

    Raises the exceptions of `make_part`, and LaunchError when a worker is killed.
    """
    # Not forked, because the progress bar runs threads, whose locks a child would inherit.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(parts)) or 1, context, initializer=_end_with_parent) as pool:
        try:
            for finished in as_completed([pool.submit(make_part, part) for part in parts]):
                yield finished.result()
        except BrokenProcessPool as error:
            raise LaunchError(
                "a tokenizing process was killed, perhaps for lack of memory; run the same command again with fewer "
                "--workers: finished parts are kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Make this worker exit silently at Ctrl-C, and when its parent is killed: it would wait for work forever."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    # There is one process per core: threads of the engines would only compete for the cores.
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=wait, daemon=True).start()


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


def tokenize_corpus(files: Sequence[str], output: str, options: TokenizeOptions, workers: int) -> TokenizeResult:
    """Tokenize `files` into the corpus `output`, or into `output`-train and `output`-valid with a holdout.

    Raises DataError when the tokenizer or all of the input cannot be used, or when `output` cannot be written or is a
    different corpus.
    """
    outputs = corpus_prefixes(output, options.holdout)
    tokenizer = load_encoder(options.tokenizer, options.fast, options.eos, options.bos)
    if options.append_eos and tokenizer.eos_id is None:
        raise DataError(f"{options.tokenizer} has no end-of-document token; give --eos TOKEN or --no-append-eos")
    shards = cut_shards(files)
    if not shards:
        raise DataError("every --input file is empty: there is no document")
    work = _work_fingerprint(shards, options, tokenizer)
    folder = Path(f"{output}.parts")
    parts = [Part(str(folder / f"{number:06d}"), shard, options) for number, shard in enumerate(shards)]
    bad: list[str] = []
    empty = 0
    resumed = len(parts)
    with write_errors(output), locked_folder(folder):
        already_complete = already_made(dict.fromkeys(outputs, work))
        if not already_complete:
            _delete_parts_of_other_work(folder, work)
            resumed = _make_missing_parts(parts, workers)
            reports = [read_report(part) for part in parts]
            bad = [record for report in reports for record in report.bad]
            empty = sum(report.empty for report in reports) + sum(os.path.getsize(file) == 0 for file in files)
            list_skipped(output, bad)
            if not any(report.tokens for report in reports):
                raise DataError(_no_document(bad, empty))
            _merge(parts, outputs, options, tokenizer, work)
        _empty(folder)
    corpora = {prefix: IndexedDataset(prefix) for prefix in outputs}
    return TokenizeResult(corpora, bad, empty, len(parts), resumed, tokenizer.engine, already_complete)


def _no_document(bad: Sequence[str], empty: int) -> str:
    if not bad:
        return f"the --input files hold no document: {empty:,} texts or files are empty"
    return f"none of the {len(bad):,} records can be read: {bad[0]}"


def _delete_parts_of_other_work(folder: Path, work: str) -> None:
    mark = folder / "work"
    if not (mark.exists() and mark.read_text(encoding="utf-8") == work):
        _empty(folder)
        write_atomically(mark, work)


def _empty(folder: Path) -> None:
    # Without the mark, files that remain after a kill are never taken for finished parts.
    (folder / "work").unlink(missing_ok=True)
    for file in folder.iterdir():
        file.unlink()


def _make_missing_parts(parts: Sequence[Part], workers: int) -> int:
    """Make the parts that no earlier run finished, and return the number of parts that were finished already."""
    earlier = [read_report(part) for part in parts if part.report_file.exists()]
    waiting = [part for part in parts if not part.report_file.exists()]
    total = sum(shard_bytes(part.shard) for part in parts)
    with ByteProgress("tokenize", total, done=sum(report.size for report in earlier)) as progress:
        for report in make_parts(waiting, workers):
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
    work = {
        "chunks": [[asdict(chunk) for chunk in shard] for shard in shards],
        "times": {chunk.path: os.stat(chunk.path).st_mtime_ns for shard in shards for chunk in shard},
        "options": given,
    }
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()
