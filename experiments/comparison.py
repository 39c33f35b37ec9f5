"""Differences between arms, paired over seeds, with intervals, and the smallest difference that could be seen.

Every arm is trained with every seed; a seed sets initial weights and the order of the data, alike in all arms of a
block (one seed, one size of model), so that blocks are differences which comparisons need not bear: a randomized block
design. The spread is pooled over all arms, because two or three seeds of one arm say little about it.

One seed has no spread. What is known of it then is the error of evaluation: arms of a block read the same sequences,
and the differences of their losses, sequence by sequence, have a mean with an interval. It says how well the difference
of these trained models is measured, and nothing about other seeds.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
POWER = 0.8
"""Probability with which the smallest visible difference would be seen."""


class Cell(NamedTuple):
    """One measured value."""

    arm: str
    block: str
    """What else the value depends on: seed, and size of the model where arms of several sizes are compared."""
    value: float
    by_sequence: Sequence[float | None] = ()
    """The loss of each sequence that `value` is a mean of, the same sequences in all cells of a block; None for one
    without loss, and empty where they were not kept."""
    documents: Sequence[int] = ()
    """Number of the document that each sequence is a part of; empty: not known, and each counts as its own."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval of 95 %."""

    value: float
    low: float
    high: float
    visible: float
    """The smallest true value that would differ from 0 in about 80 % of such experiments (the sum of both quantiles
    times the standard error, which promises a little too much with few seeds); infinite where no spread is known."""
    evaluation: float | None = None
    """Half the interval of 95 % of evaluation alone, where no spread of training is known; None: not known either."""

    @property
    def half(self) -> float:
        """Half the interval of 95 %."""
        return (self.high - self.low) / 2

    @property
    def evaluation_text(self) -> str:
        """The error of evaluation alone as a cell of a table."""
        return "–" if self.evaluation is None else f"±{self.evaluation:.4f}"

    def __str__(self) -> str:
        interval = f" [{self.low:+.4f}, {self.high:+.4f}]" if np.isfinite(self.visible) else ""
        return f"{self.value:+.4f}{interval}"


@dataclass(frozen=True)
class Verdict:
    """Whether an estimate agrees with a claim that it lies in [`low`, `high`]."""

    claim: str
    """As a sentence without full stop: "MoBA's loss is within 0.01 of full attention's"."""
    estimate: Estimate
    low: float
    high: float

    @property
    def word(self) -> Literal["agrees", "does not agree", "inconclusive"]:
        """Agrees: the whole interval lies within the claim; does not: it lies outside."""
        if self.low <= self.estimate.low and self.estimate.high <= self.high:
            return "agrees"
        if self.estimate.high < self.low or self.high < self.estimate.low:
            return "does not agree"
        return "inconclusive"

    def __str__(self) -> str:
        seen = self.estimate.visible
        if np.isfinite(seen):
            power = f"minimum detectable difference {seen:.4f}"
        else:
            power = "one seed: no spread known"
            if self.estimate.evaluation is not None:
                power += f"; evaluation alone {self.estimate.evaluation_text}"
        return f"{self.claim}: **{self.word}** ({self.estimate}; {power})."


