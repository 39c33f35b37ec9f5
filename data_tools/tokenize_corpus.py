"""From text to a corpus: split the input into shards, tokenize the missing parts, merge them in order.

The result depends only on the input and the options, not on the number of processes or on interruptions.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_tools.documents import DOCUMENT_BYTES
from data_tools.encoders import Encoder, load_encoder
from data_tools.holdout import splits
from data_tools.outputs import already_made, corpus_prefixes, list_skipped, locked_folder, write_errors
from data_tools.parts import Part, TokenizeOptions, make_parts, read_report
from data_tools.progress import ByteProgress
from data_tools.shards import Shard, cut_shards, shard_bytes
from moba_train.data.indexed import IndexedDataset, IndexedDatasetWriter, dtype_for
from moba_train.errors import DataError


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
    """Whether identical corpora existed before, so that nothing was done."""


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
        mark.write_text(work, encoding="utf-8")


def _empty(folder: Path) -> None:
    # Without the mark, files that remain after a kill are never taken for finished parts.
    (folder / "work").unlink(missing_ok=True)
    for file in folder.iterdir():
        file.unlink()


def _make_missing_parts(parts: Sequence[Part], workers: int) -> int:
    """Make the parts that no earlier run finished; returns the number of parts that were finished already."""
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
        del given["document_bytes"]  # as in fingerprints from before there was a limit
    if options.encoding_errors == "strict":
        del given["encoding_errors"]
    work = {
        "chunks": [[asdict(chunk) for chunk in shard] for shard in shards],
        "times": {chunk.path: os.stat(chunk.path).st_mtime_ns for shard in shards for chunk in shard},
        "options": given,
    }
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()
