"""The comparisons of optimizers: what they check, and what they conclude from curves."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import optimizers, optimizers_curve, pictures


def found(arm: str, rate: float, losses: list[float], seed: int = 0) -> dict[str, Any]:
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "losses": losses,
        "step_s": 0.5,
        "validation_loss": losses[-1] + 0.1 * seed,
    }


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "layers": 1, "heads": 2, "kv_heads": 1}
    monkeypatch.setattr(optimizers, "model_shape", lambda _: shape)


def test_the_step_of_every_arm_that_can_run_is_timed() -> None:
    results = optimizers.time_steps(argparse.Namespace(model="tiny", arms=["adamw", "apex", "muon"], steps=3))
    assert results["adamw"]["distance_from_torch"] == 0
    assert results["adamw"]["step_ms"]["count"] == results["muon"]["step_ms"]["count"] == 3
    assert results["muon"]["host_state_gib"] < results["adamw"]["host_state_gib"]
    assert "a GPU needed" in results["apex"]["error"]
    assert [line.split(" | ")[0] for line in optimizers.table(results).splitlines()[2:]] == [
        "| adamw",
        "| apex",
        "| muon",
    ]


def test_an_implementation_that_computes_something_else_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(optimizers.ARMS, "wrong", {"weight_decay": "0.2"})
    with pytest.raises(SystemExit, match="wrong: its update differs from torch's AdamW"):
        optimizers.time_steps(argparse.Namespace(model="tiny", arms=["adamw", "wrong"], steps=1))
    assert not dist.is_initialized()


def test_curves_are_compared_at_adamws_best_rate(tmp_path: Path) -> None:
    falling = [10.0 - 0.125 * step for step in range(50)]  # exact in float64
    runs = [
        found("adamw", 1e-3, falling),
        found("adamw", 2e-3, [loss + 1 for loss in falling]),
        found("muon", 1e-3, [loss - 1 for loss in falling]),
        found("muon", 1e-3, [loss - 1 for loss in falling], seed=1),
    ]
    by_arm = {(row["arm"], row["rate"]): row for row in optimizers_curve.summary(runs)}
    assert by_arm["adamw", 1e-3]["reaches_adamw_at_step"] == 50
    assert by_arm["adamw", 2e-3]["reaches_adamw_at_step"] is None
    assert by_arm["muon", 1e-3]["reaches_adamw_at_step"] == 42, "it is one nat, eight steps, ahead"
    assert by_arm["muon", 1e-3]["validation_loss"] == pytest.approx([2.875, 2.975])
    assert "**3.8750**" in optimizers_curve.table(runs)
    source = tmp_path / "results.json"
    source.write_text(json.dumps({"results": {"runs": runs}}))
    pictures.draw("optimizers-curve", [source], tmp_path / "plot.svg")
    assert "muon, lr 0.001" in (tmp_path / "plot.svg").read_text()
