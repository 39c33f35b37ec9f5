"""Verdicts about differences between arms: known differences are found, intervals hold them, power is what it says."""

import math

import numpy as np
import pytest

from experiments.comparison import Cell, Estimate, Verdict, above, compare, mean_of, t_quantile


def test_errors_of_evaluation_count_documents() -> None:
    """Sequences of one document that are all alike say no more than the document."""
    rng = np.random.default_rng(0)
    of_documents = rng.normal(0.1, 0.02, 8)
    alike = np.repeat(of_documents, 5)
    level = rng.normal(2, 0.5, 40)
    documents = [int(one) for one in np.repeat(np.arange(8), 5)]
    both = [Cell("full", "seed 0", 0.0, level.tolist(), documents)]
    both.append(Cell("moba", "seed 0", 0.1, (level + alike).tolist(), documents))
    found = compare(both).difference("moba", "full").evaluation
    assert found == pytest.approx(mean_of(of_documents.tolist()).half)
    apart = [cell._replace(documents=()) for cell in both]
    naive = compare(apart).difference("moba", "full").evaluation
    assert naive == pytest.approx(mean_of(alike.tolist()).half)
    assert naive is not None
    assert found is not None
    assert naive < 0.5 * found


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
        for arm, more in (("full", 0.0), ("moba", difference), ("other", -1.0)):
            found.append(Cell(arm, f"seed {block}", level + more + rng.normal(0, noise)))
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
    assert Verdict("MoBA is worse", found, 0.0, math.inf).word == "inconclusive"
    assert "no spread known" in str(Verdict("MoBA is worse", found, 0.0, math.inf))
    strangers = compare([Cell("full", "a", 1.0), Cell("moba", "b", 2.0)])
    with pytest.raises(ValueError, match="no common blocks"):
        strangers.difference("moba", "full")
    assert strangers.judge("MoBA is worse", {"moba": 1.0, "full": -1.0}, 0.0, math.inf) == []
    assert one.judge("other is worse", {"other": 1.0, "full": -1.0}, 0.0, math.inf) == []
    assert compare([]).judge("MoBA is worse", {"moba": 1.0, "full": -1.0}, 0.0, math.inf) == []


def test_arms_are_compared_through_others_and_strangers_do_not_disturb() -> None:
    chain = [Cell("a", "1", 1.0), Cell("b", "1", 1.5), Cell("b", "2", 2.5), Cell("c", "2", 2.7)]
    strangers = [Cell("d", "3", 9.0), Cell("e", "3", 8.0), Cell("b", "4", 7.0)]
    found = compare([*chain, *strangers])
    assert found.difference("c", "a").value == pytest.approx(0.7)
    assert found.difference("e", "d").value == pytest.approx(-1.0)
    assert found.freedom == compare(chain).freedom == 0
    assert not found.knows({"d": 1.0, "a": -1.0})


def test_one_seed_has_the_error_of_evaluation_over_the_pairs_of_sequences() -> None:
    """Differences of 0.1, 0.3, 0.1, 0.3: mean 0.2, standard deviation sqrt(4 * 0.01 / 3) = 0.11547, standard error half
    of it, 0.057735; Student's t of three degrees of freedom is 3.1824. The sequences differ by far more."""
    full = Cell("full", "seed 0", 2.5, (1.0, 2.0, 3.0, 4.0))
    moba = Cell("moba", "seed 0", 2.7, (1.1, 2.3, 3.1, 4.3))
    other = Cell("other", "seed 0", 2.0)
    half = 3.1824 * 0.057735
    found = compare([full, moba, other])
    gap = found.difference("moba", "full")
    assert gap.evaluation == pytest.approx(half, abs=1e-5)
    assert (gap.low, gap.high) == (-math.inf, math.inf), "no interval of training"
    assert f"one seed: no spread known; evaluation alone ±{half:.4f}" in str(Verdict("Worse", gap, 0.0, math.inf))
    assert found.difference("other", "full").evaluation is None
    assert "evaluation" not in str(Verdict("Better", found.difference("other", "full"), -math.inf, 0.0))
    mean = found.contrast({"moba": 1.0, "full": 1.0, "other": -2.0})
    assert mean.evaluation is None
    assert above([full, moba, other], "moba", "full") == ["+0.2000", f"±{half:.4f}"]
    assert above([full, moba, other], "other", "full") == ["-0.5000", "–"], "kept before there were losses by sequence"
    assert above([full, moba], "full", "full") == above([full], "moba", "full") == ["–", "–"]


def test_sequences_are_paired_only_within_a_block_and_where_both_have_loss() -> None:
    full = Cell("full", "seed 0", 2.0, (1.0, 2.0, None, 3.0))
    moba = Cell("moba", "seed 0", 2.2, (1.1, 2.1, 7.0, 3.4))
    differences = np.array([0.1, 0.1, 0.4])
    half = t_quantile(0.975, 2) * differences.std(ddof=1) / 3**0.5
    assert compare([full, moba]).difference("moba", "full").evaluation == pytest.approx(half)
    shorter = moba._replace(by_sequence=(1.1, 2.1, 3.4))
    assert compare([full, shorter]).difference("moba", "full").evaluation is None
    later = [cell._replace(block="seed 1", value=cell.value + 0.1) for cell in (full, moba)]
    assert above([full, moba, *later], "moba", "full")[1] == "–", "two seeds have a spread of training"


@pytest.mark.parametrize(
    ("low", "high", "word"), [(-0.01, 0.01, "agrees"), (0.01, 0.02, "does not agree"), (0.0, 0.01, "inconclusive")]
)
def test_the_whole_interval_decides(low: float, high: float, word: str) -> None:
    verdict = Verdict("They are alike", Estimate(0.001, -0.004, 0.006, 0.008), low, high)
    assert verdict.word == word
    assert str(verdict) == (
        f"They are alike: **{word}** (+0.0010 [-0.0040, +0.0060]; minimum detectable difference 0.0080)."
    )
