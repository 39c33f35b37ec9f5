"""`metrics.jsonl`: the complete history of a run, one JSON object per line.

`strict_json.py` says how numbers are written that are not finite. The last field of each record, `crc32`, is a checksum
of the line without it: one changed digit of a step would else move good records, and readers leave such a line out.

A resumed run trains the steps after its checkpoint again. Their earlier records are moved to `metrics.discarded.jsonl`,
which so holds every record that was ever taken out of `metrics.jsonl`, once, in the order in which they were taken out.
Both files only ever change at their ends, so that resuming takes no longer when a run does.
"""

import contextlib
import json
import logging
import mmap
import os
import shutil
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, BinaryIO

from moba_train.errors import ForeignFileError, number_ranges
from moba_train.foreign_files import open_foreign, read_foreign
from moba_train.output_files import open_to_change, write_atomically
from moba_train.strict_json import from_json, to_json
from moba_train.telemetry.telemetry import DelayedError

logger = logging.getLogger(__name__)

MOST_PENDING = 100_000
"""Records that are kept while the file cannot be written, about 60 MB; later ones are lost, and counted."""

_CHECK = b', "crc32": "'
_AT_ONCE = 1000
"""Records of one system call."""
_IN_ORDER = 1000
"""Records in a row that are not later than a step, after which all those before count as not later either."""


class JsonlSink:
    """Appends each record to `path`; after `write`, the system has it.

    While the file cannot be written (disk full, folder read-only), records are kept in memory, `MOST_PENDING` at most.
    `write` then raises DelayedError, and the next one that succeeds writes all of them first, in order; `close` tries
    once more, and later records are dropped. No record is ever written behind a half of another one.

    A run that resumes from `resumed_step` finds the file cut before the first record of a later step, or of that step
    if its type is among `repeated` (`discard_after`); at a fresh start it is None, and the file is empty.
    """

    def __init__(self, path: Path, resumed_step: int | None, repeated: Collection[str] = ()) -> None:
        self._path = path
        self._resumed_step = resumed_step
        self._repeated = repeated
        self._descriptor: int | None = None
        self._pending: deque[bytes] = deque()
        self._lost = 0
        self._closed = False
        self._torn = False  # the file ends within a line
        with contextlib.suppress(OSError):  # the first record tries again, and reports it
            self._open()

    def write(self, record: dict[str, Any]) -> None:
        if self._closed:
            return  # an alert of a thread that ends later; the descriptor may be another file's by now
        text = to_json(record).encode()
        self._pending.append(b'%s%s%08x"}\n' % (text[:-1], _CHECK, zlib.crc32(text)))
        self._write_pending()

    def close(self) -> None:
        try:
            self._write_pending()
            if self._descriptor is not None:
                os.fsync(self._descriptor)  # some network file systems report a full disk only here
        finally:
            self._closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> None:
        discard_after(self._path, self._resumed_step, self._repeated)
        self._torn = not _ends_with_newline(self._path)
        self._descriptor = open_to_change(self._path, os.O_WRONLY | os.O_APPEND)

    def _write_pending(self) -> None:
        try:
            if self._descriptor is None:
                self._open()
            while self._pending:
                self._write_oldest()
        except OSError as error:
            if len(self._pending) > MOST_PENDING:
                self._pending.pop()
                self._lost += 1
            raise DelayedError(f"{self._path}: {error.strerror or error}", len(self._pending), self._lost) from error

    def _write_oldest(self) -> None:
        """Write the oldest pending records, as far as the system takes them."""
        assert self._descriptor is not None
        lines = list(islice(self._pending, _AT_ONCE))
        if self._torn:
            lines[0] = b"\n" + lines[0]
        data = memoryview(b"".join(lines))
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        finally:
            self._take_back(lines, written)

    def _take_back(self, lines: list[bytes], written: int) -> None:
        """Leave in the file what is complete of the first `written` bytes of `lines`."""
        assert self._descriptor is not None
        for line in lines:
            if written < len(line):
                break
            written -= len(line)
            self._pending.popleft()
            self._torn = False
        if written:
            try:
                # Readers take a line without an end for one that is still being written, and the next record would be
                # joined to it.
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            except OSError:
                self._torn = True


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, oldest first.

    Lines that are not records are left out, such as one truncated by a kill or a full disk.
    """
    return read_sound_records(path)[0]


def read_sound_records(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """All records of a metrics file, as `read_records` returns them, and the numbers (from 1) of its damaged lines.

    A line is damaged if it is not a record, or not as it was written. Blank lines do not count, nor does a last line
    without its end, which the run may be writing.
    """
    damaged: list[int] = []
    with path.open("rb") as lines:
        return list(_sound_records(lines, damaged)), damaged


def left_out_lines(damaged: Sequence[int]) -> str:
    """Words for the numbers of damaged lines."""
    return f"damaged lines, which are left out: {number_ranges(damaged[:20])}" + ", ..." * (len(damaged) > 20)


def _sound_records(lines: BinaryIO, damaged: list[int]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if (record := parse_record(line)) is not None:
            yield record
        elif line.strip() and line.endswith(b"\n"):
            damaged.append(number)


def history_problem(path: Path, logged_steps: int) -> str:
    """Damage of a metrics file that held the metrics of this number of steps, as text; empty if there is none.

    It is read as a whole, about 100 MB a second on one core.
    """
    damaged: list[int] = []
    try:
        with open_foreign(path, None, links=False) as lines:
            steps = {record["step"] for record in _sound_records(lines, damaged) if record["type"] == "metrics"}
    except (OSError, ForeignFileError) as error:
        return f"the history of the run cannot be read: {error}"
    problems = []
    if damaged:
        problems = [left_out_lines(damaged)]
    if len(steps) < logged_steps:
        lacking = f"{logged_steps - len(steps)} of {logged_steps} logged steps are missing"
        problems.append(f"{lacking}; the last one there is {max(steps, default=0)}")
    return f"{path}: {'; '.join(problems)}" if problems else ""


def read_backward(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, newest first, read as far as they are asked for; none if there is no file."""
    for _, line in _lines_backward(path):
        if (record := parse_record(line)) is not None:
            yield record


