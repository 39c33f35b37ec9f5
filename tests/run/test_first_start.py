"""A run whose checkpoints are gone never begins again by itself; one that never had any does."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from moba_train.run.trainer import Trainer
from moba_train.train import main
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks


class PowerCut(Exception):
    pass


def _move_checkpoints(run: Run) -> None:
    (run.run_dir / "checkpoints").rename(run.folder / "elsewhere")


def test_lost_checkpoints_are_refused_unless_from_scratch(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run.train_here("--stop-at-step", "5") == 0
    _move_checkpoints(run)
    metrics = run.run_dir / "metrics.jsonl"
    before = metrics.read_bytes()
    assert run.train_here() == 2
    error = capsys.readouterr().err
    assert "--from-scratch" in error
    assert str(run.run_dir / "checkpoints") in error
    assert metrics.read_bytes() == before, "a refused start leaves no trace"

    def killed(trainer: Trainer) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", killed)  # at the first save
        with pytest.raises(PowerCut):
            run.train_here("--from-scratch")
    assert run.train_here("--stop-at-step", "4") == 0, "a restart before the first save needs the flag no more"
    assert [record["step"] for record in run.records()] == [1, 2, 3, 4]
    assert metrics.with_suffix(".discarded.jsonl").read_bytes().startswith(before)
    assert "--from-scratch" not in caplog.text
    assert run.train_here("--from-scratch", "--stop-at-step", "5") == 0, "torchrun gives the flag at every restart"
    assert run.records("resume")[0]["step"] == 4
    assert f"--from-scratch changes nothing: the run goes on from {run.run_dir}" in caplog.text


def test_without_metrics_the_pointer_to_the_newest_checkpoint_tells(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a kill right after the first save, before any event says so."""
    assert run.train_here("--stop-at-step", "4") == 0
    shutil.move(run.run_dir / "checkpoints" / "step_00000004", run.folder)
    (run.run_dir / "metrics.jsonl").unlink()
    assert run.train_here() == 2
    assert "latest names step_00000004" in capsys.readouterr().err
    assert run.train_here("--from-scratch", "--stop-at-step", "1") == 0


def test_a_history_that_cannot_be_read_may_tell_of_a_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder stands for a file that the file system refuses."""
    metrics = run.run_dir / "metrics.jsonl"
    metrics.mkdir(parents=True)
    assert run.train_here() == 2
    error = capsys.readouterr().err
    assert f"may have had one: {metrics}, which would say so, cannot be read: Is a directory" in error
    assert "--from-scratch" in error
    assert run.train_here("--from-scratch", "--stop-at-step", "1") == 0


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = Trainer._step

    def step(trainer: Trainer, *arguments: object) -> None:
        if trainer.progress.step == 3:
            raise PowerCut
        train_step(trainer, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        for _ in range(2):
            with pytest.raises(PowerCut):
                run.train_here()
    assert run.train_here("--stop-at-step", "4") == 0
    assert [record["step"] for record in run.records()] == [1, 2, 3, 4]


def test_all_ranks_are_refused_and_one_says_why(run: Run, ranks: Ranks) -> None:
    assert run.train_here("--stop-at-step", "4") == 0
    _move_checkpoints(run)
    ranks.work(refused, [str(run.write_recipe()), str(run.folder)], 2)
    errors = [(run.folder / f"error{rank}").read_text() for rank in (0, 1)]
    assert errors[0].startswith("error: no checkpoint is found")
    assert "--from-scratch" in errors[0]
    assert errors[1] == ""


def refused(recipe: str, folder: str) -> int:
    """0 when training ends with the exit code of a user's error; the error goes to a file of the rank."""
    with open(Path(folder, f"error{os.environ['RANK']}"), "w") as stream, contextlib.redirect_stderr(stream):
        return 0 if main([recipe]) == 2 else 1


def test_ranks_with_different_recipes_do_not_train_together(run: Run, ranks: Ranks) -> None:
    ranks.work(refused_apart, [str(run.write_recipe()), str(run.folder)], 2)
    errors = [(run.folder / f"error{rank}").read_text() for rank in (0, 1)]
    assert "rank 1: given another recipe" in "".join(errors)


def refused_apart(recipe: str, folder: str) -> int:
    """As `refused`, each rank with a learning rate of its own."""
    rank = os.environ["RANK"]
    with open(Path(folder, f"error{rank}"), "w") as stream, contextlib.redirect_stderr(stream):
        return 0 if main([recipe, f"optim.lr=0.00{int(rank) + 1}"]) == 2 else 1
