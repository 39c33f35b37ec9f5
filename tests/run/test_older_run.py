"""A run that an older version of the package began goes on with this one, with the losses of the older one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from moba_train.checkpoint.manifest import read_meta, verify_checkpoint
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.resolve.saved_recipe import open_checkpoint
from moba_train.telemetry.jsonl import read_records
from moba_train.train import main

FIXTURE = Path(__file__).parents[1] / "fixtures" / "run_before_kinds"


@pytest.fixture
def older_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, stopped in its second stage, which its recipe and checkpoint name by relative paths."""
    folder = tmp_path / "run_before_kinds"
    shutil.copytree(FIXTURE, folder)
    monkeypatch.chdir(folder)
    return folder / "run"


def records(path: Path, record_type: str) -> list[dict[str, Any]]:
    return [record for record in read_records(path) if record["type"] == record_type]


def test_an_older_run_goes_on_as_the_older_version_did(older_run: Path) -> None:
    """Same learning rates, losses, evaluations and stage ends: counters, data order, optimizer state and the stage's
    exit criterion are all restored. Up to the rounding of another CPU."""
    assert main(["recipe.yaml"]) == 0
    for then, now in (("metrics", "metrics"), ("evaluation", "validation_loss"), ("position_wise", "position_wise")):
        ours = [record for record in records(older_run / "metrics.jsonl", now) if record["step"] > 5]
        theirs = records(FIXTURE / "continued.jsonl", then)
        assert [record["step"] for record in ours] == [record["step"] for record in theirs] != []
        for got, want in zip(ours, theirs, strict=True):
            for key, value in (want | {"type": now}).items():
                assert got[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key
    newest = latest_checkpoint(older_run / "checkpoints")
    assert newest is not None
    assert read_meta(newest)["progress"]["step"] == 8


def test_an_older_run_needs_its_corpora_where_they_were(older_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The older version saved the lengths of their documents, by path, and no tokens."""
    for suffix in ("bin", "idx"):
        shutil.copy(f"corpora/one.{suffix}", f"corpora/moved.{suffix}")
        shutil.copy(f"corpora/two.{suffix}", f"corpora/one.{suffix}")
    assert main(["recipe.yaml"]) == 2
    assert "data.train[0].path: corpus corpora/one has changed" in capsys.readouterr().err
    assert main(["recipe.yaml", "data.train.0.path=corpora/moved"]) == 2
    assert ": data.train[0].path (or stages[0].train[0].path) was 'corpora/one'" in capsys.readouterr().err


def test_the_checkpoint_of_an_older_run_opens_with_its_own_recipe(older_run: Path) -> None:
    saved = open_checkpoint(older_run)
    verify_checkpoint(saved.path)
    assert (saved.stage.name, saved.config.model.layers) == ("second", 2)
