"""Blending: a smooth, deterministic interleaving of sources by weight.

Sample j of source s is due at time (j + 1/2) / w_s. The blend lists the samples of all sources in the order in which
they are due; ties go to the earlier source. With shares p_s = w_s / sum(w) and S sources, the first n samples hold
n p_s of source s to within (1 + S p_s) / 2: one sample for equal weights, with no random drift.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def blend(weights: Sequence[float], count: int, first: int = 0) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Samples [first, first + count) of the blend: the source of each, int32 [count], and its index within that source,
    int64 [count]. The cost does not depend on `first`."""
    skipped, source, ordinal = _due(weights, first, count)
    drop = first - int(skipped.sum())
    return source[drop:], ordinal[drop:]


def samples_taken(weights: Sequence[float], count: int) -> npt.NDArray[np.int64]:
    """Number of the first `count` samples that come from each source, int64 [sources]."""
    skipped, source, _ = _due(weights, count, 0)
    return skipped + np.bincount(source, minlength=len(weights))


def _due(
    weights: Sequence[float], first: int, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Samples of each source to skip, all due before sample `first`; then sources and ordinals of the samples that
    follow them, up to sample first + count."""
    weight = np.asarray(weights, dtype=np.float64)
    share = weight / weight.sum()
    slack = len(weight) / 2
    # At time t (in samples) between t - S/2 and t + S/2 samples are due; one more at either end forgives rounding.
    skipped = np.maximum(np.floor((first - slack) * share - 1.5), 0).astype(np.int64)
    until = np.ceil((first + count + slack) * share + 1.5).astype(np.int64)
    source = np.repeat(np.arange(len(weight), dtype=np.int32), until - skipped)
    ordinal = np.concatenate([np.arange(low, high) for low, high in zip(skipped, until, strict=True)])
    due = np.argsort((ordinal + 0.5) / share[source], kind="stable")[: first + count - int(skipped.sum())]
    return skipped, source[due], ordinal[due]
