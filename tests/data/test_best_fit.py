"""Best-fit packing: every item exactly once, in the bins of textbook best-fit-decreasing."""

import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moba_train.data.packers import best_fit, split_documents


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook algorithm: each item, longest first, goes into the fullest bin that has room."""
    rooms: list[tuple[int, int]] = []
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        at = bisect.bisect_left(rooms, (lengths[item], -1))
        room, chosen = rooms.pop(at) if at < len(rooms) else (capacity, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        if room > lengths[item]:
            bisect.insort(rooms, (room - lengths[item], chosen))
    return bins


@given(data=st.data(), capacity=st.sampled_from([1, 2, 7, 63, 64, 65, 4096, 300_000]))
def test_every_item_once_and_as_tight_as_the_textbook(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    packing = best_fit(lengths, capacity)
    bins = [packing.items(index).tolist() for index in range(packing.bins)]
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(items == sorted(items) and 0 < sum(lengths[item] for item in items) <= capacity for items in bins)
    expected = plain_best_fit(lengths, capacity)
    room = sorted(sum(lengths[item] for item in items) for items in bins)
    assert room == sorted(sum(lengths[item] for item in items) for items in expected)


@pytest.mark.parametrize("capacity", [2, 64, 65, 4096, 4097])
def test_a_single_token_leaves_the_largest_room(capacity: int) -> None:
    """Rooms are kept in words of 64 bits, which must reach that far."""
    assert best_fit([1], capacity).bins == 1


def test_items_that_fit_no_bin_are_refused() -> None:
    for bad in ([3, 9], [0, 3]):
        with pytest.raises(ValueError, match=r"a bin of 8 takes 1\.\.8"):
            best_fit(bad, 8)
    assert best_fit([], 8).bins == 0


def test_long_documents_are_split_into_full_parts_and_a_rest() -> None:
    document, start = split_documents([3, 0, 20, 8], 8)
    assert document.tolist() == [0, 2, 2, 2, 3]
    assert start.tolist() == [0, 0, 8, 16, 0]


def test_padding_is_small_on_documents_of_many_lengths() -> None:
    """Log-normal lengths as in web text; concatenation would split a quarter of these documents."""
    lengths = np.random.default_rng(0).lognormal(6.5, 1.3, 20_000).astype(np.int64) + 1
    document, start = split_documents(lengths, 8192)
    parts = np.minimum(lengths[document] - start, 8192)
    packing = best_fit(parts, 8192)
    assert 1 - parts.sum() / (8192 * packing.bins) < 0.001
