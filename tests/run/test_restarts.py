"""A run whose newest checkpoint is poisoned comes back from the one before, and one that gets nowhere ends with the
reason."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.manifest import MANIFEST, META, hash_file, read_meta
from moba_train.checkpoint.publish import Accept
from moba_train.checkpoint.retention import MARKS, Mark, Marks
from moba_train.errors import CheckpointError, ReproducibleFaultError
from moba_train.run import checkpoints as checkpoints_module
from moba_train.run import restarts
from moba_train.run.restarts import RESTARTS, Restarts, choose_checkpoint
from moba_train.run.trainer import Trainer
from moba_train.train import main
from tests.run.faults import inject, not_a_number, steady
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks


def poison(patch: pytest.MonkeyPatch, after_step: int, into: str) -> None:
    """After this step, put one NaN into the weights or the optimizer's state of the last rank."""
    update = Trainer._update

    def poisoned(trainer: Trainer, *arguments: Any) -> None:
        update(trainer, *arguments)
        if trainer.progress.step == after_step and trainer.world.rank == trainer.world.size - 1:
            parameter = next(iter(trainer.learner.model.parameters()))
            tensor = parameter if into == "weights" else trainer.learner.optimizer.state[parameter]["exp_avg"]
            with torch.no_grad():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)[0] = torch.nan

    patch.setattr(Trainer, "_update", poisoned)


def starts(run: Run) -> list[dict[str, Any]]:
    return json.loads((run.run_dir / RESTARTS).read_text())["starts"]


def checkpoints(run: Run) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run.run_dir / "checkpoints").glob("step_*"))


def resumed_from(run: Run) -> int:
    return run.records("resume")[-1]["step"]


def train_poisoned(recipe: str, into: str) -> int:
    """Train until the fault ends the run."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, 8, into)
        return 0 if main([recipe]) == ReproducibleFaultError.exit_code else 1


def test_one_nan_in_the_weights_of_one_rank_costs_one_checkpoint(run: Run, ranks: Ranks) -> None:
    """Without marks, every restart takes the poisoned checkpoint of step 8 and ends at step 9."""
    steady(run, "log", 12)
    ranks.work(train_poisoned, [str(run.write_recipe()), "weights"], 2)
    assert checkpoints(run) == [4, 8]
    assert Marks.read(run.run_dir / "checkpoints").steps == [8]
    assert any("step 8 is passed over" in warning["message"] for warning in run.records("warning"))
    ranks.train(run, 2)
    assert resumed_from(run) == 4
    assert read_meta(run.newest_checkpoint)["progress"]["step"] == 12
    assert starts(run) == [], "a run that has ended in order has no failed starts"


def test_a_broken_optimizer_state_is_left_behind_at_the_second_restart(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes one good step to reach the weights, so that only a second start from step 8 puts it in doubt. Resuming
    here does not look at what the save has found, as if it were something that saves do not notice."""
    steady(run, "log", 12)
    monkeypatch.setattr(checkpoints_module, "_why_not_resume_from", lambda _meta: None)
    with monkeypatch.context() as patch:
        poison(patch, 8, "optimizer")
        assert run.train_here() == ReproducibleFaultError.exit_code
    assert run.train_here() == ReproducibleFaultError.exit_code
    assert resumed_from(run) == 8
    assert [(start["from_step"], start["fatal"]) for start in starts(run)] == [(8, True)]
    assert run.train_here() == 0
    assert resumed_from(run) == 4


def test_skip_step_protects_the_checkpoint_before_the_poisoned_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on and saves until its skips are spent, and the healthy checkpoint outlives all these saves."""
    steady(run, "skip_step", 60, max_skips=10)
    run.recipe["checkpoint"]["keep_last"] = 2
    with monkeypatch.context() as patch:
        poison(patch, 8, "optimizer")
        assert run.train_here() == ReproducibleFaultError.exit_code
    assert 4 in checkpoints(run)
    assert 16 in checkpoints(run), "it saved after the fault"
    assert run.train_here("--stop-at-step", "12") == 0
    assert resumed_from(run) == 4


def test_a_transient_fault_costs_no_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is taken back as soon as a step is finite on the same weights."""
    steady(run, "skip_step", 12)
    inject(monkeypatch, {9: not_a_number})
    assert run.train_here("--stop-at-step", "11") == 0
    assert any("step 8 is passed over" in record["message"] for record in run.records("warning"))
    assert Marks.read(run.run_dir / "checkpoints").steps == []


