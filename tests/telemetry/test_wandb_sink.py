"""wandb gets everything when it works, and costs nothing when it does not."""

import json
import logging
import struct
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moba_train.config.run import WandbConfig
from moba_train.telemetry import wandb_sink
from moba_train.telemetry.telemetry import Telemetry
from moba_train.telemetry.wandb_sink import WandbSink


class FakeRun:
    """`log` runs `behaviour` first."""

    def __init__(self, behaviour: Callable[[], None]) -> None:
        self.behaviour = behaviour
        self.logged: list[dict[str, Any]] = []
        self.alerts: list[str] = []
        self.finished = False

    def define_metric(self, *args: Any, **kwargs: Any) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        self.behaviour()
        self.logged.append(values)

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(title)

    def finish(self) -> None:
        self.finished = True


def install(monkeypatch: pytest.MonkeyPatch, run: FakeRun, api_key: str | None = "key") -> None:
    fake = types.ModuleType("wandb")
    contents = {
        "init": lambda **kwargs: run,
        "Settings": dict,
        "Table": lambda columns, data: [list(row) for row in data],
        "api": types.SimpleNamespace(api_key=api_key),
    }
    vars(fake).update(contents)
    monkeypatch.setitem(sys.modules, "wandb", fake)


def sink(folder: Path, mode: str = "offline", **kwargs: Any) -> WandbSink:
    return WandbSink(WandbConfig.model_validate({"mode": mode}), folder, "name", "run-id", {"seed": 0}, **kwargs)


def raise_error() -> None:
    raise RuntimeError("wandb is broken")


def hang() -> None:
    time.sleep(60)


def test_records_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(lambda: None)
    install(monkeypatch, run)
    telemetry = Telemetry([sink(tmp_path)])
    telemetry.stage = "short"
    telemetry.log(1, 10, {"loss": 3.5})
    telemetry.event(2, 20, "spike", "loss too high", z=7.0)
    telemetry.event(3, 30, "stage", "a message alone is no curve")
    for kind in ("spike", "spike", "disk"):
        telemetry.alert(kind, "text", kind)
    telemetry.close()

    assert run.logged == [
        {"loss": 3.5, "step": 1, "tokens": 10},
        {"z": 7.0, "spikes": [[2, 20, "short", "loss too high"]], "step": 2, "tokens": 20},
    ]
    assert run.alerts == ["spike", "disk"], "one alert per kind in ten minutes"
    assert run.finished


@pytest.mark.parametrize("behaviour", [raise_error, hang])
def test_a_failing_wandb_neither_stops_nor_slows_a_run(tmp_path, monkeypatch, caplog, behaviour) -> None:
    install(monkeypatch, FakeRun(behaviour))
    monkeypatch.setattr(wandb_sink, "QUEUE_SIZE", 10)
    wandb = sink(tmp_path, wait_s=0.5)
    telemetry = Telemetry([wandb])

    start = time.perf_counter()
    for step in range(1000):
        telemetry.log(step, step, {"loss": 1.0})
    assert time.perf_counter() - start < 1.0
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        telemetry.close()
    assert time.perf_counter() - start < 5.0
    assert wandb.dropped > 900
    assert f"missed {wandb.dropped} records" in caplog.text
    assert ("did not finish" in caplog.text) == (behaviour is hang)


def test_online_without_a_key_is_one_warning(tmp_path, monkeypatch, caplog) -> None:
    run = FakeRun(lambda: None)
    install(monkeypatch, run, api_key=None)
    with caplog.at_level(logging.WARNING):
        telemetry = Telemetry([sink(tmp_path, mode="online")])
        telemetry.log(1, 1, {"loss": 1.0})
        telemetry.close()
    assert "no API key" in caplog.text
    assert run.logged == []


def test_a_missing_package_is_one_warning(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        sink(tmp_path).close()
    assert len(caplog.records) == 1
    assert "goes on without it" in caplog.text


def read_wandb_file(path: Path) -> list[Any]:
    """The protobuf records of a .wandb file: LevelDB's log format, 32 KiB blocks of (crc u32, length u16, type u8,
    data), after 7 bytes of header; a record that spans blocks comes in parts of type 2, 3, ..., 3, 4, a whole one has
    type 1."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


@pytest.mark.slow
def test_real_wandb_offline_keeps_one_run_over_a_resume(tmp_path: Path) -> None:
    """Reads wandb's own files back."""
    pytest.importorskip("wandb")
    for step in (1, 2):  # a start and a resume
        telemetry = Telemetry([sink(tmp_path)])
        telemetry.log(step, step * 100, {"loss": 4.0 - step})
        telemetry.close()

    files = sorted(tmp_path.glob("wandb/offline-run-*-run-id/*.wandb"), key=lambda path: path.stat().st_mtime)
    records = [record for file in files for record in read_wandb_file(file)]
    assert {record.run.run_id for record in records if record.HasField("run")} == {"run-id"}
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    curves = [{key: row[key] for key in ("step", "tokens", "loss")} for row in history]
    assert curves == [{"step": 1, "tokens": 100, "loss": 3.0}, {"step": 2, "tokens": 200, "loss": 2.0}]
