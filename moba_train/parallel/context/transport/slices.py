"""Key/value heads in slices, so that one slice is attended to while others travel.

Gate, choice and attention of a key/value head and of the query heads that share it touch no other head.
"""

from typing import NamedTuple

from moba_train.attention.protocol import Plan

GATHER_SLICES = 4
"""Of all-gather: all but the first transfer can hide behind attention, two slices are in memory; more are smaller."""
SWAP_SLICES = 2
"""Of Ulysses: what the first slice brings and what the last one takes back cannot hide."""


class Heads(NamedTuple):
    """A slice of the key/value heads, and the query heads that share them."""

    kv: slice
    of: slice


def head_slices(heads: int, kv_heads: int, slices: int) -> list[Heads]:
    """At most so many slices of `heads` query heads and `kv_heads` key/value heads, the last perhaps narrower."""
    group, width = heads // kv_heads, -(-kv_heads // slices)
    parts = [slice(first, min(first + width, kv_heads)) for first in range(0, kv_heads, width)]
    return [Heads(kv, slice(kv.start * group, kv.stop * group)) for kv in parts]


def plan_slices(plan: Plan, slices: int) -> list[Plan]:
    """The plans of so many slices from one that holds them end to end, all of them equally long."""
    length, rest = divmod(len(plan), slices)
    assert not rest, f"{len(plan)} tensors for {slices} slices"
    return [plan[i * length : (i + 1) * length] for i in range(slices)]
