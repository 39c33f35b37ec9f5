"""What a run resumes from: the newest checkpoint whose every byte is right, or nothing in silence."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moba_train.checkpoint.load import newest_intact
from moba_train.checkpoint.manifest import verify_checkpoint
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.checkpoint.retention import Retention
from moba_train.errors import CheckpointError
from tests.checkpoint.checkpoint_ranks import process_group
from tests.checkpoint.test_publish import cut_in_half, failing_reads, flip_byte, publish_step, steps


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    with process_group(tmp_path / "store"):
        yield


def test_damage_is_named_set_aside_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (100, 200, 300, 400):
        publish_step(folder, step)
    flip_byte(folder / "step_00000300" / "rank_0_0.safetensors")
    cut_in_half(folder / "step_00000400" / "manifest.json")
    with caplog.at_level(logging.WARNING):
        assert newest_intact(folder) == folder / "step_00000200"
    assert "rank_0_0.safetensors: its SHA-256" in caplog.text
    assert "manifest.json: is not valid JSON" in caplog.text
    assert steps(folder) == [100, 200]
    assert (folder / "set-aside-step_00000300").is_dir()
    flip_byte(folder / "step_00000200" / "rank_0_0.safetensors")
    assert newest_intact(folder, accept=lambda meta: meta["step"] < 200) == folder / "step_00000100"
    assert steps(folder) == [100, 200], "one that is not wanted is not read"


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_afresh(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert newest_intact(folder) is None
    for step in (100, 200):
        flip_byte(publish_step(folder, step) / "rank_0_0.safetensors")
    for _ in range(2):  # nor the second time
        with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as error:
            newest_intact(folder)
        assert "step_00000100" in str(error.value)


@pytest.mark.parametrize("file", ["manifest.json", "meta.json", "rank_0_0.safetensors"])
def test_what_cannot_be_read_is_neither_set_aside_nor_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (100, 200, 300):
        publish_step(folder, step)
    (folder / "step_00000300" / ".nfs0001").touch()
    with monkeypatch.context() as patch:
        failing_reads(patch, f"step_00000300/{file}")
        with pytest.raises(CheckpointError, match=rf"{file}.*Input/output error.*not known to be damaged"):
            newest_intact(folder)
        assert steps(folder) == [100, 200, 300]
    with monkeypatch.context() as patch:
        failing_reads(patch, f"step_00000300/{file}", times=1)
        assert newest_intact(folder) == folder / "step_00000300"


def test_a_meta_is_read_only_after_its_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One byte turns the key `step` into another; nothing asks the meta for its step before the damage is found."""
    folder = tmp_path / "checkpoints"
    for step in (100, 200):
        publish_step(folder, step)
    meta = folder / "step_00000200" / "meta.json"
    meta.write_text(meta.read_text().replace('"step"', '"stop"'))
    with caplog.at_level(logging.WARNING):
        assert newest_intact(folder, accept=lambda meta: meta["step"] > 0) == folder / "step_00000100"
    assert "meta.json: its SHA-256" in caplog.text


def test_a_copy_under_a_later_name_is_named_and_never_preferred(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the run begins at step 16 for ever, and every new checkpoint is removed as an older one."""
    folder = tmp_path / "checkpoints"
    for step in (16, 24):
        publish_step(folder, step)
    copy = shutil.copytree(folder / "step_00000016", folder / "step_00000099")
    with pytest.raises(CheckpointError, match=r"its name says step 99, its manifest\.json says step 16; rename it"):
        verify_checkpoint(copy)
    assert latest_checkpoint(folder) == folder / "step_00000024"
    publish_step(folder, 32)
    Retention(keep_last=2).apply(folder)
    assert steps(folder) == [24, 32, 99], "the copy takes the place of none, and is not removed"
    caplog.clear()
    assert newest_intact(folder) == folder / "step_00000032"
    assert "its manifest.json says step 16" in caplog.text
    assert steps(folder) == [24, 32], "set aside"
