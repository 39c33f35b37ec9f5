"""Best-fit packing: whole documents into samples of a fixed length, the longest first, each where it fits tightest.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling". Finding the tightest place takes O(log capacity).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Packing(NamedTuple):
    """Which items share a bin."""

    order: npt.NDArray[np.int64]
    """int64 [items]: the items bin by bin, in each bin in ascending order."""
    begins: npt.NDArray[np.int64]
    """int64 [bins + 1]: where each bin begins in `order`; the last entry is the number of items."""

    @property
    def bins(self) -> int:
        """How many bins there are."""
        return len(self.begins) - 1

    def items(self, bin_index: int) -> npt.NDArray[np.int64]:
        """The items of one bin, int64 [n]."""
        return self.order[self.begins[bin_index] : self.begins[bin_index + 1]]


def best_fit(lengths: npt.ArrayLike, capacity: int) -> Packing:
    """Pack items of these lengths, int [items], into as few bins of `capacity` as best-fit-decreasing needs.

    A pure function of its arguments; items of equal length are placed in their order. Raises ValueError when a length
    is not in [1, capacity]: longer documents are cut first, see `cut`.
    """
    length = np.asarray(lengths, dtype=np.int64)
    if length.size and not 1 <= length.min() <= length.max() <= capacity:
        raise ValueError(f"lengths are {length.min()}..{length.max()}; a bin of {capacity} takes 1..{capacity}")
    by_length = np.argsort(-length, kind="stable")
    values, counts = np.unique(length, return_counts=True)
    bins_with: dict[int, list[int]] = {}
    capacities = _IntegerSet(capacity + 1)
    bin_of_run: list[int] = []
    items_in_run: list[int] = []
    bins = 0
    for value, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            room = capacities.first_from(value)
            if room is None:
                room, chosen = capacity, bins
                bins += 1
            else:
                same_room = bins_with[room]
                chosen = same_room.pop()
                if not same_room:
                    capacities.discard(room)
            # What is left of the tightest bin is tighter still, so the next items of this length go there too.
            placed = min(count, room // value)
            bin_of_run.append(chosen)
            items_in_run.append(placed)
            count -= placed
            if left := room - placed * value:
                bins_with.setdefault(left, []).append(chosen)
                capacities.add(left)
    bin_of = np.empty(len(length), dtype=np.int64)
    bin_of[by_length] = np.repeat(np.array(bin_of_run, dtype=np.int64), items_in_run)
    begins = np.zeros(bins + 1, dtype=np.int64)
    np.cumsum(np.bincount(bin_of, minlength=bins), out=begins[1:])
    return Packing(np.argsort(bin_of, kind="stable"), begins)


def cut(lengths: npt.ArrayLike, capacity: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Documents of these lengths as pieces of at most `capacity`: the document and the first token of each piece.

    Both are int64 [pieces], in the order of the documents. A document longer than `capacity` becomes full pieces and a
    rest, an empty one becomes none.
    """
    pieces = -(-np.asarray(lengths, dtype=np.int64) // capacity)
    document = np.repeat(np.arange(len(pieces)), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    return document, (np.arange(len(document)) - first) * capacity


class _IntegerSet:
    """A set of integers in [0, size) that finds the next member in O(log size).

    Words of 64 bits; each level above has one bit for each word below that is not 0.
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
        """The smallest member >= `value`."""
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
