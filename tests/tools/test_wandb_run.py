"""What the real wandb holds of a run that crashed twice and rolled back once, compared with its metrics.jsonl."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from moba_train.config.load import load_config
from moba_train.environment import code_version
from moba_train.run.trainer import Trainer
from moba_train.telemetry.jsonl import read_records
from tests.run.faults import inject, not_a_number, steady
from tests.run.tiny_run import Run

STEPS = 16
CRASHES = (7, 15)
"""In these steps, which are trained again from the checkpoints of steps 4 and 12."""
ROLLBACK = 10
TIMES = {"step_s", "data_s", "attention_s", "tokens_per_s", "tokens_per_s_per_device"}
"""Differ when a step is trained again."""


def read_wandb_file(path: Path) -> list[Any]:
    """The protobuf records of a .wandb file: LevelDB's log format, 32 KiB blocks of (crc u32, length u16, type u8,
    data), after 7 bytes of header; a record that spans blocks comes in parts of type 2, 3, ..., 3, 4, a whole one has
    type 1. A record that is still being written is left out."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made when it is imported

    data, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):
            break
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


class PowerCut(Exception):
    pass


@pytest.fixture(scope="module")
def crashed_run(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    pytest.importorskip("wandb")
    run = steady(Run(tmp_path_factory.mktemp("wandb"), corpora), "rollback", STEPS)
    run.recipe["telemetry"]["wandb"] = {"mode": "offline", "project": "test"}
    crashes, train_step = list(CRASHES), Trainer._step

    def step(trainer: Trainer, *arguments: Any) -> None:
        if trainer.progress.step + 1 in crashes:
            crashes.remove(trainer.progress.step + 1)
            raise PowerCut
        train_step(trainer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        inject(patch, {ROLLBACK: not_a_number})
        for _ in CRASHES:
            with pytest.raises(PowerCut):
                run.train_here()
            time.sleep(1)  # the names of wandb's folders tell seconds apart
        assert run.train_here() == 0
    return run


@pytest.fixture(scope="module")
def records(crashed_run: Run) -> list[Any]:
    """Everything wandb wrote, oldest first."""
    files = sorted(crashed_run.run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 3
    deadline = time.monotonic() + 60
    # `finish` does not wait for its file, which may still be empty.
    while not all(any(record.HasField("exit") for record in read_wandb_file(file)) for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return [record for file in files for record in read_wandb_file(file)]


def test_a_file_is_read_while_wandb_writes_it(crashed_run: Run, records: list[Any], tmp_path: Path) -> None:
    assert records  # all files are whole
    (file, *_) = crashed_run.run_dir.glob("wandb/offline-run-*/*.wandb")
    (tmp_path / "part.wandb").write_bytes(file.read_bytes()[:-3])
    assert read_wandb_file(tmp_path / "part.wandb") == read_wandb_file(file)[:-1]


def test_it_is_one_run_that_holds_each_step_of_metrics_jsonl_once(crashed_run: Run, records: list[Any]) -> None:
    assert len({record.run.run_id for record in records if record.HasField("run")}) == 1
    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [row["step"] for row in history] == sorted(row["step"] for row in history)
    assert [row["_step"] for row in history] == list(range(len(history)))
    metrics = [row for row in history if "loss" in row]
    ours = [record for record in read_records(crashed_run.run_dir / "metrics.jsonl") if record["type"] == "metrics"]
    assert [row["step"] for row in metrics] == [record["step"] for record in ours] == list(range(1, STEPS + 1))
    for row, record in zip(metrics, ours, strict=True):
        values = {key: value for key, value in record.items() if key not in {"time", "type", "stage", *TIMES}}
        assert {key: repr(float(row[key])) for key in values} == {key: repr(float(v)) for key, v in values.items()}
    assert [(row["step"], row["step_to"]) for row in history if "step_to" in row] == [(ROLLBACK, 8)]


def test_it_holds_spikes_alerts_recipe_and_code(crashed_run: Run, records: list[Any]) -> None:
    tables = crashed_run.run_dir.glob("wandb/offline-run-*/files/media/table/spikes*.json")
    newest = max(tables, key=lambda path: path.stat().st_mtime)
    ((step, tokens, stage, message),) = json.loads(newest.read_text())["data"]
    assert (step, tokens, stage) == (ROLLBACK, 512 * ROLLBACK, "long")
    assert "loss nan" in message
    alerts = [record.alert.title for record in records if record.HasField("alert")]
    assert alerts == [f"fatal at step {ROLLBACK}"]
    recipe = load_config(crashed_run.run_dir / "config.yaml").model_dump(mode="json")
    for run in [record.run for record in records if record.HasField("run")]:
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert {key: config[key] for key in recipe} == recipe
        assert config["code"] == code_version()
