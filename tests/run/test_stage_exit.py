"""The exit criterion of a stage: when it is judged, and what meets it."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from moba_train.config.data import DataConfig, SourceConfig
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig, StageConfig, UntilConfig
from moba_train.config.stages import Stage
from moba_train.errors import CheckpointError
from moba_train.run import evaluations as evaluations_module
from moba_train.run.evaluations import RunEvaluations, StageExit, judge
from moba_train.run.progress import Progress
from tests.resolved import stages_of

NUMBERS = {"trailing_loss": 2.0, "trailing_loss_full": 1.75}


def stage(until: dict[str, Any] | None) -> Stage:
    """Three steps, and with `until` at most six."""
    given = None if until is None else UntilConfig.model_validate(until | {"max_tokens": 600})
    model = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=32, layers=2, heads=2, kv_heads=1)
    config = RunConfig(
        name="test",
        run_dir="unused",
        model=model,
        data=DataConfig(train=[SourceConfig(path="unused")]),
        batch_tokens=100,
        stages=[StageConfig(name="only", seq_len=50, tokens=300, until=given)],
    )
    return stages_of(config)[0]


@pytest.mark.parametrize(
    ("reference", "tolerance", "met"),
    [("full", 0.2, False), ("full", 0.25, True), ("full", 0.3, True), ("before", 0.0, False), ("before", 0.11, True)],
)
def test_the_criterion_is_met_when_the_trailing_loss_is_back(reference: str, tolerance: float, met: bool) -> None:
    """2.0 with the stage's own attention, 1.75 with full attention, 1.9 before the stage."""
    until = UntilConfig.model_validate(
        {"trailing_loss_recovered": {"tolerance": tolerance, "reference": reference}, "max_tokens": 10}
    )
    verdict = judge(until, NUMBERS, 1.9)
    assert verdict.met == met
    assert verdict.message.startswith("criterion met" if met else "criterion not met")
    assert "trailing loss 2.0000, " + ("1.7500" if reference == "full" else "1.9000") in verdict.message


@pytest.mark.parametrize(
    ("bound", "value", "met"),
    [
        ({"at_most": 2.0}, 2.0, True),
        ({"at_most": 2.0}, 2.1, False),
        ({"at_least": 0.95}, 0.95, True),
        ({"at_least": 0.95}, 0.9, False),
        ({"at_most": 2.0}, math.nan, False),
        ({"at_least": 0.0}, math.nan, False),
    ],
)
def test_any_number_of_an_evaluation_can_be_a_criterion(bound: dict[str, float], value: float, met: bool) -> None:
    until = UntilConfig.model_validate({"metric": "eval_loss", "max_tokens": 10, **bound})
    verdict = judge(until, {"eval_loss": value, "other": 0.0}, None)
    assert verdict.met == met
    assert f"eval_loss {value:.4f}" in verdict.message


@pytest.mark.parametrize("reference", ["full", "before"])
def test_a_trailing_loss_that_is_not_a_number_is_not_back(reference: str) -> None:
    until = UntilConfig.model_validate(
        {"trailing_loss_recovered": {"tolerance": 10.0, "reference": reference}, "max_tokens": 10}
    )
    assert not judge(until, NUMBERS | {"trailing_loss": math.nan}, 1.9).met
    assert not judge(until, NUMBERS | {"trailing_loss_full": math.nan}, math.nan).met


def test_it_is_judged_from_the_end_of_the_tokens_on_where_its_numbers_are() -> None:
    found = StageExit(stage({"metric": "eval_loss", "at_most": 1.0}), None)
    assert found.judge(2, {"eval_loss": 0.5}) is None
    assert found.judge(3, {"trailing_loss": 0.5}) is None
    assert [found.judge(step, {"eval_loss": loss}).met for step, loss in ((3, 1.5), (4, 0.5))] == [False, True]  # type: ignore[union-attr]
    not_last = found.judge(5, {"eval_loss": 1.5})
    assert not_last is not None
    assert "the stage ends" not in not_last.message
    last = found.judge(6, {"eval_loss": 1.5})
    assert last is not None
    assert not last.met
    assert last.message.endswith("the stage ends all the same, at its max_tokens")
    just_in_time = found.judge(6, {"eval_loss": 0.5})
    assert just_in_time is not None
    assert just_in_time.met
    assert "the stage ends" not in just_in_time.message


def test_a_criterion_of_two_numbers_waits_for_both() -> None:
    found = StageExit(stage({"trailing_loss_recovered": {"tolerance": 0.3, "reference": "full"}}), None)
    assert found.judge(3, {"trailing_loss": 2.0}) is None
    assert found.judge(3, NUMBERS) is not None


def test_a_stage_without_a_criterion_is_never_judged() -> None:
    assert StageExit(stage(None), None).judge(3, NUMBERS) is None


def test_a_reference_that_was_never_evaluated_is_refused() -> None:
    recovered = {"trailing_loss_recovered": {"tolerance": 0.1, "reference": "before"}}
    with pytest.raises(CheckpointError, match=r"stages\[0\]\.until.*set reference: full"):
        StageExit(stage(recovered), None)
    verdict = StageExit(stage(recovered), 1.95).judge(3, NUMBERS)
    assert verdict is not None
    assert verdict.met


def test_the_next_stage_is_compared_with_the_last_trailing_loss_though_later_steps_evaluated_other_numbers() -> None:
    progress = Progress(step=2)
    parts = ("section", "metrics", "world", "checkpoints", "telemetry", "watch", "stop")
    evaluations = RunEvaluations(
        progress=progress,
        is_recorded=lambda *_, **__: False,
        **dict.fromkeys(parts),  # type: ignore[arg-type]
    )
    evaluations._exit = StageExit(stage(None), None)
    for numbers in (NUMBERS, {"eval_loss": 1.0}):
        assert not evaluations._judge_exit(numbers, tokens=200)
    assert progress.trailing_loss == 2.0


def test_a_resumed_stage_is_compared_with_the_stage_before_and_not_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EvaluationContext", "StageEvaluations"):
        monkeypatch.setattr(evaluations_module, name, lambda *_, **__: None)
    progress = Progress(step=3, trailing_loss=2.0, trailing_loss_before=1.5)
    parts = ("section", "metrics", "checkpoints", "telemetry", "watch", "stop", "is_recorded")
    evaluations = RunEvaluations(
        progress=progress,
        world=SimpleNamespace(device=None),  # type: ignore[arg-type]
        **dict.fromkeys(parts),  # type: ignore[arg-type]
    )
    recovered = {"trailing_loss_recovered": {"tolerance": 0.1, "reference": "before"}}
    evaluations.begin_stage(SimpleNamespace(stage=stage(recovered)), None, None)  # type: ignore[arg-type]
    verdict = evaluations._exit.judge(3, NUMBERS)
    assert verdict is not None
    assert not verdict.met
    assert "1.5000 at the end of the stage before" in verdict.message
