"""From text to a corpus: cut the input, tokenize the parts that are not there yet, merge them in order.

The result depends on the input and the options alone, not on the number of processes or on interruptions.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_tools.documents import Shard, cut_shards
from data_tools.parts import Part, TokenizeOptions, make_parts, read_report
from data_tools.progress import TokenProgress
from data_tools.tokenizer import Tokenizer, load_tokenizer
from moba_train.data.indexed import IndexedDataset, IndexedDatasetWriter, corpus_file, dtype_for
from moba_train.errors import DataError


@dataclass(frozen=True)
class TokenizeResult:
    """What `tokenize_corpus` made, or found made already."""

    corpora: dict[str, IndexedDataset]
    """The corpora written, by prefix."""
    bad: list[str]
    """Records left out, as "file:line: reason"."""
    parts: int
    resumed_parts: int
    """How many of the parts an earlier run had finished."""
    already_complete: bool
    """Whether the very same corpora were there before, and nothing was done."""


def tokenize_corpus(files: Sequence[str], output: str, options: TokenizeOptions, workers: int) -> TokenizeResult:
    """Tokenize `files` into the corpus `output`, or `output`-train and `output`-valid with a holdout.

    Raises DataError when the input or the tokenizer cannot be used, or another corpus is there already.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    if options.append_eos and tokenizer.eos_id is None:
        raise DataError(f"{options.tokenizer} has no end-of-document token; give --no-append-eos")
    shards = cut_shards(files)
    if not shards:
        raise DataError("all --input files are empty")
    work = _work_fingerprint(shards, options, tokenizer)
    outputs = [f"{output}{split}" for split in options.splits]
    folder = Path(f"{output}.parts")
    if _all_made(outputs, work):
        shutil.rmtree(folder, ignore_errors=True)
        corpora = {prefix: IndexedDataset(prefix) for prefix in outputs}
        return TokenizeResult(corpora, [], len(shards), len(shards), already_complete=True)

    _open_folder(folder, work)
    parts = [Part(str(folder / f"{number:06d}"), shard, options) for number, shard in enumerate(shards)]
    earlier = [read_report(part) for part in parts if part.report_file.exists()]
    waiting = [part for part in parts if not part.report_file.exists()]
    total = sum(chunk.stop - chunk.start for shard in shards for chunk in shard)
    with TokenProgress(total, done=sum(report.size for report in earlier)) as progress:
        for report in make_parts(waiting, workers):
            progress.advance(report.size, report.tokens)

    bad = [record for part in parts for record in read_report(part).bad]
    skipped = Path(f"{output}.skipped.txt")
    if bad:
        skipped.write_text("\n".join(bad) + "\n", encoding="utf-8")
    else:
        skipped.unlink(missing_ok=True)
    info: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "eos_id": tokenizer.eos_id if options.append_eos else None,
        "work": work,
    }
    for split, prefix in zip(options.splits, outputs, strict=True):
        with IndexedDatasetWriter(prefix, dtype_for(tokenizer.vocab_size), info) as writer:
            for part in parts:
                writer.merge(f"{part.prefix}{split}")
    shutil.rmtree(folder)
    corpora = {prefix: IndexedDataset(prefix) for prefix in outputs}
    return TokenizeResult(corpora, bad, len(parts), len(earlier), already_complete=False)


def _work_fingerprint(shards: Sequence[Shard], options: TokenizeOptions, tokenizer: Tokenizer) -> str:
    """SHA-256 of everything the corpus depends on; the contents of input files by size and time of change."""
    work = {
        "chunks": [[asdict(chunk) for chunk in shard] for shard in shards],
        "times": {chunk.path: os.stat(chunk.path).st_mtime_ns for shard in shards for chunk in shard},
        "options": asdict(options) | {"tokenizer": tokenizer.sha256},
    }
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()


def _all_made(outputs: Sequence[str], work: str) -> bool:
    """Whether all `outputs` come from this very `work`. Raises DataError when one of them does not."""
    made = []
    for prefix in outputs:
        if exists := corpus_file(prefix, "idx").exists():
            info = IndexedDataset(prefix).info or {}
            if info.get("work") != work:
                raise DataError(
                    f"corpus {prefix} exists and was made from other input or with other options; delete {prefix}.idx "
                    "or choose another --output"
                )
        made.append(exists)
    return all(made)


def _open_folder(folder: Path, work: str) -> None:
    """Make the folder of parts, or keep it if it is of the same `work`; parts of other work are deleted."""
    mark = folder / "work"
    if not (mark.exists() and mark.read_text(encoding="utf-8") == work):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.write_text(work, encoding="utf-8")