def read_since(path: Path, step: int) -> list[dict[str, Any]]:
    """The records of `step` and later at the end of a metrics file, newest first.

    An empty list, with a warning, if the file cannot be read: a start needs them only to avoid repetitions, so this is
    no reason to end a run.
    """
    try:
        return list(takewhile(lambda record: record["step"] >= step, read_backward(path)))
    except OSError as error:
        logger.warning("%s cannot be read; records of step %d may be repeated: %s", path, step, error.strerror or error)
        return []


def discard_after(path: Path, step: int | None, repeated: Collection[str] = ()) -> None:
    """Move the records after `step`, all if it is None, from the end of `path` to `metrics.discarded.jsonl`.

    Records of `step` itself whose type is among `repeated` count as later. The file is cut before the first record of a
    later step, even if a few earlier steps follow it. Whenever the process dies, the next call completes the move or
    makes it again: `metrics.discarding.json`, which exists meanwhile, holds the lengths that the files were to have and
    had before. Raises OSError when the file system refuses; the files can then be used, and the call repeated.
    """
    discarded = path.with_suffix(".discarded.jsonl")
    journal = path.with_suffix(".discarding.json")
    _finish_earlier_move(path, discarded, journal)
    os.close(open_to_change(path, os.O_WRONLY))  # before it is read: it may be a link to another file
    _drop_torn_record(path)
    kept = _end_of_step(path, step, repeated)
    if kept == path.stat().st_size:
        return
    before = discarded.stat().st_size if discarded.exists() else 0
    # First: if the move is interrupted, the next start knows the length that both files had.
    write_atomically(journal, json.dumps({"kept": kept, "discarded": before}))
    with path.open("rb") as source, os.fdopen(open_to_change(discarded, os.O_WRONLY | os.O_APPEND), "ab") as target:
        source.seek(kept)
        target.write(b"" if _ends_with_newline(discarded) else b"\n")
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())
    # Only once the copy is on the disk.
    _truncate(path, kept)
    journal.unlink()


def _finish_earlier_move(path: Path, discarded: Path, journal: Path) -> None:
    """Undo a move that was interrupted before the records were taken out of `path`: take them out of `discarded`."""
    if not journal.exists():
        return
    with contextlib.suppress(ValueError, KeyError, TypeError):  # it is never half-written: then it is not ours
        move = json.loads(read_foreign(journal, 1024, links=False))
        if path.exists() and path.stat().st_size > int(move["kept"]) and discarded.exists():
            _truncate(discarded, int(move["discarded"]))
    journal.unlink()


def _drop_torn_record(path: Path) -> None:
    """Cut off a last line that was not written to its end."""
    start, line = next(_lines_backward(path), (0, b"\n"))
    if not line.endswith(b"\n") and parse_record(line) is None:
        _truncate(path, start)


def _end_of_step(path: Path, step: int | None, repeated: Collection[str]) -> int:
    """Offset of the first record of a later step, found from the end of the file."""
    if step is None:
        return 0
    end = path.stat().st_size
    in_order = 0
    for start, line in _lines_backward(path):
        if (record := parse_record(line)) is None:
            continue
        if record["step"] > step or (record["step"] == step and record["type"] in repeated):
            end = start
            in_order = 0
        elif (in_order := in_order + 1) == _IN_ORDER:
            break
    return end


def _lines_backward(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of every line, last first."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = len(text)
        while end > 0:
            start = text.rfind(b"\n", 0, end - 1) + 1
            yield start, text[start:end]
            end = start


def _ends_with_newline(path: Path) -> bool:
    """True if the file is empty, missing, or ends with a complete line."""
    _, line = next(_lines_backward(path), (0, b"\n"))
    return line.endswith(b"\n")


def _truncate(path: Path, size: int) -> None:
    with os.fdopen(open_to_change(path, os.O_RDWR), "rb+") as stream:
        stream.truncate(min(size, path.stat().st_size))
        os.fsync(stream.fileno())


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record in a line of a metrics file; None for another line, and for one that is not as it was written."""
    text, checked, crc = line.rstrip().rpartition(_CHECK)
    if checked:
        line = text + b"}"
        if crc != b'%08x"}' % zlib.crc32(line):
            return None
    with contextlib.suppress(ValueError, RecursionError):
        record = from_json(line.decode("utf-8", errors="replace"))
        if isinstance(record, dict) and isinstance(record.get("step"), int) and "type" in record:
            return record
    return None