def test_a_run_that_gets_nowhere_ends_with_an_account_of_its_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch that always fails: the starts go back as far as there are checkpoints, and then the run refuses."""
    steady(run, "log", 12)
    monkeypatch.setattr(restarts, "MOST_STARTS", 3)
    inject(monkeypatch, {10: not_a_number})
    froms = []
    passed_over = []
    for _ in range(4):
        assert run.train_here() == ReproducibleFaultError.exit_code
        said = capsys.readouterr().err
        assert "the last checkpoint is step 8 in" in said
        assert ("the same command goes on from the newest" in said) != ("the same command passes over it" in said)
        passed_over.append("the same command passes over it" in said)
        froms.append(resumed_from(run) if run.records("resume") else 0)
    assert froms == [0, 8, 4, 8], "the second one of step 8 is another checkpoint: it gets its chance"
    assert passed_over == [False, True, False, True], "what the next start does is what was said"
    assert run.train_here() == 2
    said = capsys.readouterr().err
    assert "3 starts in a row have saved no usable checkpoint newer than that of step 8" in said
    assert said.count("loss nan") == 3
    for hint in (RESTARTS, "inspect-spike", "or lr of a stage", MARKS):
        assert hint in said
    monkeypatch.undo()
    os.remove(run.run_dir / RESTARTS)
    assert run.train_here() == 0


def test_starts_that_cannot_save_anything_do_not_count(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements in one folder that fail again and again; the next one with checkpoints is not refused for them."""
    steady(run, "log", 12)
    monkeypatch.setattr(restarts, "MOST_STARTS", 1)
    run.recipe["checkpoint"]["every"] = None
    with monkeypatch.context() as patch:
        inject(patch, {2: not_a_number})
        for _ in range(2):
            assert run.train_here() == ReproducibleFaultError.exit_code
    run.recipe["checkpoint"]["every"] = 4
    assert run.train_here("--stop-at-step", "1") == 0


def test_a_checkpoint_that_could_not_be_read_is_not_replaced_by_a_marked_one() -> None:
    def find(accept: Accept) -> Path | None:
        raise UnreadableError("step 12 could not be read")

    marks = Marks([Mark(8, "", "poisoned")])
    with pytest.raises(UnreadableError, match="step 12"):
        choose_checkpoint(find, marks, lambda step: None, lambda *_: None)


def test_without_another_checkpoint_the_oldest_marked_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong came in after it."""
    metas = {Path(f"step {step}"): {"progress": {"step": step}} for step in (12, 8, 4)}
    monkeypatch.setattr("moba_train.run.restarts.read_meta", metas.__getitem__)

    def find(accept: Accept) -> Path:
        accepted = [path for path, meta in metas.items() if accept(meta)]
        if not accepted:
            raise CheckpointError("there are only others")
        return accepted[0]

    def newest(*marked: int) -> Path | None:
        marks = Marks([Mark(step, "", "poisoned") for step in marked])
        return choose_checkpoint(find, marks, lambda step: None, lambda *_: None)

    assert newest(12) == Path("step 8")
    assert newest(12, 4, 8) == Path("step 4")


def test_a_checkpoint_whose_meta_names_no_step_is_refused_with_a_message(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.train_here("--stop-at-step", "4") == 0
    path = run.newest_checkpoint
    meta = {key: value for key, value in read_meta(path).items() if key != "progress"}
    (path / META).write_text(json.dumps(meta))
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][META] = hash_file(path / META)
    (path / MANIFEST).write_text(json.dumps(manifest))
    capsys.readouterr()
    assert run.train_here() == 2
    assert "the checkpoint's progress record is not from this version" in capsys.readouterr().err


def begin(folder: Path, step: int, marked: list[int] | None = None) -> Restarts:
    start = Restarts(folder)
    assert start.begin(step, marked or []) is None
    return start


def count(folder: Path) -> int:
    return len(json.loads((folder / RESTARTS).read_text())["starts"])


def test_what_counts_as_a_start_without_progress(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        begin(tmp_path, 100)  # killed
        assert count(tmp_path) == expected
    stopped = begin(tmp_path, 100)
    stopped.end_in_order()
    stopped.end("an error after it", fatal=True)
    assert count(tmp_path) == 3, "an orderly stop does not count"
    assert Restarts(tmp_path).blames(100) is None
    begin(tmp_path, 200)
    assert count(tmp_path) == 1, "a newer checkpoint is progress"
    ended = begin(tmp_path, 200)
    ended.end("step 210: loss nan", fatal=True)
    ended.end("what its end led to")
    assert Restarts(tmp_path).blames(200) == "step 210: loss nan"
    assert Restarts(tmp_path).blames(100) is None
    begin(tmp_path, 100, [200]).end("step 210: loss nan", fatal=True)
    begin(tmp_path, 200, [200]).end("step 210: loss nan", fatal=True)
    assert count(tmp_path) == 4, "to reach step 200 again is no progress"
    begin(tmp_path, 50)
    assert count(tmp_path) == 1, "somebody has moved the newer checkpoints away"


def test_killed_starts_that_come_closer_to_the_place_of_a_fault_do_not_count(tmp_path: Path) -> None:
    begin(tmp_path, 1000).end("step 1050: loss nan", fatal=True)
    for step in range(100, 1000, 10):
        begin(tmp_path, step, [1000])
    assert count(tmp_path) == 2


def test_kills_never_put_a_checkpoint_in_doubt_and_a_damaged_file_is_a_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(tmp_path, 100)
    assert Restarts(tmp_path).blames(100) is None
    (tmp_path / RESTARTS).write_text('{"starts": [{"time": 3}')
    begin(tmp_path, 100)
    assert count(tmp_path) == 1
    assert "is ignored" in caplog.text


def test_the_limit_is_reached_by_kills_alone(tmp_path: Path) -> None:
    for _ in range(restarts.MOST_STARTS - 1):
        begin(tmp_path, 0)
    begin(tmp_path, 0).end("the last of them")
    problem = Restarts(tmp_path).begin(0, [])
    assert problem is not None
    assert "20 starts in a row have saved no usable checkpoint at all" in problem
    assert "from the beginning: ended without a message" in problem
    assert "from the beginning: the last of them" in problem
    assert "10 earlier ones" in problem
