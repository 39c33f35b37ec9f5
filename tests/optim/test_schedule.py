"""Learning-rate schedules as functions of consumed tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moba_train.config.optim import ScheduleConfig
from moba_train.optim.schedule import learning_rate

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
