"""What happens to the run folder while a run trains: taken over by another run, partly gone, full of NaN."""

import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.manifest import read_meta, verify_checkpoint
from moba_train.checkpoint.publisher import Publisher
from moba_train.checkpoint.recipe import checkpoint_folders
from moba_train.config.load import load_config
from moba_train.errors import ReproducibleFaultError
from moba_train.foreign_files import ROOTS
from moba_train.optim.gradients import local_part
from moba_train.run import reports
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.trainer import Trainer
from moba_train.train import main
from tests.forked import forked
from tests.run.faults import inject, not_a_number
from tests.run.test_health import train_here
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks


def before_save(patch: pytest.MonkeyPatch, actions: dict[int, Callable[[Trainer], Any]]) -> None:
    """Does these things before the saves of these steps."""
    save = Trainer._save

    def acted_on(trainer: Trainer) -> None:
        actions.pop(trainer.progress.step, lambda _trainer: None)(trainer)
        save(trainer)

    patch.setattr(Trainer, "_save", acted_on)


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train_elsewhere(recipe: str) -> None:
    """The first steps of a run, in a process of its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    assert main([recipe, "--stop-at-step", "2"]) == 0


@pytest.mark.parametrize("noticed", ["while it evaluates", "by the next save"])
def test_a_run_whose_folder_was_removed_and_made_anew_by_another_stops_and_leaves_that_one_alone(
    noticed: str, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has higher steps than the other, so its retention would delete the other's checkpoints."""
    if noticed == "by the next save":  # so the evaluations after this one are complete, and would be written down
        monkeypatch.setattr(RunCheckpoints, "wants_to_stop", False)
    run.recipe["checkpoint"] = {"every": 2, "keep_last": 1}
    found: list[dict[str, bytes]] = []

    def second_run(trainer: Trainer) -> None:
        trainer.checkpoints.checkpointer.wait()  # else the save before this one may write while all is removed
        shutil.rmtree(run.run_dir)
        process = forked().Process(target=train_elsewhere, args=(str(run.folder / "recipe.yaml"),))
        process.start()
        process.join()
        assert process.exitcode == 0
        found.append(contents(run.run_dir))

    before_save(monkeypatch, {6: second_run})
    code, printed = train_here(run, capsys)
    assert code == 2
    assert f"run_dir {run.run_dir}: belongs to another run now (process " in printed
    assert contents(run.run_dir) == found[0]
    assert steps(run.run_dir / "checkpoints") == ["step_00000002"]


