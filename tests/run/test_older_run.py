"""A run that commit bc717461 began, whose checkpoints had a pickled index, is refused until they are converted."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.telemetry.jsonl import read_records
from moba_train.train import main

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_before_safetensors"
CHECKPOINT = Path("run/checkpoints/step_00000006")


@pytest.fixture
def older_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, stopped in its second stage, which its recipe and checkpoint name by relative paths."""
    folder = tmp_path / "older"
    shutil.copytree(FIXTURE, folder)
    monkeypatch.chdir(folder)
    return folder / "run"


def train_in(folder: str) -> int:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return main(["recipe.yaml"])
    finally:
        os.chdir(before)


def records(path: Path, record_type: str) -> list[dict[str, Any]]:
    return [record for record in read_records(path) if record["type"] == record_type]


def test_a_run_with_older_checkpoints_is_refused_with_the_command_to_convert_them(
    older_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are not taken for damaged: nothing is set aside, and an older checkpoint is not used instead."""
    before = sorted(older_run.rglob("*"))
    command = "moba-train convert checkpoints run"
    assert main(["recipe.yaml", "stages.1.parallel.cp=1"]) == 2
    assert command in capsys.readouterr().err
    assert {file for file in older_run.rglob("*") if "checkpoints" in file.parts} == {
        file for file in before if "checkpoints" in file.parts
    }
    with pytest.raises(UnreadableError, match=command):
        latest_checkpoint(Path("run/checkpoints"))