@dataclass(frozen=True)
class Comparison:
    """Means of arms, adjusted for their blocks."""

    arms: tuple[str, ...]
    cells: Sequence[Cell]
    design: npt.NDArray[np.float64]
    """[cells, arms + blocks]: 1 for the arm and the block of each cell."""
    variance: float
    """Variance of one value within its block; NaN where no degree of freedom is left."""
    freedom: int

    def judge(self, claim: str, weights: Mapping[str, float], low: float, high: float) -> list[Verdict]:
        """The verdict on the claim that `contrast` lies in [`low`, `high`]; none where arms are missing, or have no
        blocks in common, directly or through others."""
        return [Verdict(claim, self.contrast(weights), low, high)] if self.knows(weights) else []

    def knows(self, weights: Mapping[str, float]) -> bool:
        """Whether the cells say anything of `contrast`: arms that were trained with other seeds alone do not."""
        if not weights.keys() <= set(self.arms):
            return False
        row = self._row(weights)
        return bool(np.allclose(row @ self._inverse @ self.design, row, atol=1e-9))

    def contrast(self, weights: Mapping[str, float]) -> Estimate:
        """The sum of arms' means times `weights`, which add up to 0. Raises ValueError where nothing is known of it."""
        if not self.knows(weights):
            raise ValueError(f"the arms {', '.join(weights)} have no common blocks to be compared in")
        shares = self._row(weights) @ self._inverse
        value = float(shares @ [cell.value for cell in self.cells])
        if self.freedom == 0:
            return Estimate(value, -np.inf, np.inf, np.inf, self._evaluation(shares))
        error = float(np.sqrt(self.variance * (shares @ shares)))
        half = error * t_quantile((1 + CONFIDENCE) / 2, self.freedom)
        return Estimate(value, value - half, value + half, half + error * t_quantile(POWER, self.freedom))

    def _evaluation(self, shares: npt.NDArray[np.float64]) -> float | None:
        """Half the interval, over sequences, of the sum of cells times `shares`; None where they have several blocks,
        which read other sequences, or losses by sequence are missing."""
        parts = [(share, cell) for share, cell in zip(shares, self.cells, strict=True) if abs(share) > 1e-9]
        sequences = {len(cell.by_sequence) for _, cell in parts}
        if len({cell.block for _, cell in parts}) != 1 or len(sequences) != 1:
            return None
        summed = sum(share * np.array(cell.by_sequence, dtype=np.float64) for share, cell in parts)
        kept = np.isfinite(summed)
        documents = np.array(parts[0][1].documents or range(len(kept)))[kept]
        return clustered_half(np.asarray(summed)[kept], documents)

    def _row(self, weights: Mapping[str, float]) -> npt.NDArray[np.float64]:
        """The weights of arms and blocks."""
        row = np.zeros(self.design.shape[1])
        row[: len(self.arms)] = [weights.get(arm, 0.0) for arm in self.arms]
        return row

    @functools.cached_property
    def _inverse(self) -> npt.NDArray[np.float64]:
        """[arms + blocks, cells]: what each cell adds to each of them."""
        return np.asarray(np.linalg.pinv(self.design), dtype=np.float64)

    def difference(self, arm: str, reference: str) -> Estimate:
        """How far `arm` is above `reference`. Raises ValueError where nothing is known of it."""
        return self.contrast({arm: 1.0, reference: -1.0})


def compare(cells: Sequence[Cell]) -> Comparison:
    """Least squares of value = arm + block. Arms need not have all blocks; those that blocks link can be compared."""
    arms = tuple(dict.fromkeys(cell.arm for cell in cells))
    blocks = tuple(dict.fromkeys(cell.block for cell in cells))
    design = np.zeros((len(cells), len(arms) + len(blocks)))
    for row, cell in zip(design, cells, strict=True):
        row[arms.index(cell.arm)] = 1
        row[len(arms) + blocks.index(cell.block)] = 1
    values = np.array([cell.value for cell in cells])
    freedom = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
    squares = float(((values - design @ np.linalg.pinv(design) @ values) ** 2).sum())
    return Comparison(arms, cells, design, squares / freedom if freedom else np.nan, freedom)


def shared(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of blocks that have several; a block of one cell compares nothing."""
    blocks = [cell.block for cell in cells]
    return [cell for cell in cells if blocks.count(cell.block) > 1]


ABOVE = ["above full", "± evaluation"]
"""Heads of the columns that `above` fills."""


def above(cells: Sequence[Cell], arm: str, reference: str) -> list[str]:
    """Two cells of a table: how far `arm` is above `reference`, mean over the blocks that have both, and with one block
    the error of evaluation alone; a dash for what is not known, and where the arm is the reference."""
    both = compare([cell for cell in cells if cell.arm in (arm, reference)])
    if arm == reference or not both.knows({arm: 1.0, reference: -1.0}):
        return ["–", "–"]
    found = both.difference(arm, reference)
    return [f"{found.value:+.4f}", found.evaluation_text]


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of independent values, at least two, with the interval of Student's t."""
    freedom = len(values) - 1
    value = float(np.mean(values))
    error = float(np.std(values, ddof=1) / len(values) ** 0.5)
    half = error * t_quantile((1 + CONFIDENCE) / 2, freedom)
    return Estimate(value, value - half, value + half, half + error * t_quantile(POWER, freedom))


def clustered_half(values: npt.NDArray[np.float64], clusters: npt.NDArray[np.int64]) -> float | None:
    """Half the interval of the mean of `values`, which are independent only if they are of different `clusters`; None
    for fewer than two clusters. Where each value is its own cluster it is the half of `mean_of`."""
    sums = [float((values - values.mean())[clusters == cluster].sum()) for cluster in np.unique(clusters)]
    if len(sums) < 2:
        return None
    error = (len(sums) / (len(sums) - 1) * sum(one**2 for one in sums)) ** 0.5 / len(values)
    return float(error * t_quantile((1 + CONFIDENCE) / 2, len(sums) - 1))


@functools.cache
def t_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t distribution: t = sqrt(freedom) tan(a), where a has the density cos(a)^(freedom - 1)."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(freedom) * np.tan(np.interp(share, below / below[-1], angles)))
