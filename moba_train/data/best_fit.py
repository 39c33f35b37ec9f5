"""Best-fit-decreasing bin packing: whole documents into samples of a fixed length, longest first, tightest fit.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling". Finding the tightest bin takes O(log capacity).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Packing(NamedTuple):
    """The assignment of items to bins."""

    order: npt.NDArray[np.int64]
    """int64 [items]: item indices bin by bin, ascending within each bin."""
    begins: npt.NDArray[np.int64]
    """int64 [bins + 1]: offset of each bin in `order`; the last entry is the number of items."""

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.begins) - 1

    def items(self, bin_index: int) -> npt.NDArray[np.int64]:
        """Item indices of one bin, int64 [n]."""
        return self.order[self.begins[bin_index] : self.begins[bin_index + 1]]


def best_fit(lengths: npt.ArrayLike, capacity: int) -> Packing:
    """Pack items of these lengths, int [items], into bins of `capacity` by best-fit-decreasing.

    A pure function of its arguments; items of equal length are placed in their order. Raises ValueError when a length
    is not in [1, capacity]; longer documents are split by `split_documents` first.
    """
    length = np.asarray(lengths, dtype=np.int64)
    if length.size and not 1 <= length.min() <= length.max() <= capacity:
        raise ValueError(f"lengths are {length.min()}..{length.max()}; a bin of {capacity} takes 1..{capacity}")
    by_length = np.argsort(-length, kind="stable")
    values, counts = np.unique(length, return_counts=True)
    bins_with: dict[int, list[int]] = {}
    capacities = _IntegerSet(capacity + 1)
    run_bins: list[int] = []
    run_lengths: list[int] = []
    bins = 0
    for value, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            room = capacities.first_from(value)
            if room is None:
                room = capacity
                chosen = bins
                bins += 1
            else:
                same_room = bins_with[room]
                chosen = same_room.pop()
                if not same_room:
                    capacities.discard(room)
            # What remains of the tightest bin is tighter still, so the next items of this length go there too.
            placed = min(count, room // value)
            run_bins.append(chosen)
            run_lengths.append(placed)
            count -= placed
            if left := room - placed * value:
                bins_with.setdefault(left, []).append(chosen)
                capacities.add(left)
    item_bins = np.empty(len(length), dtype=np.int64)
    item_bins[by_length] = np.repeat(np.array(run_bins, dtype=np.int64), run_lengths)
    begins = np.zeros(bins + 1, dtype=np.int64)
    np.cumsum(np.bincount(item_bins, minlength=bins), out=begins[1:])
    return Packing(np.argsort(item_bins, kind="stable"), begins)


def split_documents(lengths: npt.ArrayLike, capacity: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split documents of these lengths into parts of at most `capacity`: the document and the first token of each part.

    Both are int64 [parts], in document order. A document longer than `capacity` becomes full parts and a rest, an empty
    one becomes none.
    """
    parts = -(-np.asarray(lengths, dtype=np.int64) // capacity)
    document = np.repeat(np.arange(len(parts)), parts)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    return document, (np.arange(len(document)) - first) * capacity


class _IntegerSet:
    """A set of integers in [0, size) that finds the next larger member in O(log size).

    Level 0 has one bit per integer, in words of 64 bits; each level above has one bit per nonzero word of the level
    below.
    """

    def __init__(self, size: int) -> None:
        self._levels: list[list[int]] = []
        while not self._levels or size > 1:
            size = -(-size // 64)
            self._levels.append([0] * size)

    def add(self, value: int) -> None:
        for level in self._levels:
            level[value >> 6] |= 1 << (value & 63)
            value >>= 6

    def discard(self, value: int) -> None:
        for level in self._levels:
            level[value >> 6] &= ~(1 << (value & 63))
            value >>= 6
            if level[value]:
                return

    def first_from(self, value: int) -> int | None:
        """The smallest member >= `value`, or None."""
        for depth, level in enumerate(self._levels):
            word = value >> 6
            if word < len(level) and (rest := level[word] >> (value & 63)):
                value += _lowest_bit(rest)
                for below in reversed(self._levels[:depth]):
                    value = value << 6 | _lowest_bit(below[value])
                return value
            value = word + 1
        return None


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1
