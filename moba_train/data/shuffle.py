"""Permutations that stay the same for ever, whatever the numpy version."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def permutation(count: int, entropy: Sequence[int]) -> npt.NDArray[np.int64]:
    """A random order of 0 ... count - 1, int64 [count], that depends on the non-negative numbers `entropy` alone."""
    # Raw PCG64 output and SeedSequence never change between numpy versions; Generator.permutation may (NEP 19).
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(keys, kind="stable")
