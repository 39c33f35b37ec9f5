"""Commands on a run of several stages, with an exit criterion."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moba_train.tools.cli import app
from tests import guide
from tests.commands import run_app
from tests.run.test_stages import met_at_8, undisturbed
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks, run_command

__all__ = ["met_at_8", "undisturbed"]


def test_eval_gives_the_same_loss_by_position(undisturbed: Run, tmp_path: Path) -> None:
    """The last stage has full attention only: MoBA is the recipe's."""
    arguments = ["eval", str(undisturbed.run_dir), "--output", str(tmp_path)]
    done = run_app(app, *arguments)
    written = json.loads((tmp_path / "evaluation.json").read_text())
    (wanted,) = (record for record in undisturbed.records("position_wise") if record["step"] == 12)
    assert written["position_wise"]["curves"]["full"]["mean"] == pytest.approx(
        wanted["position_wise"]["curves"]["full"]["mean"], rel=1e-2 if torch.cuda.is_available() else 1e-6
    )
    assert set(written["validation_loss"]) == {"moba", "full", "by_sequence"}
    assert '"key":"position-wise"' in (tmp_path / "evaluation.html").read_text()
    assert "96 to 128" in done.output
    smaller = ["evaluation.position_wise.bucket=64", "evaluation.position_wise.sequences=2"]
    only = CliRunner().invoke(app, [*arguments[:2], "--attention", "own", *smaller])
    assert "64 to 128" in only.output
    assert "full" not in only.output
    refused = run_app(app, *arguments[:2], "evaluation.position_wise.bucket=48", code=2)
    assert "evaluation.position_wise.bucket: given 48, which does not divide" in refused.output


DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "stages.md"


def test_the_guide_works(undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, other_stages = guide.blocks(DOCUMENT, "yaml")
    monkeypatch.chdir(DOCUMENT.parents[2])
    (tmp_path / "recipe.yaml").write_text(recipe.replace("configs/", f"{Path.cwd()}/configs/"))
    (tmp_path / "other.yaml").write_text(f"extends: recipe.yaml\n{other_stages}")
    guide.run(["moba-train", "plan", f"{tmp_path}/other.yaml", *["--gpus", "64", "--gpu", "h200", "--no-data"]])
    lines = [words for block in guide.blocks(DOCUMENT, "bash") for words in guide.commands(block)]
    assert len(lines) == 2
    for words in lines:
        folders = {"runs/my-run": str(undisturbed.run_dir), "recipe.yaml": f"{tmp_path}/recipe.yaml", "2K": "32"}
        here = [folders.get(word, word) for word in words]
        guide.run(here)


def test_boundaries_show_in_the_report(undisturbed: Run) -> None:
    page = (undisturbed.run_dir / "report.html").read_text()
    assert all(f'"label":"{stage}"' in page for stage in ("activate", "full"))


def test_ranks_that_share_sequences_evaluate_as_the_run_did(undisturbed: Run, tmp_path: Path, ranks: Ranks) -> None:
    ranks.work(run_command, ["eval", str(undisturbed.run_dir), "--cp", "2", "--output", str(tmp_path)], 2)
    evaluated = json.loads((tmp_path / "evaluation.json").read_text())["position_wise"]["curves"]["full"]
    last = undisturbed.records("position_wise")[-1]["position_wise"]["curves"]["full"]
    assert evaluated["mean"] == pytest.approx(last["mean"], rel=1e-4)
