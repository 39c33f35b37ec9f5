"""Learning-rate schedules as functions of consumed tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moba_train.config.optim import ScheduleConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import timed
from moba_train.optim.spec import learning_rate, stage_learning_rate
from tests.resolved import stages_of

SPAN = 1000


def rates(**options: object) -> dict[int, float]:
    schedule = ScheduleConfig.model_validate(options)
    return {tokens: learning_rate(schedule, 2.0, tokens, SPAN) for tokens in (50, 100, 550, 800, 900, 1000)}


def test_cosine_warms_up_to_the_peak_and_ends_at_the_minimum() -> None:
    got = rates(kind="cosine", warmup_tokens=100, min_lr_ratio=0.1)
    assert got[50] == pytest.approx(1.0)
    assert got[100] == pytest.approx(2.0)
    assert got[550] == pytest.approx(1.1)
    assert got[1000] == pytest.approx(0.2)


def test_linear_falls_on_a_line() -> None:
    got = rates(kind="linear", warmup_tokens=100, min_lr_ratio=0.0)
    assert got[550] == pytest.approx(1.0)
    assert got[1000] == pytest.approx(0.0)


def test_wsd_is_stable_until_its_decay() -> None:
    got = rates(kind="wsd", warmup_tokens=100, decay_tokens=200, min_lr_ratio=0.0)
    assert got[100] == got[550] == got[800] == 2.0
    assert got[900] == pytest.approx(1.0)
    assert got[1000] == pytest.approx(0.0)


def test_constant_stays() -> None:
    got = rates(kind="constant", warmup_tokens=100)
    assert got[50] == pytest.approx(1.0)
    assert got[550] == got[1000] == 2.0


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 500),
    decay=st.integers(1, 500),
    tokens=st.integers(0, 5 * SPAN),
)
def test_no_schedule_leaves_its_bounds(kind: str, warmup: int, decay: int, tokens: int) -> None:
    """Never above the peak, and after the warm-up never below the minimum, even past the end of the span."""
    schedule = ScheduleConfig.model_validate(
        {"kind": kind, "warmup_tokens": warmup, "min_lr_ratio": 0.1, "decay_tokens": decay if kind == "wsd" else 0}
    )
    rate = learning_rate(schedule, 2.0, tokens, SPAN)
    assert rate <= 2.0
    assert tokens < warmup or rate >= 0.2 - 1e-12


UNTIL = {"metric": "eval_loss", "at_most": 1.0, "max_tokens": 800}


def stage_rates(first: dict[str, Any], second: dict[str, Any], exited: dict[str, int] | None = None) -> list[float]:
    """The rates of all steps, of 100 tokens each, of two stages of 400 and 600 tokens. The run's schedule warms up for
    100 tokens to 2.0 and then falls on a line to 0."""
    config = RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": "unused",
            "model": {
                "vocab_size": 32,
                "hidden_size": 8,
                "intermediate_size": 8,
                "layers": 1,
                "heads": 1,
                "kv_heads": 1,
            },
            "data": {"train": [{"path": "unused"}]},
            "batch_tokens": 100,
            "optim": {"lr": 2.0, "schedule": {"kind": "linear", "warmup_tokens": 100, "min_lr_ratio": 0.0}},
            "stages": [
                {"name": "first", "seq_len": 50, "tokens": 400} | first,
                {"name": "second", "seq_len": 50, "tokens": 600} | second,
            ],
        }
    )
    stages = timed(stages_of(config), exited or {})
    steps = [(stage, step) for stage in stages for step in range(stage.first_step + 1, stage.end_step + 1)]
    return [
        stage_learning_rate(stages, stage.index, config.optim.schedule, stage.tokens_after(step))
        for stage, step in steps
    ]


def test_the_runs_schedule_goes_on_from_stage_to_stage() -> None:
    assert stage_rates({}, {}) == pytest.approx([2 * (10 - step) / 9 for step in range(1, 11)])


def test_a_stage_with_a_peak_of_its_own_starts_the_schedule_anew() -> None:
    rates = stage_rates({}, {"lr": 1.0})
    assert rates[:4] == stage_rates({}, {})[:4]
    assert rates[4:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_a_stages_own_schedule_spans_the_stage() -> None:
    """And the run's, in the stages without one, still counts the tokens of all stages."""
    own = {"kind": "linear", "warmup_tokens": 200, "min_lr_ratio": 0.5}
    second = stage_rates({}, {"lr": 1.0, "schedule": own})
    assert second[:4] == stage_rates({}, {})[:4]
    assert second[4:] == pytest.approx([0.5, 1.0, 0.875, 0.75, 0.625, 0.5])
    first = stage_rates({"schedule": own}, {})
    assert first[:4] == pytest.approx([1.0, 2.0, 1.5, 1.0])
    assert first[4:] == stage_rates({}, {})[4:]


@pytest.mark.parametrize("schedule", [None, {"kind": "linear", "warmup_tokens": 200, "min_lr_ratio": 0.5}])
def test_beyond_its_planned_tokens_a_stage_stays_at_its_last_rate(schedule: dict[str, Any] | None) -> None:
    """Later stages have the rates that they have where it ends as planned."""
    first = {"schedule": schedule} if schedule else {}
    planned = stage_rates(first, {})
    longer = stage_rates(first | {"until": UNTIL}, {}, exited={"first": 7})
    assert longer == [*planned[:4], *[planned[3]] * 3, *planned[4:]]
