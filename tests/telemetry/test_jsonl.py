"""metrics.jsonl loses no record to a full disk, a resume discards none twice, and does not read the whole file."""

import errno
import json
import logging
import math
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from moba_train.telemetry import jsonl
from moba_train.telemetry import telemetry as outage
from moba_train.telemetry.jsonl import JsonlSink, history_problem, read_records, read_since
from moba_train.telemetry.telemetry import Telemetry


@contextmanager
def disk_with_room_for(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: the system takes the beginning of a longer write, and refuses the rest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def log_steps(telemetry: Telemetry, first: int, last: int) -> None:
    for step in range(first, last + 1):
        telemetry.log(step, step * 10, {"loss": 1.0})


def write_history(path: Path, steps: range, attempt: int = 0) -> None:
    """Two records of every step."""
    with path.open("a") as stream:
        for step in steps:
            for record_type in ("metrics", "checkpoint"):
                record = {"time": 1e9 + step, "step": step, "type": record_type, "attempt": attempt}
                stream.write(json.dumps(record) + "\n")


def steps_of(path: Path, record_type: str = "metrics") -> list[int]:
    return [record["step"] for record in read_records(path) if record["type"] == record_type]


def warnings_of(path: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(path) if record["type"] == "warning"]


@pytest.mark.parametrize("truncating_works", [True, False])
def test_records_of_the_time_of_a_full_disk_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, truncating_works: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    telemetry = Telemetry([JsonlSink(path, None)])
    log_steps(telemetry, 1, 3)
    with disk_with_room_for(path.stat().st_size + 40), monkeypatch.context() as patch:
        if not truncating_works:
            patch.setattr(os, "ftruncate", refuse)
        log_steps(telemetry, 4, 200)
    log_steps(telemetry, 201, 201)
    telemetry.close()
    assert steps_of(path) == list(range(1, 202))
    (warning,) = warnings_of(path)
    assert (warning["step"], warning["records_late"], warning["records_lost"]) == (201, 197, 0)
    assert [text.partition("jsonl: ")[2] for text in caplog.messages if "fails" in text] == [
        "File too large; 1 records are kept in memory until it works again, 0 are lost"
    ], "not repeated for every record"
    torn = [line for line in path.read_text().splitlines() if not line.endswith("}")]
    assert len(torn) == (0 if truncating_works else 1), "a half-written record is taken back, or stands alone"


def refuse(*arguments: object) -> None:
    raise OSError(errno.EIO, "broken")


def test_a_file_that_cannot_be_opened_at_the_start_costs_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    telemetry = Telemetry([JsonlSink(path, None)])
    log_steps(telemetry, 1, 3)
    path.rmdir()
    log_steps(telemetry, 4, 4)
    telemetry.close()
    assert steps_of(path) == [1, 2, 3, 4]


def test_a_late_record_goes_into_no_other_file(tmp_path: Path) -> None:
    """The file that is opened next gets the descriptor of the one that was closed."""
    sink = JsonlSink(tmp_path / "metrics.jsonl", None)
    sink.close()
    other = tmp_path / "other"
    with other.open("wb"):
        sink.write({"type": "alert", "step": 1})
    assert other.read_bytes() == (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_what_does_not_fit_into_memory_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jsonl, "MOST_PENDING", 3)
    monkeypatch.setattr(outage, "REPORT_SECONDS", 0.0)
    path = tmp_path / "metrics.jsonl"
    telemetry = Telemetry([JsonlSink(path, None)])
    for first in (1, 11):
        log_steps(telemetry, first, first)
        with disk_with_room_for(path.stat().st_size):
            log_steps(telemetry, first + 1, first + 6)
    log_steps(telemetry, 20, 20)
    telemetry.close()
    assert steps_of(path) == [1, 2, 3, 4, 11, 12, 13, 14, 20]
    assert [(event["records_late"], event["records_lost"]) for event in warnings_of(path)] == [(3, 3), (3, 3)]
    assert caplog.messages[-1] == "JsonlSink is closed; it has missed 6 records in all"


@pytest.mark.parametrize("room_at_the_end", [True, False])
def test_closing_tries_once_more_and_counts_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room_at_the_end: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    telemetry = Telemetry([JsonlSink(path, None)])
    with disk_with_room_for(0):
        log_steps(telemetry, 1, 5)
        if not room_at_the_end:
            telemetry.close()
    if room_at_the_end:
        telemetry.close()
    assert steps_of(path) == ([1, 2, 3, 4, 5] if room_at_the_end else [])
    assert ("it has missed 5 records in all" in caplog.text) is not room_at_the_end


class FlakySink:
    """Fails while `fails` is true."""

    def __init__(self) -> None:
        self.fails = False
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        if self.fails:
            raise OSError("unplugged")
        self.records.append(record)

    def close(self) -> None: ...


def test_a_failing_sink_is_reported_once_a_minute_and_when_it_works_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0]))
    sink = FlakySink()
    telemetry = Telemetry([sink])
    with caplog.at_level(logging.WARNING):
        for step in range(400):  # one in a second
            clock[0] += 1
            sink.fails = 10 <= step < 200 or (step >= 300 and step % 2 == 0)
            log_steps(telemetry, step, step)
        telemetry.close()
    failing = [text for text in caplog.messages if "fails" in text]
    missed = [1, 61, 121, 181, 1, 30]
    assert failing == [f"FlakySink fails and has missed {count} records: OSError('unplugged')" for count in missed]
    warnings = [record for record in sink.records if record["type"] == "warning"]
    assert [(event["step"], event["records_lost"]) for event in warnings] == [(200, 190), (301, 1), (361, 30)]
    assert caplog.messages[-1] == "FlakySink is closed; it has missed 240 records in all"