def test_a_run_whose_folder_is_gone_stops_and_does_not_make_it_again(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it vanishes after the last save, where the report would be written into it."""
    run.recipe["telemetry"]["report"] = True

    def remove_folder(trainer: Trainer) -> None:
        trainer.checkpoints.checkpointer.wait()
        shutil.rmtree(run.run_dir)

    for step in (4, 12):
        before_save(monkeypatch, {step: remove_folder})
        code, printed = train_here(run, capsys)
        assert code == 2
        assert "is no longer there" in printed
        assert not run.run_dir.exists()


def test_a_checkpoint_folder_that_vanishes_is_made_again(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_save(monkeypatch, {8: remove_checkpoints})
    assert train_here(run, capsys)[0] == 0
    assert steps(run.run_dir / "checkpoints") == ["step_00000008", "step_00000012"]


def remove_checkpoints(trainer: Trainer) -> None:
    trainer.checkpoints.checkpointer.wait()
    shutil.rmtree(trainer.checkpoints.folder)


def replace_by_file(trainer: Trainer) -> None:
    trainer.checkpoints.checkpointer.wait()
    trainer.checkpoints.folder.rename(trainer.resolved.folders.run / "away")
    trainer.checkpoints.folder.touch()


def put_back(trainer: Trainer) -> None:
    trainer.checkpoints.checkpointer.wait()
    trainer.checkpoints.folder.unlink()
    (trainer.resolved.folders.run / "away").rename(trainer.checkpoints.folder)


def test_runs_of_one_name_have_folders_of_their_own_in_one_fallback(run: Run) -> None:
    """Else each would remove the other's checkpoints, or resume from them."""
    path = run.write_recipe()
    given = [f"checkpoint.fallback_dir={run.folder / 'local'}"]
    configs = [load_config(path, [*given, f"run_dir={run.folder / parent / 'run'}"]) for parent in "ab"]
    one, other = (checkpoint_folders(config.run_dir, config.checkpoint.fallback_dir) for config in configs)
    assert one[1].parent == other[1].parent == run.folder / "local"
    assert one[1] != other[1]


def test_the_fallback_takes_checkpoints_and_the_run_resumes_from_the_newest_of_both(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = run.folder / "local"
    run.recipe["checkpoint"] = {"every": 2, "fallback_dir": str(local)}
    with monkeypatch.context() as patch:
        before_save(patch, {4: replace_by_file, 6: lambda _trainer: None, 8: lambda _trainer: None})
        assert train_here(run, capsys, "--stop-at-step", "8")[0] == 0
    (fallback,) = local.iterdir()
    assert steps(fallback) == ["step_00000006", "step_00000008"]
    (alert, *_) = run.records("alert")
    assert alert["alert"] == "checkpoint_fallback"
    assert str(fallback) in alert["text"]

    (run.run_dir / "checkpoints").unlink()
    (run.run_dir / "away").rename(run.run_dir / "checkpoints")
    assert train_here(run, capsys)[0] == 0
    assert run.records("resume")[-1]["step"] == 8
    assert [record["step"] for record in run.records()] == list(range(1, 13))
    assert steps(run.run_dir / "checkpoints") == ["step_00000010", "step_00000012"]
    assert steps(fallback) == ["step_00000006", "step_00000008"]


@pytest.mark.parametrize("fallback", [False, True])
def test_the_end_of_a_run_names_the_last_checkpoint_that_was_saved_and_where_it_is(
    fallback: bool, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 4 fails in the run folder; step 6 is not finite."""
    local = run.folder / "local"
    run.recipe["checkpoint"] = {"every": 2} | ({"fallback_dir": str(local)} if fallback else {})
    before_save(monkeypatch, {4: replace_by_file})
    inject(monkeypatch, {6: not_a_number})
    code, printed = train_here(run, capsys)
    assert code == ReproducibleFaultError.exit_code
    folder = next(local.iterdir()) if fallback else run.run_dir / "checkpoints"
    assert f"the last checkpoint is step {4 if fallback else 2} in {folder}; the same command goes on" in printed


def test_a_moved_run_folder_that_loses_a_newer_checkpoint_in_the_fallback_says_so(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.recipe["checkpoint"] = {"every": 2, "fallback_dir": str(run.folder / "local")}
    before_save(monkeypatch, {4: replace_by_file})
    assert run.train_here("--stop-at-step", "5") == 0
    (run.run_dir / "checkpoints").unlink()
    (run.run_dir / "away").rename(run.run_dir / "checkpoints")
    assert run.train_here("--stop-at-step", "5") == 0
    assert "is not found" not in caplog.text
    run.recipe["run_dir"] = str(run.run_dir.rename(run.folder / "moved"))
    for _ in range(2):
        assert run.train_here("--stop-at-step", "3") == 0
    assert caplog.text.count("The checkpoint of step 5 was complete and is not found in ") == 1
    assert "the run goes on from step 2" in caplog.text


def test_a_run_starts_again_from_the_fallback_while_its_own_disk_is_full(
    run: Run, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes no new file either; a file in place of the folder stands for that."""
    local = run.folder / "local"
    run.recipe["checkpoint"] = {"every": 2, "fallback_dir": str(local)}
    usage = namedtuple("usage", "total used free")
    full = [run.run_dir]

    def disk_usage(path: Path) -> tuple[int, int, int]:
        is_full = any(path.is_relative_to(folder) for folder in full)
        return usage(2**40, 0, 1000 if is_full else 2**40)

    before_save(monkeypatch, {4: replace_by_file})
    assert train_here(run, capsys, "--stop-at-step", "6")[0] == 0
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert train_here(run, capsys, "--stop-at-step", "8")[0] == 0
    assert f"run_dir {run.run_dir} cannot be used: 0.00 MiB free" in caplog.text
    assert "checkpoints that it does not take go to checkpoint.fallback_dir" in caplog.text
    assert run.records("resume")[-1]["step"] == 6
    (fallback,) = local.iterdir()
    assert steps(fallback) == ["step_00000006", "step_00000008"]

    full.append(local)
    code, printed = train_here(run, capsys)
    assert code == 2
    assert f"run_dir {run.run_dir} cannot be used: 0.00 MiB free" in printed
    assert f"nor can checkpoint.fallback_dir {local}: 0.00 MiB free" in printed


def test_failed_saves_in_a_row_are_an_alert_and_end_the_run_if_the_recipe_says_so(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_back_once_told(trainer: Trainer) -> None:
        """A failure that is told only after a later save has ended well is none in a row."""
        trainer.checkpoints.checkpointer.wait()
        trainer._report_saves()
        put_back(trainer)

    run.recipe["checkpoint"] = {"every": 1}
    monkeypatch.setattr(reports, "ALERT_AFTER_FAILURES", 2)
    with monkeypatch.context() as patch:
        before_save(patch, {3: replace_by_file, 6: put_back_once_told})
        assert train_here(run, capsys, "--stop-at-step", "6")[0] == 0
    alerts = [alert["text"] for alert in run.records("alert") if alert["alert"] == "failed_saves"]
    assert [text.split(":")[0] for text in alerts] == ["2 saves in a row have failed", "3 saves in a row have failed"]
    assert all("after step 2 is lost" in text for text in alerts)

    run.recipe["checkpoint"]["max_failures"] = 2
    with monkeypatch.context() as patch:
        before_save(patch, {8: replace_by_file})
        code, printed = train_here(run, capsys)
    assert code == 2
    assert "2 saves in a row have failed, as many as checkpoint.max_failures allows" in printed
    assert run.records()[-1]["step"] < 12


def test_a_fallback_in_the_run_folder_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.recipe["checkpoint"]["fallback_dir"] = str(run.run_dir / "local")
    code, printed = train_here(run, capsys)
    assert code == 2
    assert "checkpoint.fallback_dir" in printed


def train_with_nan_on_rank_1(recipe: str, step: int) -> int:
    """From the save of this step on, the last rank's optimizer state holds a NaN. Saves end when the run has failed."""

    def poison(trainer: Trainer) -> None:
        if trainer.world.rank == trainer.world.size - 1:
            parameter = next(iter(trainer.learner.optimizer.state))
            local_part(trainer.learner.optimizer.state[parameter]["exp_avg"]).view(-1)[0] = torch.nan

    with pytest.MonkeyPatch.context() as patch:
        before_save(patch, {step: poison})
        failed = threading.Event()
        publish_it = Publisher.publish

        def publish_late(publisher: Publisher, number: int, *arguments: Any) -> Any:
            if number == step:
                failed.wait(20)
            return publish_it(publisher, number, *arguments)

        close = Checkpointer.close

        def close_after_failure(checkpointer: Checkpointer, timeout_s: float | None = None) -> None:
            failed.set()
            close(checkpointer, timeout_s)

        patch.setattr(Publisher, "publish", publish_late)
        patch.setattr(Checkpointer, "close", close_after_failure)
        return main([recipe])


def test_nan_in_one_rank_s_optimizer_state_is_not_resumed_from(
    run: Run, ranks: Ranks, finished_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends at the next steps, and the same command goes on from the healthy checkpoint before."""
    run.recipe["checkpoint"] = {"every": 4, "keep_last": 1}
    with pytest.raises(AssertionError, match="rank 0 failed"):
        ranks.work(train_with_nan_on_rank_1, [str(run.write_recipe()), 8], 2)
    folder = run.run_dir / "checkpoints"
    assert steps(folder) == ["step_00000004", "step_00000008"]
    meta = read_meta(folder / "step_00000008")
    assert meta["good"] is False
    assert [name.endswith(".exp_avg") for name in meta["not_finite"]] == [True]
    verify_checkpoint(folder / "step_00000008")
    (alert,) = (alert for alert in run.records("alert") if alert["alert"] == "not_finite")
    assert meta["not_finite"][0] in alert["text"]
    ranks.train(run, 2)
    assert run.records("resume")[-1]["step"] == 4
    assert run.losses() == finished_run.losses()


def test_a_run_without_any_finite_checkpoint_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_with_nan_on_rank_1(str(run.write_recipe()), 4) == ReproducibleFaultError.exit_code
    assert steps(run.run_dir / "checkpoints") == ["step_00000004"]
    code, printed = train_here(run, capsys)
    assert code == 2
    assert "the checkpoint of step 4 holds NaN or infinite values in optim." in printed
    assert yaml.safe_load((run.run_dir / "config.yaml").read_text())["name"] == "test"


def test_a_run_folder_from_elsewhere_leads_no_file_of_the_run_out_of_it(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    run.run_dir.mkdir(parents=True)
    for name in ("metrics.jsonl", "metrics.discarded.jsonl", "lock", ".tmp-config.yaml", ".tmp-restarts.json"):
        (run.run_dir / name).symlink_to(victim)
    (run.run_dir / "checkpoints").symlink_to(outside)
    assert run.train_here() == 2
    assert "not a regular file; move it away" in capsys.readouterr().err
    (run.run_dir / "lock").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ROOTS)
        assert run.train_here() == 2
    assert f"if you trust it, allow the folder: {ROOTS}={outside}" in capsys.readouterr().err
    (run.run_dir / "checkpoints").unlink()
    assert run.train_here("--stop-at-step", "2") == 0
    assert "metrics.jsonl: is not a regular file" in caplog.text
    assert victim.read_text() == "mine"
    assert not any(outside.iterdir())


def test_a_history_that_cannot_be_read_does_not_end_a_run_and_a_recipe_that_cannot_be_written_does(
    run: Run, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A folder stands for a file that the file system refuses."""
    assert train_here(run, capsys, "--stop-at-step", "4")[0] == 0
    metrics, recipe = run.run_dir / "metrics.jsonl", run.run_dir / "config.yaml"
    metrics.unlink()
    metrics.mkdir()
    assert train_here(run, capsys, "--stop-at-step", "5")[0] == 0
    assert f"{metrics} cannot be read; records of step 4 may be repeated: Is a directory" in caplog.text
    assert run.newest_checkpoint.name == "step_00000005"
    recipe.unlink()
    recipe.mkdir()
    code, printed = train_here(run, capsys)
    assert code == 2
    assert f"run_dir {run.run_dir} cannot be used: the recipe is kept in config.yaml: " in printed
