"""Checkpoints from layout to layout: the recipes, and what is read from a run's records."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint_layouts
from benchmarks.training_rows import Row, parse_row
from moba_train.config.load import load_config
from tests.resolved import stages_of

OPTIONS = argparse.Namespace(model="tiny", layers=None, gpus=2, sequences=8, every=3, row_seconds=60.0)


def metrics(step: int, loss: float, seconds: float) -> dict[str, Any]:
    return {"step": step, "type": "metrics", "loss": loss, "step_s": seconds}


def saves(step: int) -> list[dict[str, Any]]:
    """A save that begins after `step` and ends in the step after it."""
    begun = {"step": step, "type": "checkpoint", "checkpoint_stall_s": 0.01}
    return [
        begun,
        metrics(step + 1, 7.0 - step / 10, 2.5),
        {"step": step + 1, "type": "checkpoint", "checkpoint_save_s": 4},
    ]


def resumed(step: int) -> list[dict[str, Any]]:
    return [{"step": step, "type": "resume", "checkpoint_load_s": 5.0}, metrics(step + 1, 6.7, 9.0)]


def test_each_layout_resumes_from_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The records of steps after the checkpoint are there until the run that resumes cuts them off, and the checkpoint
    until the run has loaded it."""
    first = [metrics(1, 7.2, 9.0), metrics(2, 7.1, 2.0), metrics(3, 7.0, 2.2), *saves(3)]
    second = [*first[:4], *resumed(3), metrics(5, 6.6, 1.0), metrics(6, 6.5, 1.2), *saves(6)]
    last = [*second[:9], *resumed(6)]
    launched: list[list[str]] = []
    file = tmp_path / "run" / "metrics.jsonl"

    def run_until(enough: Callable[[], bool], command: list[str], limit_s: float) -> None:
        records = (first, second, last)[len(launched)]
        assert not enough(), "what the run before has left is taken for this one's"
        if launched:
            assert len(json.loads((tmp_path / "result.json").read_text())["results"]) == len(launched), "not lost"
        launched.append(command)
        file.parent.mkdir(exist_ok=True)
        step = 3 * (len(launched) - 1)
        before = tmp_path / "run" / "checkpoints" / f"step_{step:08d}"
        before.mkdir(parents=True)
        for many in range(1, len(records)):
            file.write_text("\n".join(map(json.dumps, records[:many])))
            assert not enough()
            loaded = any(record["type"] == "resume" and record["step"] == step for record in records[:many])
            assert before.exists() != loaded
        file.write_text("\n".join(map(json.dumps, records)))
        assert enough()

    monkeypatch.setattr(checkpoint_layouts, "run_until", run_until)
    monkeypatch.setattr(checkpoint_layouts, "write_corpus", lambda *sizes: None)
    rows = [parse_row(text, Row()) for text in ("256:full:none", "256:full:none:tp2")]
    options = argparse.Namespace(**vars(OPTIONS), output=tmp_path / "result.json")
    one, two, three = checkpoint_layouts.run(rows, tmp_path, options)
    assert len(launched) == 3
    assert one == {
        "row": "256:full:none",
        "step_s": 2.1,
        "stall_s": 0.01,
        "step_after_save_s": 2.5,
        "save_s": 4,
        "loss_after_save": 6.7,
    }
    assert (two["from"], two["load_s"], two["loss_before"], two["loss_resumed"]) == ("256:full:none", 5.0, 6.7, 6.7)
    assert (two["step_s"], two["step_after_save_s"]) == (pytest.approx(1.1), 2.5)
    assert three == {
        "row": "256:full:none",
        "from": "256:full:none:tp2",
        "load_s": 5.0,
        "loss_before": pytest.approx(6.4),
        "loss_resumed": 6.7,
    }
    assert checkpoint_layouts.table([one, two, three]).count("\n") == 4


def test_all_layouts_train_the_same_steps(tmp_path: Path) -> None:
    found = []
    for text in ("256:full:none:micro2", "256:full:none:tp2"):
        content = checkpoint_layouts.recipe(parse_row(text, Row()), tmp_path / "corpus", tmp_path / "run", 12, OPTIONS)
        (tmp_path / "recipe.yaml").write_text(json.dumps(content))
        found.append(load_config(tmp_path / "recipe.yaml"))
    assert [config.batch_tokens for config in found] == [8 * 256] * 2
    assert [stages_of(config)[0].steps for config in found] == [12, 12]
    assert [config.micro_batch_size for config in found] == [2, 1]
    assert {config.checkpoint.every for config in found} == {3}
