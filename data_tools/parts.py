"""Tokenizing one shard of the input into a part of the corpus, in any process, once.

A part is one corpus per split, and a report that is written last: the report makes it a finished part.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data_tools.documents import BadRecord, Shard, read_documents, shard_bytes, split_of, splits
from data_tools.encoders import Encoder, load_encoder
from moba_train.data.indexed import IndexedDatasetWriter, dtype_for
from moba_train.errors import DataError, LaunchError

BATCH_BYTES = 1 << 20
CHECKED_CHARACTERS = 1 << 15


@dataclass(frozen=True)
class TokenizeOptions:
    """What shapes the tokens of a corpus."""

    tokenizer: str
    """What `encoders.load_encoder` takes."""
    text_key: str
    append_eos: bool
    holdout: float
    """Fraction of the documents, chosen by their content, that goes to the split "valid"; 0: no split."""
    fail_on_error: bool
    """Whether a record that cannot be read ends the work instead of being left out."""
    eos: str | None = None
    """The token that documents end with; None: the tokenizer's own."""
    bos: str | None = None
    """The token that documents begin with; None: they begin with their text."""
    fast: bool = True
    """Whether to use the fastest engine that gives the tokenizer's ids, instead of its own library."""


@dataclass(frozen=True)
class Part:
    """One shard to be tokenized, and where to."""

    prefix: str
    shard: Shard
    options: TokenizeOptions

    @property
    def report_file(self) -> Path:
        """Exists once the part is finished."""
        return Path(f"{self.prefix}.report")


@dataclass(frozen=True)
class PartReport:
    """What became of a part."""

    size: int
    """Bytes of input."""
    tokens: int
    bad: list[str]
    """Records left out, as "file:line: reason"."""


def read_report(part: Part) -> PartReport:
    """The report of a finished part."""
    return PartReport(**json.loads(part.report_file.read_text(encoding="utf-8")))


def make_part(part: Part) -> PartReport:
    """Tokenize one shard.

    Raises DataError for a bad record where the options say so, or when the engine is not exact on the first documents.
    """
    options = part.options
    encoder = _loaded_encoder(options.tokenizer, options.fast, options.eos, options.bos)
    dtype = dtype_for(encoder.vocab_size)
    bos = np.array([] if encoder.bos_id is None else [encoder.bos_id], dtype=dtype)
    eos = np.array([encoder.eos_id] if options.append_eos else [], dtype=dtype)
    bad: list[str] = []
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(f"{part.prefix}{split}", dtype))
            for split in splits(options.holdout)
        ]
        unchecked = True
        for documents in _batches(part, bad):
            texts = [document.decode() for document in documents]
            if unchecked:
                encoder.check(_first(texts, CHECKED_CHARACTERS))
                unchecked = False
            for document, ids in zip(documents, encoder.encode(texts), strict=True):
                writers[split_of(document, options.holdout)].add_document(np.concatenate((bos, ids, eos)))
        report = PartReport(shard_bytes(part.shard), sum(writer.tokens for writer in writers), bad)
    temporary = part.report_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
    temporary.replace(part.report_file)
    return report


def _batches(part: Part, bad: list[str]) -> Iterator[list[bytes]]:
    """The good documents of a part, about `BATCH_BYTES` at a time; others are added to `bad`, or raise DataError."""
    batch: list[bytes] = []
    size = 0
    for document in read_documents(part.shard, part.options.text_key):
        if isinstance(document, BadRecord):
            if part.options.fail_on_error:
                raise DataError(f"{document}; mend the record, or leave such records out with --on-error skip")
            bad.append(str(document))
            continue
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _first(texts: Sequence[str], characters: int) -> list[str]:
    """The first of `texts` up to so many characters, the last one cut."""
    found = []
    for text in texts:
        found.append(text[:characters])
        characters -= len(text)
        if characters <= 0:
            break
    return found


@functools.cache
def _loaded_encoder(tokenizer: str, fast: bool, eos: str | None, bos: str | None) -> Encoder:
    return load_encoder(tokenizer, fast, eos, bos)


def make_parts(parts: Sequence[Part], workers: int) -> Iterator[PartReport]:
    """Tokenize all `parts` in this many processes, giving each report as its part is finished.

    Raises what `make_part` raises, LaunchError when a worker is killed.
    """
    # Threads of the progress bar make fork unsafe.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(parts)) or 1, context, initializer=_end_with_parent) as pool:
        try:
            for finished in as_completed([pool.submit(make_part, part) for part in parts]):
                yield finished.result()
        except BrokenProcessPool as error:
            raise LaunchError(
                "a tokenizing process was killed, perhaps for want of memory; run the same command again, with fewer "
                "--workers: finished parts are kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Let this worker end at Ctrl-C without a word, and when its parent is killed: it would wait for work for ever."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    # One process per core: engines that bring threads of their own would only get in each other's way.
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=wait, daemon=True).start()
