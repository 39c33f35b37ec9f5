"""Saves into the fallback when the first folder does not take them, and saves that the run must not make at all."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moba_train.checkpoint import publisher as module
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.load import load_checkpoint, newest_intact
from moba_train.checkpoint.manifest import verify_checkpoint
from moba_train.checkpoint.publisher import Place
from moba_train.checkpoint.retention import Marks, Retention
from moba_train.checkpoint.writer import ShardWriter
from moba_train.errors import CheckpointError, LaunchError
from tests.checkpoint.checkpoint_ranks import process_group, run_ranks
from tests.checkpoint.test_publish import steps


def fallback_in(folder: Path) -> Place:
    return Place(folder, Retention(1), "checkpoint.fallback_dir")


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, {"weight": torch.full((10,), float(step))}, {"step": step})
    checkpointer.wait()


def test_a_folder_that_vanishes_is_made_again_but_not_the_run_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with process_group(tmp_path / "store"):
        checkpointer = Checkpointer(folder, Retention(2))
        save(checkpointer, 1)
        shutil.rmtree(folder)
        with caplog.at_level(logging.WARNING):
            save(checkpointer, 2)
        assert checkpointer.last_error is None
        assert "was missing and has been made again" in caplog.text
        assert steps(folder) == [2]
        shutil.rmtree(tmp_path / "run")
        save(checkpointer, 3)
        assert "No such file" in (checkpointer.last_error or "")
        assert not (tmp_path / "run").exists()


def test_the_fallback_takes_saves_while_the_first_folder_does_not(tmp_path: Path) -> None:
    first = tmp_path / "run" / "checkpoints"
    second = tmp_path / "local" / "checkpoints"
    with process_group(tmp_path / "store"):
        checkpointer = Checkpointer(first, Retention(2), fallback=fallback_in(second), max_failures=1)
        save(checkpointer, 1)
        first.rename(tmp_path / "away")
        first.write_text("in its place")
        for step in (2, 3):
            save(checkpointer, step)
            saved = checkpointer.last_saved
            assert saved is not None
            assert (saved.step, saved.folder) == (step, second)
            assert "File exists" in (saved.problem or "") or "Not a directory" in (saved.problem or "")
        assert steps(second) == [3], "it has its own retention"
        verify_checkpoint(second / "step_00000003")
        first.unlink()
        (tmp_path / "away").rename(first)
        assert newest_intact(first, None, second) == second / "step_00000003"
        save(checkpointer, 4)
        assert checkpointer.last_saved is not None
        assert checkpointer.last_saved.problem is None
        assert newest_intact(first, None, second) == first / "step_00000004"
        assert steps(first) == [1, 4]
        weight = torch.zeros(10)
        load_checkpoint(second / "step_00000003", {"weight": weight}, verify=True)
        assert weight.tolist() == [3.0] * 10
        assert checkpointer.fatal is None


def test_a_first_folder_that_cannot_be_used_at_the_start_is_no_end_where_there_is_a_fallback(tmp_path: Path) -> None:
    first = tmp_path / "run"
    first.touch()
    with process_group(tmp_path / "store"):
        with pytest.raises(CheckpointError, match=r"run cannot be used for checkpoints: .* change run_dir"):
            Checkpointer(first, Retention(1))
        with pytest.raises(CheckpointError, match=r"run cannot be used .* change checkpoint\.fallback_dir"):
            Checkpointer(tmp_path / "first", Retention(1), fallback=fallback_in(first))
        checkpointer = Checkpointer(first, Retention(2), fallback=fallback_in(tmp_path / "local"))
        save(checkpointer, 1)
        first.unlink()
        save(checkpointer, 2)
    assert [steps(tmp_path / "local"), steps(first)] == [[1], [2]]


def test_a_run_that_takes_the_folder_over_right_after_a_save_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = ["this run"]
    publish = module.publish.publish

    def check_lock() -> None:
        if owner[0] != "this run":
            raise LaunchError(f"belongs to {owner[0]}")

    def taken_over_afterwards(*arguments: Any) -> Path:
        path = publish(*arguments)
        owner[0] = "another run"
        return path

    with process_group(tmp_path / "store"):
        checkpointer = Checkpointer(tmp_path / "run", Retention(1), check_lock=check_lock)
        save(checkpointer, 1)
        monkeypatch.setattr(module.publish, "publish", taken_over_afterwards)
        save(checkpointer, 2)
        with pytest.raises(LaunchError, match="belongs to another run"):
            checkpointer.raise_fatal()
    assert steps(tmp_path / "run") == [1, 2]


def test_what_is_marked_in_the_run_folder_takes_no_place_in_the_fallback(tmp_path: Path) -> None:
    def no_answer() -> None:
        raise OSError("the disk does not answer")

    run, local = tmp_path / "run", tmp_path / "local"
    with process_group(tmp_path / "store"):
        place = Place(local, Retention(2), "checkpoint.fallback_dir")
        checkpointer = Checkpointer(run, Retention(2), fallback=place, check_lock=no_answer)
        for step in (1, 2, 3):
            if step == 3:
                marks = Marks([])
                marks.add(2, "", "step 3: loss nan")
                marks.write(run)
            checkpointer.save(step, {"weight": torch.zeros(10)}, {"progress": {"step": step}})
            checkpointer.wait()
    assert steps(local) == [1, 3]


def test_saves_that_fail_everywhere_are_counted_in_a_row_and_end_the_run_if_asked(tmp_path: Path) -> None:
    first = tmp_path / "run" / "checkpoints"
    second = tmp_path / "local"
    with process_group(tmp_path / "store"):
        checkpointer = Checkpointer(first, Retention(1), fallback=fallback_in(second), max_failures=2)

        def save_in_vain(step: int) -> None:
            for folder in (first, second):
                shutil.rmtree(folder)
                folder.touch()
            save(checkpointer, step)
            for folder in (first, second):
                folder.unlink()

        save_in_vain(1)
        for folder in (first, second):
            assert str(folder) in (checkpointer.last_error or "")
        assert checkpointer.failed_saves == 1
        save(checkpointer, 2)
        assert checkpointer.failed_saves == 0
        second.mkdir(exist_ok=True)
        save_in_vain(3)
        checkpointer.raise_fatal()
        first.mkdir()
        second.mkdir()
        save_in_vain(4)
        with pytest.raises(CheckpointError, match=r"2 saves in a row have failed.*checkpoint\.max_failures"):
            save(checkpointer, 5)


def save_on_two_nodes(folder: Path) -> None:
    """Rank 1 pretends to be on a node without rank 0's local disk; then the run folder is another run's."""
    check_visible = module._check_visible

    def only_rank_0_sees_the_local_disk(path: Path, place: Place) -> None:
        check_visible(folder / "nowhere" if place.key != "run_dir" and dist.get_rank() == 1 else path, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_check_visible", only_rank_0_sees_the_local_disk)
        with pytest.raises(
            CheckpointError, match=r"rank 1.*checkpoint\.fallback_dir must be on a file system that all"
        ):
            Checkpointer(folder / "first", Retention(1), fallback=fallback_in(folder / "local"))

    owner = ["this run"]

    def check_lock() -> None:
        assert dist.get_rank() == 0
        if owner[0] == "unknown":
            raise OSError("the disk does not answer")
        if owner[0] != "this run":
            raise LaunchError(f"belongs to {owner[0]}")

    checkpointer = Checkpointer(
        folder / "first", Retention(1), fallback=fallback_in(folder / "local"), check_lock=check_lock
    )
    save(checkpointer, 1)
    owner[0] = "unknown"
    save(checkpointer, 2)
    assert checkpointer.last_saved is not None
    assert checkpointer.last_saved.folder == folder / "local"

    owner[0] = "this run"
    write = ShardWriter.write

    def taken_over_meanwhile(*arguments: Any) -> Any:
        owner[0] = "another run"
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "write", taken_over_meanwhile)
        save(checkpointer, 3)
    assert isinstance(checkpointer.fatal, LaunchError)
    with pytest.raises(LaunchError, match="belongs to another run"):
        save(checkpointer, 4)
    dist.barrier()
    assert sorted(path.name for path in (folder / "first").iterdir()) == ["latest", "step_00000001"]
    assert sorted(path.name for path in (folder / "local").iterdir()) == ["latest", "step_00000002"]


def test_all_ranks_stop_when_the_folder_is_another_run_s_and_none_saves_where_only_one_sees_it(tmp_path: Path) -> None:
    run_ranks(2, save_on_two_nodes, tmp_path / "store", tmp_path)
