"""What the sources of a blend come to: ranges of document lengths of a corpus, each with its share of the tokens."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from moba_train.config.data import SourceConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError


class Stratum(NamedTuple):
    """The documents of one corpus in a range of lengths."""

    path: str
    min_length: int
    below_length: int | None
    weight: float
    """Share of the training tokens, relative to the other strata."""

    @property
    def name(self) -> str:
        """The corpus' path, and the range where it is one: unique in a blend, the same in every stage."""
        if not self.min_length and self.below_length is None:
            return self.path
        return f"{self.path}[{self.min_length}:{'' if self.below_length is None else self.below_length}]"


def strata(sources: Sequence[SourceConfig], open_corpus: Callable[[str], IndexedDataset]) -> list[Stratum]:
    """The strata of a blend, in its order.

    Raises DataError when two have documents in common, or one has no tokens.
    """
    found = [stratum for source in sources for stratum in _of_source(source, open_corpus(source.path))]
    for one, other in itertools.combinations(found, 2):
        if one.path == other.path and _overlap(one, other):
            raise DataError(
                f"corpus {one.path} is named twice in one blend; name it once under data.train or stages.N.train and "
                "add up the weights, or give ranges of lengths that do not overlap (min_length, below_length)"
            )
    return found


def _of_source(source: SourceConfig, corpus: IndexedDataset) -> Iterator[Stratum]:
    low, high, upsample = source.min_length or 0, source.below_length, source.upsample
    if upsample is None:
        _tokens(corpus, low, high)
        yield Stratum(source.path, low, high, source.weight)
        return
    short = _tokens(corpus, low, upsample.min_length)
    long = upsample.factor * _tokens(corpus, upsample.min_length, high)
    yield Stratum(source.path, low, upsample.min_length, source.weight * short / (short + long))
    yield Stratum(source.path, upsample.min_length, high, source.weight * long / (short + long))


def _tokens(corpus: IndexedDataset, low: int, high: int | None) -> int:
    tokens = int(corpus.document_lengths[corpus.documents_of_length(low, high)].sum())
    if not tokens:
        of_length = f" in documents of {low} to below {'any number' if high is None else high}" if low or high else ""
        raise DataError(
            f"corpus {corpus.prefix} has no tokens{of_length}; change or remove the source in data.train or "
            f"stages.N.train, or make the corpus again{'; `moba-data stats` shows the lengths' if of_length else ''}"
        )
    return tokens


def _overlap(one: Stratum, other: Stratum) -> bool:
    def above(low: Stratum, high: Stratum) -> bool:
        return low.below_length is not None and low.below_length <= high.min_length

    return not (above(one, other) or above(other, one))
