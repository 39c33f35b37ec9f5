"""The recipes that benchmarks give to the trainer are ones it takes, and say what the options ask for."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks import checkpoint_stall, determinism
from moba_train.config.load import load_config
from moba_train.config.schema import RunConfig
from tests.resolved import stages_of

OPTIONS = argparse.Namespace(
    model="tiny",
    gpus=2,
    seq_len=2048,
    sequences_per_gpu=3,
    sequences_per_rank=3,
    steps=7,
    every=7,
    saves=1,
    layers=None,
    beside=3,
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunConfig]:
    """What would have been trained."""
    found = []

    def launch_until(enough: Callable[[], bool], *arguments: Any) -> None:
        assert not enough()
        launch(*arguments)
        (tmp_path / "run").mkdir()
        save, lines = {"type": "checkpoint", "checkpoint_stall_s": 0.1}, []
        for record in ({"step": 7} | save, {"step": 8, "type": "metrics"}, {"step": 9, "checkpoint_save_s": 1} | save):
            assert not enough()
            lines.append(json.dumps(record))
            (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
        assert enough()

    def launch(content: dict[str, Any], file: Path, ranks: int, **how: Any) -> SimpleNamespace:
        file.write_text(yaml.safe_dump(content))
        found.append(load_config(file))
        return SimpleNamespace(returncode=1, stderr="an Error")

    monkeypatch.setattr(determinism, "launch", launch)
    monkeypatch.setattr(checkpoint_stall, "launch_until", launch_until)
    monkeypatch.setattr(checkpoint_stall, "write_corpus", lambda *sizes: None)
    return found


def test_programs_train_as_many_steps_as_asked(launched: list[RunConfig], tmp_path: Path) -> None:
    checkpoint_stall.train(tmp_path, OPTIONS)
    determinism.train(tmp_path / "one", True, OPTIONS)
    assert [stages_of(config)[0].steps for config in launched] == [14, 7]
    assert {config.batch_tokens for config in launched} == {2 * 3 * 2048}
    stall, deterministic = launched
    assert stall.checkpoint.every == 7
    assert deterministic.deterministic


def test_a_delay_is_the_stall_and_what_the_next_step_takes_longer() -> None:
    """One save is done, the second was killed on its way, a third is none that was asked for."""
    seconds = [5.0] * 5 + [1.0, 1.0, 1.5, 1.2, 1.0, 1.0, 2.0, 1.0]  # 5 steps to warm up; saves after 7, 11 and 13
    records: list[dict[str, Any]] = [
        {"step": step, "type": "metrics", "step_s": taken} for step, taken in enumerate(seconds, 1)
    ]
    records += [{"step": step, "type": "checkpoint", "checkpoint_stall_s": 0.1 * step} for step in (7, 11, 13)]
    records += [{"step": 9, "type": "checkpoint", "checkpoint_save_s": 30.0, "checkpoint_check_s": 3.0}]
    found = checkpoint_stall.summarise(records, saves=2)
    assert found["step_s"]["median"] == 1.0
    assert found["step_beside_save_s"] == {"median": 1.35, "min": 1.0, "max": 2.0, "count": 4}
    assert found["stall_s"]["max"] == pytest.approx(1.1)
    assert found["first_delay_s"] == pytest.approx(0.7 + 0.5)
    assert found["step_after_save_s"]["max"] == 2.0
    assert found["save_s"]["median"] == 30.0
    assert found["finite_check_share_of_save"] == pytest.approx(0.1)
