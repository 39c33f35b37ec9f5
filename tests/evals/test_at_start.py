"""`evaluation.at_start`: a baseline before the first step of every stage, once, that changes nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.run.evaluations import StageEvaluations
from moba_train.run.stop import RunStop
from moba_train.telemetry.jsonl import read_records
from moba_train.train import main
from tests.run.tiny_run import assert_same_tensors

RECIPE = """
name: test
run_dir: {folder}/run
model: {{vocab_size: 64, hidden_size: 32, intermediate_size: 48, layers: 2, heads: 2, kv_heads: 1}}
attention: {{full_layers: "last:1", moba: {{block_size: 8, topk: 2}}}}
data: {{train: [{{path: {folder}/corpus}}], validation: [{{path: {folder}/corpus}}]}}
batch_tokens: 64
stages:
  - {{name: short, seq_len: 16, tokens: 192, attention: {{default: full}}}}
  - {{name: long, seq_len: 32, tokens: 192}}
evaluation: {{at_start: true, every: 100, sequences: 3}}
telemetry: {{console: false, report: false, wandb: {{mode: disabled}}}}
"""


def begun(folder: Path) -> list[str]:
    """Arguments that train a recipe in `folder`."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(rng.integers(64, size=70))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return [str(folder / "recipe.yaml")]


def history(folder: Path) -> list[tuple[Any, ...]]:
    records = read_records(folder / "run" / "metrics.jsonl")
    wanted = {"metrics": "loss", "validation_loss": "eval_loss"}
    return [(r["step"], r["stage"], r["type"], r[wanted[r["type"]]]) for r in records if r["type"] in wanted]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(begun(folder)) == 0
    return folder


def test_every_stage_begins_with_its_own_evaluation(undisturbed: Path) -> None:
    records = [record for record in history(undisturbed) if record[2] == "validation_loss"]
    assert [record[:2] for record in records] == [(0, "short"), (3, "short"), (3, "long"), (6, "long")]
    assert records[0][3] == pytest.approx(np.log(64), abs=0.2)  # untrained
    assert history(undisturbed)[0][2] == "validation_loss"


def test_it_changes_no_step(undisturbed: Path, tmp_path: Path) -> None:
    assert main([*begun(tmp_path), "evaluation.at_start=false"]) == 0
    without = history(tmp_path)
    assert [record[:2] for record in without if record[2] == "validation_loss"] == [(3, "short"), (6, "long")]
    assert [record for record in history(undisturbed) if record in without] == without


def test_a_stage_without_evaluations_trains_the_same(undisturbed: Path, tmp_path: Path) -> None:
    assert main([*begun(tmp_path), "stages.0.evaluate=false"]) == 0
    others = [record for record in history(undisturbed) if record[1:3] != ("short", "validation_loss")]
    assert history(tmp_path) == others


def test_a_run_that_is_stopped_there_repeats_nothing(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, and killed at the boundary, between evaluation and checkpoint."""
    arguments = begun(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(RunStop, "is_due", lambda *_: True)
        assert main(arguments) == 0
    with monkeypatch.context() as patch:
        run_at_start = StageEvaluations.run_at_start

        def dies(self: StageEvaluations, tokens: int, metrics: Path) -> None:
            run_at_start(self, tokens, metrics)
            assert not tokens, "killed"

        patch.setattr(StageEvaluations, "run_at_start", dies)
        with pytest.raises(AssertionError, match="killed"):
            main([*arguments, "checkpoint.every=3"])
    assert main([*arguments, "checkpoint.every=3"]) == 0
    assert history(tmp_path) == history(undisturbed)
    stopped, whole = (latest_checkpoint(folder / "run" / "checkpoints") for folder in (tmp_path, undisturbed))
    assert stopped is not None
    assert whole is not None
    assert_same_tensors(stopped, whole)
