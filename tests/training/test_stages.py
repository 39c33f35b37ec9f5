"""Stages as a user sees them: a gate keeps a stage from its end, boundaries show, and a stopped run does the same."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Run

from moba_train.config.run import GateConfig
from moba_train.evals.stage import judge
from moba_train.train import main

STEP = 512  # tokens


def gated(folder: Path, corpora: Path) -> Run:
    """Full attention, MoBA for 3 to 9 steps, and full attention again; asked after steps 6, 8 and 10."""
    run = Run(folder, corpora)
    run.recipe |= {
        "evaluation": {"every": 100, "sequences": 2, "position_wise": {"bucket": 32, "sequences": 3, "every": 2}},
        "checkpoint": {"every": 100},
        "stages": [
            {"name": "short", "seq_len": 64, "tokens": 3 * STEP, "attention": {"default": "full"}},
            {
                "name": "activate",
                "seq_len": 128,
                "tokens": 3 * STEP,
                "rope": {"kind": "yarn", "factor": 2, "original_seq_len": 64},
                "until": {"trailing_loss_recovered": {"tolerance": 0.01}, "max_tokens": 9 * STEP},
            },
            {"name": "full", "seq_len": 128, "tokens": 4 * STEP, "attention": {"default": "full"}},
        ],
    }
    return run


def train(run: Run, *arguments: str) -> None:
    assert main([str(run.write_recipe()), *arguments]) == 0


def history(run: Run) -> list[dict[str, Any]]:
    """All that is logged, but for times, and what a resumed run says more than once."""
    kinds = ("metrics", "evaluation", "position_wise", "gate", "boundary")
    timed = {"time", "step_s", "data_s", "tokens_per_s", "tokens_per_s_per_device"}
    return [
        {key: value for key, value in record.items() if key not in timed}
        for kind in kinds
        for record in run.records(kind)
    ]


@pytest.fixture(scope="module")
def opens_at_8() -> Iterator[None]:
    """The gate's verdict, but opening at the second time it is asked whatever this tiny model's losses are."""

    def verdict(gate: GateConfig, curves: Any, kind: str, before: float | None) -> tuple[bool, str]:
        asked.append(kind)
        return len(asked) == 2, judge(gate, curves, kind, before)[1]

    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moba_train.evals.stage.judge", verdict)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpora: Path, opens_at_8: None) -> Run:
    run = gated(tmp_path_factory.mktemp("gated"), corpora)
    train(run)
    return run


def test_a_gate_prolongs_its_stage_and_the_next_one_follows(undisturbed: Run) -> None:
    stages = [record["stage"] for record in undisturbed.records()]
    assert stages == ["short"] * 3 + ["activate"] * 5 + ["full"] * 4
    assert [record["step"] for record in undisturbed.records("gate")] == [6, 8]
    assert [record["last_step"] for record in undisturbed.records("stage")] == [16, 16, 12]
    assert [record["tokens"] for record in undisturbed.records()] == [STEP * step for step in range(1, 13)]


def test_the_schedule_stands_still_while_a_gate_is_shut(undisturbed: Run, tmp_path: Path, corpora: Path) -> None:
    """Rates are those of the same run without a gate, with the rate at the end of the stage's tokens repeated."""
    rates = [record["lr"] for record in undisturbed.records()]
    plain = gated(tmp_path, corpora)
    plain.recipe["stages"][1].pop("until")
    shutil.rmtree(plain.run_dir, ignore_errors=True)
    train(plain)
    wanted = [record["lr"] for record in plain.records()]
    assert rates == [*wanted[:6], wanted[5], wanted[5], *wanted[6:]]
    assert rates[-1] < rates[5]
