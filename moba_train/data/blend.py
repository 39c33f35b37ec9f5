"""Blending: a smooth, deterministic interleaving of sources, or ranges of document lengths in them, by weight.

Sample j of source s is due at time (j + 1/2) / w_s. The blend lists the samples of all sources in the order in which
they are due; ties go to the earlier source. With shares p_s = w_s / sum(w) and S sources, the first n samples hold
n p_s of source s to within (1 + S p_s) / 2: one sample for equal weights, with no random drift.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moba_train.config.data import SourceConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError


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
    """Numbers of samples of each source to skip, which are all due before sample `first`; then sources and ordinals of
    the samples that follow them, up to sample first + count."""
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


class LengthBucket(NamedTuple):
    """Documents of one corpus whose length lies in [min_length, below_length); without limits, the whole corpus."""

    path: str
    """Prefix of the corpus."""
    min_length: int
    below_length: int | None
    weight: float
    """Share of the training tokens, relative to the other buckets."""
    most: int | None = None
    """Tokens of each document that are read, from its beginning; None: all."""

    @property
    def range(self) -> str:
        """Range of lengths, and what is read of longer documents, as text; empty for the whole corpus."""
        first = f"[first {self.most}]" if self.most else ""
        if not self.min_length and self.below_length is None:
            return first
        return f"[{self.min_length}:{'' if self.below_length is None else self.below_length}]{first}"

    @property
    def name(self) -> str:
        """Path of the corpus, followed by the range if there is one. Unique in a blend."""
        return f"{self.path}{self.range}"


def length_buckets(sources: Sequence[SourceConfig], open_corpus: Callable[[str], IndexedDataset]) -> list[LengthBucket]:
    """Length buckets of a blend, in the order of its sources.

    Raises DataError when two buckets share documents, or one has no tokens.
    """
    buckets = [bucket for source in sources for bucket in _source_buckets(source, open_corpus(source.path))]
    for one, other in itertools.combinations(buckets, 2):
        if one.path == other.path and share_lengths(one, other):
            raise DataError(
                f"corpus {one.path} is named twice in one blend; name it once and add up the weights, or give ranges "
                "of lengths that do not overlap (min_length, below_length)"
            )
    return buckets


def _source_buckets(source: SourceConfig, corpus: IndexedDataset) -> Iterator[LengthBucket]:
    bins = source.length_bins
    tokens = [factor * _count_tokens(corpus, low, high) for low, high, factor in bins]
    for (low, high, _), part in zip(bins, tokens, strict=True):
        weight = source.weight * part / sum(tokens) if source.upsample else source.weight
        yield LengthBucket(source.path, low, high, weight)


def _count_tokens(corpus: IndexedDataset, low: int, high: int | None) -> int:
    """Tokens in documents of length [low, high). Raises DataError when there are none."""
    tokens = int(corpus.document_lengths[corpus.documents_of_length(low, high)].sum())
    if not tokens:
        limits = f" in documents of at least {low} tokens" if low else ""
        if high is not None:
            limits = f" in documents of {low} to {high - 1} tokens"
        raise DataError(
            f"corpus {corpus.prefix} has no tokens{limits}; change or remove the source, or make the corpus again"
            f"{'; `moba-data stats` shows the lengths' if limits else ''}"
        )
    return tokens


def share_lengths(one: LengthBucket | SourceConfig, other: LengthBucket | SourceConfig) -> bool:
    """True if documents of one length belong to both."""
    least = max(one.min_length or 0, other.min_length or 0)
    return least < min(one.below_length or math.inf, other.below_length or math.inf)