def test_every_json_reader_accepts_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """They are read as they were, also from files with Python's bare words."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    path = tmp_path / "metrics.jsonl"
    numbers = {"loss": math.nan, "grad_norm": math.inf, "spike_z_loss": -math.inf, "lr": 1.0}
    telemetry = Telemetry([JsonlSink(path, None)])
    telemetry.log(1, 10, numbers)
    telemetry.event(1, 10, "needle", "a message", needle={"by_depth": [[math.nan, 1.0]]}, loss=None)
    telemetry.close()
    strict = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [strict[0][name] for name in numbers] == ["NaN", "Infinity", "-Infinity", 1.0]
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text("".join(json.dumps(record) + "\n" for record in read_records(path)))
    assert "NaN," in earlier.read_text()
    for file in (path, earlier):
        metrics, event = read_records(file)
        assert repr([metrics[name] for name in numbers]) == repr([*numbers.values()])
        assert math.isnan(event["needle"]["by_depth"][0][0])
        assert event["loss"] is None


def test_a_resume_reads_the_end_of_a_long_history_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_history(path, range(20_000))
    read, loads = [0], json.loads

    def counted(*arguments: Any, **options: Any) -> Any:
        read[0] += 1
        return loads(*arguments, **options)

    monkeypatch.setattr(json, "loads", counted)
    JsonlSink(path, 19_900).close()
    assert 0 < read[0] < 2000, "of 40,000"
    assert steps_of(path) == list(range(19_901))
    assert steps_of(tmp_path / "metrics.discarded.jsonl") == list(range(19_901, 20_000))


def test_the_history_is_cut_before_the_first_later_record(tmp_path: Path) -> None:
    """Also where earlier steps follow it, lines are no records, or the last one is half a record."""
    path = tmp_path / "metrics.jsonl"
    write_history(path, range(1, 8), attempt=1)
    write_history(path, range(4, 10), attempt=2)
    with path.open("a") as stream:
        stream.write('not a record\n\n{"step": 2, "type": "stall"}\n[1]\n{"time": 1.0, "step": 6, "los')
    before = path.read_bytes()
    JsonlSink(path, 5).close()
    kept, moved = path.read_bytes(), (tmp_path / "metrics.discarded.jsonl").read_bytes()
    assert before.startswith(kept + moved)
    assert before[len(kept + moved) :].startswith(b'{"time": 1.0, "step": 6')
    assert steps_of(path) == [1, 2, 3, 4, 5]


def test_the_search_for_later_records_ends_only_where_enough_earlier_ones_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_IN_ORDER", 6)
    path = tmp_path / "metrics.jsonl"
    for step in (1, 9, 2, 3, 9, 4, 5, 9):
        write_history(path, range(step, step + 1))
    JsonlSink(path, 5).close()
    assert steps_of(path) == [1]


def test_the_records_of_a_step_and_later_ones_are_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_since(path, 3) == []
    write_history(path, range(1, 5))
    assert read_since(path, 3) == read_records(path)[:3:-1]


def log_history(path: Path, last: int) -> list[bytes]:
    """A file that the sink wrote, with the metrics of each step."""
    telemetry = Telemetry([JsonlSink(path, None)])
    log_steps(telemetry, 1, last)
    telemetry.event(last, last * 10, "needle", 'a message, "crc32": "', found=math.nan)
    telemetry.close()
    return path.read_bytes().splitlines(keepends=True)


def test_one_changed_byte_costs_its_record_and_moves_no_other(tmp_path: Path) -> None:
    """A step number that is damaged was taken for a later step: all records from there on were discarded."""
    path = tmp_path / "metrics.jsonl"
    lines = log_history(path, 9)
    whole = read_records(path)
    assert [record.get("crc32") for record in whole] == [None] * 10
    for position in range(len(lines[2])):
        changed = bytearray(lines[2])
        changed[position] ^= 1
        path.write_bytes(b"".join([*lines[:2], changed, *lines[3:]]))
        joined = position == len(lines[2]) - 1  # without its end, the line and the next one are none
        left = [record for record in whole if record["step"] not in ((3, 4) if joined else (3,))]
        records = read_records(path)
        assert repr([record for record in records if record["step"] != 3]) == repr(left), position
        assert all(record["loss"] == 1.0 and record["tokens"] == 30 for record in records if record["step"] == 3)
    path.write_bytes(b"".join(lines).replace(b'"step": 3', b'"step": 8', 1))
    JsonlSink(path, 6).close()
    assert steps_of(path) == [1, 2, 4, 5, 6]
    assert history_problem(path, 6) == (
        f"{path}: damaged lines, which are left out: 3; 1 of 6 logged steps are missing; the last one there is 6"
    )


def test_damage_of_a_history_is_named_by_what_the_checkpoint_knows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = log_history(path, 8)
    assert history_problem(path, 8) == history_problem(path, 0) == ""
    path.write_bytes(b"".join(lines)[: len(b"".join(lines[:5])) - 10])
    JsonlSink(path, 8).close()
    assert history_problem(path, 8) == f"{path}: 4 of 8 logged steps are missing; the last one there is 4"
    path.write_bytes(b"")
    assert history_problem(path, 8) == f"{path}: 8 of 8 logged steps are missing; the last one there is 0"
    path.write_bytes(b"".join(lines).replace(b"\n", b"\x0b", 1).replace(b"loss", b"lost") + b"[1]\n")
    assert "damaged lines, which are left out: 1-7, 9; 8 of 8" in history_problem(path, 8)
    path.unlink()
    assert "cannot be read: [Errno 2] No such file" in history_problem(path, 8)
    path.mkdir()
    assert "cannot be read" in history_problem(path, 8)
    assert "is a folder; allowed: a regular file" in history_problem(path, 8)


def test_records_of_earlier_versions_have_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_history(path, range(1, 4))
    assert history_problem(path, 3) == ""


def test_a_last_record_without_its_newline_is_a_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    discarded = tmp_path / "metrics.discarded.jsonl"
    for file in (path, discarded):
        write_history(file, range(1, 4))
        file.write_bytes(file.read_bytes()[:-1])
    telemetry = Telemetry([JsonlSink(path, 3)])
    log_steps(telemetry, 4, 4)
    telemetry.close()
    assert steps_of(path) == [1, 2, 3, 4]
    path.write_bytes(path.read_bytes()[:-1])
    JsonlSink(path, 3).close()
    assert steps_of(path) == [1, 2, 3]
    assert steps_of(discarded) == [1, 2, 3, 4]


READING = ("parse_record", "_with_type", "_lines_backward", "_end_of_step", "_ends_with_newline")
"""Functions of jsonl.py that change nothing."""


def start_killed_at_line(number: int, path: Path, resumed_step: int) -> bool:
    """Resume in a process that ends before the line of jsonl.py that it runs as the `number`th; False when it did not
    run as many."""
    lines = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != jsonl.__file__ or frame.f_code.co_name in READING:
            return None
        lines[0] += event == "line"
        if lines[0] == number:
            os._exit(9)
        return trace

    process = os.fork()
    if process == 0:
        try:
            sys.settrace(trace)
            JsonlSink(path, resumed_step)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_discarded_records_are_there_once_wherever_a_start_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before every line of the move in turn; the next start goes on from an earlier checkpoint."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses nothing by that, only power cuts
    original = tmp_path / "original"
    original.mkdir()
    write_history(original / "metrics.jsonl", range(1, 4))
    write_history(original / "metrics.discarded.jsonl", range(5, 6), attempt=-1)
    records = read_records(original / "metrics.jsonl")
    earlier = read_records(original / "metrics.discarded.jsonl")
    path = tmp_path / "run" / "metrics.jsonl"
    killed = True
    line = 0
    while killed:
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(original, path.parent)
        line += 1
        killed = start_killed_at_line(line, path, 2)
        JsonlSink(path, 1).close()
        kept = read_records(path)
        moved = read_records(path.with_suffix(".discarded.jsonl"))
        assert kept == [record for record in records if record["step"] <= 1], line
        assert moved[: len(earlier)] == earlier, line
        both = sorted(moved[len(earlier) :], key=lambda record: record["time"])
        assert both == records[len(kept) :], line
        assert not path.with_suffix(".discarding.json").exists(), line
    assert line > 25, "the trace has seen nothing: the test has lost its point"


def test_a_full_disk_at_the_start_postpones_the_move(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_history(path, range(1, 8))
    with disk_with_room_for(100):  # the journal fits, the records do not
        telemetry = Telemetry([JsonlSink(path, 5)])
        log_steps(telemetry, 6, 7)
        assert steps_of(path) == list(range(1, 8))
    log_steps(telemetry, 8, 8)
    telemetry.close()
    assert steps_of(path) == list(range(1, 9))
    assert steps_of(path, "checkpoint") == list(range(1, 6))
    assert steps_of(tmp_path / "metrics.discarded.jsonl") == [6, 7]
