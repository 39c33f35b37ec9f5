"""Verdicts about differences between arms: known differences are found, intervals hold them, power is what it says."""

import math

import numpy as np
import pytest

from experiments.comparison import Cell, Estimate, Verdict, compare, t_quantile


@pytest.mark.parametrize(
    ("share", "freedom", "known"),
    [(0.975, 1, 12.706), (0.975, 3, 3.182), (0.8, 5, 0.920), (0.975, 30, 2.042), (0.975, 10**6, 1.960)],
)
def test_quantiles_are_those_of_printed_tables(share: float, freedom: int, known: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(known, abs=6e-4)
    assert t_quantile(1 - share, freedom) == pytest.approx(-known, abs=6e-4)


def cells(rng: np.random.Generator, difference: float, noise: float, blocks: int) -> list[Cell]:
    found = []
    for block in range(blocks):
        level = rng.normal(3.0, 0.5)  # far larger than what is compared
        for arm, above in (("full", 0.0), ("moba", difference), ("other", -1.0)):
            found.append(Cell(arm, f"seed {block}", level + above + rng.normal(0, noise)))
    return found


def test_a_difference_without_noise_is_found_whatever_the_blocks_and_gaps() -> None:
    known = cells(np.random.default_rng(0), 0.003, 0.0, 4)
    del known[1]  # a block without this arm
    found = compare(known).difference("moba", "full")
    assert (found.value, found.low, found.high) == pytest.approx((0.003, 0.003, 0.003))


def test_intervals_hold_the_difference_as_often_as_they_promise_and_power_is_true() -> None:
    rng = np.random.default_rng(1)
    estimates = [compare(cells(rng, 0.01, 0.004, 3)).difference("moba", "full") for _ in range(1500)]
    held = np.mean([one.low <= 0.01 <= one.high for one in estimates])
    assert held == pytest.approx(0.95, abs=0.02)
    # A true difference as large as the usual smallest visible one is told from 0 in about 80 % of the cases.
    visible = float(np.median([one.visible for one in estimates]))
    seen = [compare(cells(rng, visible, 0.004, 3)).difference("moba", "full").low > 0 for _ in range(1500)]
    assert np.mean(seen) == pytest.approx(0.8, abs=0.1)


def test_one_seed_says_nothing_and_strangers_are_refused() -> None:
    one = compare([Cell("full", "a", 1.0), Cell("moba", "a", 2.0)])
    found = one.difference("moba", "full")
    assert found.value == pytest.approx(1.0)
    assert (found.low, found.high, found.visible) == (-math.inf, math.inf, math.inf)
    assert Verdict("MoBA is worse", found, 0.0, math.inf).word == "cannot be told"
    assert "no spread known" in str(Verdict("MoBA is worse", found, 0.0, math.inf))
    with pytest.raises(ValueError, match="no common blocks"):
        compare([Cell("full", "a", 1.0), Cell("moba", "b", 2.0)])


@pytest.mark.parametrize(
    ("low", "high", "word"), [(-0.01, 0.01, "agrees"), (0.01, 0.02, "does not agree"), (0.0, 0.01, "cannot be told")]
)
def test_the_whole_interval_decides(low: float, high: float, word: str) -> None:
    verdict = Verdict("They are alike", Estimate(0.001, -0.004, 0.006, 0.008), low, high)
    assert verdict.word == word
    assert str(verdict) == (
        f"They are alike: **{word}** (+0.0010 [-0.0040, +0.0060]; minimum detectable difference 0.0080)."
    )
