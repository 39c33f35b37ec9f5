"""The token ranges of a layer's rows and of all ranks, and what ranks tell each other about theirs.

Shape suffixes: n rows, r ranges of this layer, N ranges of all ranks (padded, so that each rank has equally many).
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from moba_train.attention.operators import layout_arguments, with_layout
from moba_train.attention.protocol import Layout, TokenRange, TokenRanges
from moba_train.attention.shard import Shard

T = TypeVar("T")

_NO_TOKENS = TokenRange(0, 0)


@torch.compiler.disable
def once(layout: Layout, name: str, make: Callable[[], T]) -> T:
    """`layout.cached`, outside of compiled code.

    The forward pass would be compiled to make what the recomputation finds made, so that the two would save different
    tensors, which activation checkpointing refuses.
    """
    return layout.cached(name, make)


def query_ranges(layout: Layout) -> TokenRanges:
    """The ranges of the layout's queries; one without tokens where there are none."""
    return (TokenRange(0, layout.total),) if layout.q_ranges is None else layout.q_ranges or (_NO_TOKENS,)


def all_ranges(shard: Shard) -> tuple[TokenRange, ...]:
    """The ranges of all ranks, in rank order; ranks with fewer than others have ranges without tokens."""
    most = _most_ranges(shard)
    padded = (list(ranges) + [_NO_TOKENS] * (most - len(ranges)) for ranges in shard.ranges_by_rank)
    return tuple(token_range for ranges in padded for token_range in ranges)


def gather_ranges(x_r: Tensor, shard: Shard) -> Tensor:
    """What all ranks have for their ranges, [N, ...], in the order of `all_ranges`; differentiable."""
    missing = _most_ranges(shard) - len(x_r)
    return shard.all_ranks(torch.cat([x_r, x_r.new_zeros((missing, *x_r.shape[1:]))])).flatten(0, 1)


def _most_ranges(shard: Shard) -> int:
    return max(len(ranges) for ranges in shard.ranges_by_rank)


def segments(layout: Layout) -> Tensor:
    """int64 [n], never descending: rows with equal numbers share a document and a range of the layout's queries."""
    rows = sum(stop - start for start, stop in query_ranges(layout))
    return _segments(*layout_arguments(layout), rows)


@torch.library.custom_op("moba_train::linear_segments", mutates_args=())
@with_layout
def _segments(layout: Layout, rows: int) -> Tensor:
    """`segments`; an operator, so that torch.compile traces a layer as a whole (`once` would break it in two)."""
    ranges = query_ranges(layout)
    device = layout.cu_seqlens.device
    numbers_n = torch.cat([torch.full((stop - start,), i, device=device) for i, (start, stop) in enumerate(ranges)])
    return layout.q_documents * len(ranges) + numbers_n


@_segments.register_fake
@partial(with_layout, traced=True)
def _(layout: Layout, rows: int) -> Tensor:
    return layout.cu_seqlens.new_empty((rows,), dtype=torch.int64)


def segment_edges(layout: Layout) -> tuple[Tensor, Tensor]:
    """int64 [segments + 1], on the layout's device and on the CPU: rows where the segments begin, and the number of
    rows. No segment is empty."""
    return once(layout, "segment edges", lambda: _segment_edges(layout))


def _segment_edges(layout: Layout) -> tuple[Tensor, Tensor]:
    edges = [0]
    row = 0
    for start, stop in query_ranges(layout):
        edges += [row + edge - start for edge in layout.edges if start < edge < stop]
        row += stop - start
        edges.append(row)
    on_cpu = torch.tensor(edges).unique()
    return on_cpu.to(layout.cu_seqlens.device, non_blocking=True), on_cpu
