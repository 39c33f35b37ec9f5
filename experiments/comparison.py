"""Differences between arms, paired over seeds, with intervals, and the smallest difference that could be seen.

Every arm is trained with every seed; a seed sets initial weights and the order of the data, alike in all arms of a
block (one seed, one size of model), so that blocks are differences which comparisons need not bear: a randomized block
design. The spread is pooled over all arms, because two or three seeds of one arm say little about it.
"""

import functools
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Estimate:
    """A number with its interval of 95 %."""

    value: float
    low: float
    high: float
    visible: float
    """The smallest true value that would differ from 0 in about 80 % of such experiments (the sum of both quantiles
    times the standard error, which promises a little too much with few seeds); infinite where no spread is known."""

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
    def word(self) -> Literal["agrees", "does not agree", "cannot be told"]:
        """Agrees: the whole interval lies within the claim; does not: it lies outside."""
        if self.low <= self.estimate.low and self.estimate.high <= self.high:
            return "agrees"
        if self.estimate.high < self.low or self.high < self.estimate.low:
            return "does not agree"
        return "cannot be told"

    def __str__(self) -> str:
        seen = self.estimate.visible
        known = np.isfinite(seen)
        power = f"minimum detectable difference {seen:.4f}" if known else "one seed: no spread known"
        return f"{self.claim}: **{self.word}** ({self.estimate}; {power})."


@dataclass(frozen=True)
class Comparison:
    """Means of arms, adjusted for their blocks."""

    arms: tuple[str, ...]
    means: npt.NDArray[np.float64]
    """[arms]"""
    covariance: npt.NDArray[np.float64]
    """[arms, arms], in units of the variance."""
    variance: float
    """Variance of one value within its block; NaN where no degree of freedom is left."""
    freedom: int

    def contrast(self, weights: dict[str, float]) -> Estimate:
        """The sum of arms' means times `weights`, which add up to 0."""
        row = np.array([weights.get(arm, 0.0) for arm in self.arms])
        value = float(row @ self.means)
        if self.freedom == 0:
            return Estimate(value, -np.inf, np.inf, np.inf)
        error = float(np.sqrt(self.variance * (row @ self.covariance @ row)))
        half = error * t_quantile((1 + CONFIDENCE) / 2, self.freedom)
        return Estimate(value, value - half, value + half, half + error * t_quantile(POWER, self.freedom))

    def difference(self, arm: str, reference: str) -> Estimate:
        """How far `arm` is above `reference`."""
        return self.contrast({arm: 1.0, reference: -1.0})


def compare(cells: Sequence[Cell]) -> Comparison:
    """Least squares of value = arm + block. Arms need not have all blocks, but blocks must link them.

    Raises ValueError where arms have no block in common, directly or through others.
    """
    arms = tuple(dict.fromkeys(cell.arm for cell in cells))
    blocks = tuple(dict.fromkeys(cell.block for cell in cells))
    design = np.zeros((len(cells), len(arms) + len(blocks)))
    for row, cell in zip(design, cells, strict=True):
        row[arms.index(cell.arm)] = 1
        row[len(arms) + blocks.index(cell.block)] = 1
    rank = int(np.linalg.matrix_rank(design))
    if rank < len(arms) + len(blocks) - 1:
        raise ValueError(f"the arms {', '.join(arms)} have no common blocks to be compared in: {', '.join(blocks)}")
    inverse = np.linalg.pinv(design)
    values = np.array([cell.value for cell in cells])
    found = inverse @ values
    freedom = len(cells) - rank
    squares = float(((values - design @ found) ** 2).sum())
    covariance = (inverse @ inverse.T)[: len(arms), : len(arms)]
    return Comparison(arms, found[: len(arms)], covariance, squares / freedom if freedom else np.nan, freedom)


def shared(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of blocks that have several; a block of one cell compares nothing."""
    blocks = [cell.block for cell in cells]
    return [cell for cell in cells if blocks.count(cell.block) > 1]


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of independent values, at least two, with the interval of Student's t."""
    freedom = len(values) - 1
    value = float(np.mean(values))
    error = float(np.std(values, ddof=1) / len(values) ** 0.5)
    half = error * t_quantile((1 + CONFIDENCE) / 2, freedom)
    return Estimate(value, value - half, value + half, half + error * t_quantile(POWER, freedom))


@functools.cache
def t_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t distribution: t = sqrt(freedom) tan(a), where a has the density cos(a)^(freedom - 1)."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(freedom) * np.tan(np.interp(share, below / below[-1], angles)))
