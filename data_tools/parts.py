"""Parts of the input: the units that several processes work on, and that are done once.

A part is one shard of the input. What any process makes of it lies in files of a folder next to the output, so that the
same command goes on after an interruption. The result depends only on the input and the options, not on the number of
processes or on interruptions.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from data_tools.documents import DOCUMENT_BYTES, BadRecord, EncodingErrors, Shard, read_documents
from moba_train.errors import DataError, LaunchError
from moba_train.output_files import write_atomically

Result = TypeVar("Result")


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
    document_bytes: int = DOCUMENT_BYTES
    """Longest document or JSON line, in bytes."""
    encoding_errors: EncodingErrors = "strict"
    duplicates: float | None = None
    """Similarity from which on a document is left out as a repeat of an earlier one (`duplicates.find_repeats`); None:
    all stay."""
    evaluations: tuple[str, ...] = ()
    """Files of evaluations whose text is looked for in the documents (`contamination.EvaluationTexts`)."""
    drop_contaminated: bool = False
    """True if documents that share text with `evaluations` are left out."""

    @property
    def compares(self) -> bool:
        """True if documents are compared with one another or with evaluations."""
        return self.duplicates is not None or bool(self.evaluations)


@dataclass(frozen=True)
class Part:
    """One shard to tokenize, and the prefix of the files it becomes."""

    prefix: str
    shard: Shard
    options: TokenizeOptions
    dropped: frozenset[int] = frozenset()
    """Numbers of the documents that are left out."""

    @property
    def scan_file(self) -> Path:
        """File of what the documents are compared by (`filter_documents.scan`)."""
        return Path(f"{self.prefix}.scan")

    @property
    def report_file(self) -> Path:
        """File that exists once the part is finished."""
        return Path(f"{self.prefix}.report")


@dataclass
class LeftOutRecords:
    """Records of a part that do not become documents."""

    bad: list[str] = field(default_factory=list)
    """Unreadable ones, as "file:line: reason"."""
    empty: int = 0
    """Number of empty ones."""


def readable(part: Part, left_out: LeftOutRecords) -> Iterator[tuple[str, bytes]]:
    """Yield file and text of the readable documents of a part that are not empty.

    The others are added to `left_out`; an unreadable one raises DataError if `fail_on_error`.
    """
    options = part.options
    for chunk in part.shard:
        for document in read_documents((chunk,), options.text_key, options.document_bytes, options.encoding_errors):
            if isinstance(document, BadRecord):
                if options.fail_on_error:
                    raise DataError(f"{document}; correct the record, or skip such records with --on-error skip")
                left_out.bad.append(str(document))
            elif document:
                yield chunk.path, document
            else:
                left_out.empty += 1


def in_processes(work: Callable[[Part], Result], parts: Sequence[Part], workers: int) -> Iterator[Result]:
    """Do the `work` on all `parts` in `workers` processes, and yield the result of each part when it is finished.

    Raises the exceptions of `work`, and LaunchError when a worker is killed.
    """
    # Not forked, because the progress bar runs threads, whose locks a child would inherit.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(parts)) or 1, context, initializer=_end_with_parent) as pool:
        try:
            for finished in as_completed([pool.submit(work, part) for part in parts]):
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


def delete_parts_of_other_work(folder: Path, work: str) -> None:
    """Empty a folder of parts unless they were made by this `work`, and mark it with it."""
    mark = folder / "work"
    if not (mark.exists() and mark.read_text(encoding="utf-8") == work):
        empty_folder(folder)
        write_atomically(mark, work)


def empty_folder(folder: Path) -> None:
    """Delete all files in a folder of parts."""
    # Without the mark, files that remain after a kill are never taken for finished parts.
    (folder / "work").unlink(missing_ok=True)
    for file in folder.iterdir():
        file.unlink()
