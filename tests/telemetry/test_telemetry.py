"""Records reach every sink, the history has each step once, and no sink can stop a run."""

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moba_train.telemetry import sinks
from moba_train.telemetry.jsonl import JsonlSink, read_records
from moba_train.telemetry.sinks import ConsoleSink
from moba_train.telemetry.telemetry import Telemetry


class ListSink:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.closed = False

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


class BrokenSink:
    def write(self, record: dict[str, Any]) -> None:
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("disk full")


def report(telemetry: Telemetry) -> None:
    telemetry.stage = "short"
    telemetry.event(0, 0, "stage", "short: 4096 tokens")
    telemetry.log(1, 4096, {"loss": 3.5, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 12345.6})
    telemetry.event(1, 4096, "validation_loss", "loss 3.4", eval_loss=3.4)
    telemetry.alert("Spike", "loss 9.0", "spike")


def test_jsonl_holds_what_every_sink_got(tmp_path: Path) -> None:
    sink = ListSink()
    telemetry = Telemetry([JsonlSink(tmp_path / "metrics.jsonl", None), sink])
    report(telemetry)
    telemetry.close()

    assert read_records(tmp_path / "metrics.jsonl") == sink.records
    assert sink.closed
    assert [record["type"] for record in sink.records] == ["stage", "metrics", "validation_loss", "alert"]
    assert {record["stage"] for record in sink.records} == {"short"}
    assert sink.records[1].items() >= {"step": 1, "tokens": 4096, "loss": 3.5}.items()
    assert sink.records[3].items() >= {"step": 1, "title": "Spike", "alert": "spike"}.items()


def test_a_broken_sink_is_reported_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink()
    telemetry = Telemetry([BrokenSink(), sink])
    with caplog.at_level(logging.WARNING):
        report(telemetry)
        telemetry.close()
    assert len(sink.records) == 4
    assert sink.closed
    assert caplog.messages == [
        "BrokenSink fails and has missed 1 records: OSError('disk full')",
        "BrokenSink could not be closed: disk full; it has missed 4 records in all",
    ]


@pytest.mark.parametrize("resumed_step", [3, None])
def test_a_resumed_run_has_one_history(tmp_path: Path, resumed_step: int | None) -> None:
    path = tmp_path / "metrics.jsonl"
    telemetry = Telemetry([JsonlSink(path, None)])
    for step in range(1, 6):
        telemetry.log(step, step * 10, {"loss": 1.0})
    telemetry.close()
    with path.open("a") as stream:
        stream.write('{"time": 1.0, "step": 6, "los')  # killed while writing

    telemetry = Telemetry([JsonlSink(path, resumed_step)])
    telemetry.log(4, 40, {"loss": 2.0})
    telemetry.close()

    kept = [1, 2, 3] if resumed_step else []
    assert [(r["step"], r["loss"]) for r in read_records(path)] == [(s, 1.0) for s in kept] + [(4, 2.0)]
    discarded = read_records(tmp_path / "metrics.discarded.jsonl")
    assert [r["step"] for r in discarded] == [s for s in range(1, 6) if s not in kept]


def test_console_lines_are_plain_outside_a_terminal() -> None:
    output = io.StringIO()
    telemetry = Telemetry([ConsoleSink(1000, Console(file=output, highlight=False, soft_wrap=True))])
    report(telemetry)
    lines = output.getvalue().splitlines()
    assert lines == [
        "== stage at step 0: short: 4096 tokens",
        "step    1/1000  short  loss 3.5000  grad 0.500  lr 1.00e-03  12.3K tok/s",
        "-- validation_loss at step 1: loss 3.4",
        "-- alert at step 1: Spike: loss 9.0",
    ]


def test_console_shows_the_time_left_whatever_the_wall_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    sink = ConsoleSink(100, Console(file=output, highlight=False, soft_wrap=True))
    for step, time, wall in ((10, 1000.0, 5.0), (20, 1020.0, 4e7), (21, 1022.0, 0.0)):
        monkeypatch.setattr(sinks, "monotonic", lambda time=time: time)
        sink.write({"type": "metrics", "time": wall, "step": step, "stage": "short"})
    assert [line[-7:] for line in output.getvalue().splitlines()[1:]] == ["0:02:40", "0:02:38"]
