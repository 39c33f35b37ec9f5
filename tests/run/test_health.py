"""What training does when the data, the numbers or the disk are not as they should be."""

import errno
import os
import re
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.checkpoint import manifest
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.manifest import read_meta, verify_checkpoint
from moba_train.checkpoint.retention import Evaluated
from moba_train.run.reports import RunReports
from tests.run.tiny_run import VOCAB, Run


def train_here(run: Run, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Train in this process; returns (exit code, what it printed)."""
    code = run.train_here(*arguments)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_loss_that_is_not_finite_ends_the_run_before_it_touches_the_weights(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.recipe["checkpoint"]["every"] = 1
    assert train_here(run, capsys, "--stop-at-step", "2")[0] == 0
    run.recipe["optim"] = {"lr": 1e6, "weight_decay": 1e6, "clip_norm": None}  # weights times 1e12 in each step
    code, printed = train_here(run, capsys)
    assert code == 65
    assert "not applied" in printed
    assert "optim.lr" in printed
    alerts = run.records("alert")
    assert any("fatal" in alert["title"] for alert in alerts)
    verify_checkpoint(run.newest_checkpoint)
    assert read_meta(run.newest_checkpoint)["progress"]["step"] < run.records("spike")[-1]["step"]


def test_a_step_without_any_loss_token_is_skipped_with_a_warning(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents of one token predict nothing: no NaN, no update, the tokens count as consumed. The one document with
    loss lies in a few of the batches."""
    with IndexedDatasetWriter(run.folder / "lonely", np.uint16) as writer:
        writer.add_document(np.arange(100) % VOCAB)
        for token in range(2900):
            writer.add_document(np.array([token % VOCAB], dtype=np.uint16))
    run.recipe["data"] = {"train": [{"path": str(run.folder / "lonely")}]}
    code, printed = train_here(run, capsys)
    assert code == 0, printed
    skipped = [record["step"] for record in run.records("warning")]
    assert len(skipped) > 2
    assert sorted(skipped + [record["step"] for record in run.records()]) == list(range(1, 13))
    assert read_meta(run.newest_checkpoint)["progress"]["step"] == 12


def test_a_full_disk_is_refused_before_training(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - 1000, 1000))
    code, printed = train_here(run, capsys)
    assert code == 2
    assert "run_dir" in printed
    assert "0.00 MiB free, one checkpoint needs" in printed
    assert not list(Path(run.run_dir / "checkpoints").glob("step_*"))


def test_each_stage_trains_with_its_own_attention_rope_and_rate(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.recipe["stages"][1] |= {"lr": 0.002, "schedule": {"kind": "constant"}}
    assert train_here(run, capsys)[0] == 0
    first, second = run.records("stage")
    assert "2 x full" in first["message"]
    assert "1 x moba, 1 x full" in second["message"]
    rates = [record["lr"] for record in run.records()]
    assert rates[6:] == [0.002] * 6
    assert rates[0] == pytest.approx(0.01 * 512 / 1000)
    assert [record["tokens"] for record in run.records()] == [512 * step for step in range(1, 13)]


def test_a_longer_last_stage_goes_on_from_a_finished_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(run, capsys)[0] == 0
    run.recipe["stages"][1]["tokens"] = 8 * 512
    assert train_here(run, capsys)[0] == 0
    assert [record["step"] for record in run.records()] == list(range(1, 15))


def test_a_shorter_stage_than_was_trained_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(run, capsys, "--stop-at-step", "5")[0] == 0
    run.recipe["stages"][0]["tokens"] = 3 * 512
    code, printed = train_here(run, capsys)
    assert code == 2
    assert "stages[0].tokens" in printed


@pytest.mark.parametrize("late", [False, True])
def test_a_disk_that_is_full_costs_a_checkpoint_but_the_last_one_must_be_saved(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The run goes on and says so; when it cannot save its end either, it does not pretend to be done. `late`: the save
    of step 8 ends only when that of step 12 is due."""
    saves = RunReports.saves

    def full(path: Path, content: dict[str, object]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run.recipe["checkpoint"] = {"every": 4}
    assert train_here(run, capsys, "--stop-at-step", "4")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_json", full)
        if late:
            patch.setattr(
                RunReports, "saves", lambda self, told: saves(self, told) if self._progress.step == 12 else None
            )
        code, printed = train_here(run, capsys)
    assert code == 2
    assert "the checkpoint of step 12 was not saved" in printed
    assert "No space left on device" in printed
    assert [record["step"] for record in run.records()] == list(range(1, 13))
    assert any("step 8 was not saved" in record["message"] for record in run.records("warning"))
    assert {alert["alert"] for alert in run.records("alert")} == {"checkpoint"}

    assert train_here(run, capsys)[0] == 0
    assert run.records("resume")[-1]["step"] == 4
    events = run.records("checkpoint")
    assert [event["step"] for event in events if event.get("checkpoint_stall_s", 0) > 0] == [4, 8, 12]
    assert any(event.get("checkpoint_save_s", 0) > 0 for event in events)


def test_the_log_says_when_a_save_had_to_wait_for_the_one_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, hash_file, wait = iter([True]), manifest.hash_file, Checkpointer.wait
    asked = threading.Semaphore(0)

    def counted(checkpointer: Checkpointer, *arguments: float) -> None:
        asked.release()
        wait(checkpointer, *arguments)

    def hash_slowly(path: Path) -> manifest.FileEntry:
        if next(slow, False):
            for _ in range(2):  # the second save, however long the steps take
                assert asked.acquire(timeout=120)
            time.sleep(1.5)
        return hash_file(path)

    monkeypatch.setattr(Checkpointer, "wait", counted)
    monkeypatch.setattr(manifest, "hash_file", hash_slowly)
    run.recipe["checkpoint"]["every"] = 1
    assert run.train_here("--stop-at-step", "2") == 0
    first, second = [event for event in run.records("checkpoint") if "checkpoint_stall_s" in event]
    assert re.match(
        r"saving the checkpoint of step 2, [1-9]\d*\.\d s late: the one before was still", second["message"]
    )
    assert second["checkpoint_stall_s"] > 1
    assert first["message"] == "saving the checkpoint of step 1"


def test_the_best_checkpoint_stays_and_its_validation_loss_is_known(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.recipe["checkpoint"] = {"every": 2, "keep_last": 1, "keep_best": 1}
    run.recipe["evaluation"]["every"] = 2
    assert train_here(run, capsys)[0] == 0
    losses = {record["step"]: record["eval_loss"] for record in run.records("validation_loss")}
    best = {min(range(2, 7, 2), key=losses.__getitem__), min(range(8, 13, 2), key=losses.__getitem__), 12}
    kept = {int(path.name.removeprefix("step_")): path for path in (run.run_dir / "checkpoints").glob("step_*")}
    assert kept.keys() == best
    evaluated = Evaluated.read(run.run_dir / "checkpoints")
    assert [evaluated.numbers(read_meta(path)) for path in kept.values()] == [
        {"eval_loss": losses[step]} for step in kept
    ]
