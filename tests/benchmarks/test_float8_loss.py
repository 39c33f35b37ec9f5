"""The loss curves in FP8: the text, one short emulated run on the CPU, the summary and the plot."""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import float8_loss, pictures
from benchmarks.python_sources import write_text
from benchmarks.trainer_run import side_by_side
from moba_train.data.indexed import IndexedDataset
from moba_train.train import main

pytest.importorskip("torchao")


def train_here(content: dict[str, Any], file: Path, ranks: int, check: bool) -> None:
    """Without the seconds that torchrun takes."""
    file.write_text(yaml.safe_dump(content))
    assert main([str(file)]) == 0


def test_an_arm_trains_on_real_text_and_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = {"linear": "fp8", "fp8": {"emulate": True}}
    monkeypatch.setattr(float8_loss, "ARMS", {"bf16": {}, "fp8 tensorwise": emulated})
    small = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1}
    monkeypatch.setattr(float8_loss, "MODEL", small)
    settings = argparse.Namespace(
        steps=20, base_steps=6, batch_tokens=512, seq_len=256, micro_batch=2, compile=False, corpus=None
    )
    write_text(tmp_path, 20 * 512)
    assert IndexedDataset(tmp_path / "train").tokens >= 20 * 512
    monkeypatch.setattr(float8_loss, "launch", train_here)
    base = float8_loss.run(tmp_path, float8_loss.BASE, 0, settings)
    assert len(base["losses"]) == 6
    runs = [float8_loss.run(tmp_path, arm, 0, settings) for arm in float8_loss.ARMS]
    assert [len(run["losses"]) for run in runs] == [20, 20]
    assert all(run["losses"][0] < base["losses"][0] for run in runs)
    assert runs[0]["losses"] != runs[1]["losses"]
    found = float8_loss.summary(runs)
    assert found["bf16"]["loss_over_bf16"] == [0.0]
    assert abs(found["fp8 tensorwise"]["loss_over_bf16"][0]) < 0.01
    assert "+0.00%" in float8_loss.table(runs)
    source = tmp_path / "results.json"
    source.write_text(json.dumps({"settings": {}, "results": {"runs": runs}}))
    pictures.draw("float8-loss", [source], tmp_path / "plot.svg")
    assert "above bf16" in (tmp_path / "plot.svg").read_text()


def test_runs_side_by_side_end_with_the_first_that_fails() -> None:
    begun = []

    def job(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise RuntimeError("out of memory")
        return number

    jobs = [functools.partial(job, number) for number in range(4)]
    assert sorted(side_by_side([jobs[0], jobs[2]], 2)) == [0, 2]
    begun.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        list(side_by_side(jobs, 1))
    assert begun[:2] == [0, 1]
