"""Permutations that do not depend on the numpy version."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def permutation(count: int, entropy: Sequence[int]) -> npt.NDArray[np.int64]:
    """A random order of 0 ... count - 1, int64 [count]; a pure function of the non-negative numbers `entropy`."""
    # Raw PCG64 output and SeedSequence never change between numpy versions; Generator.permutation may (NEP 19).
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(keys, kind="stable")
