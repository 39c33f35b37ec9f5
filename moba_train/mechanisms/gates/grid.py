"""Blocks as rows of equal length, so that sums and maxima over a block are those over a dimension; and chunks of
queries, each with the blocks that it may see, so that scores never exist for all queries at once.

Shape suffixes: n queries of the layout, N blocks of the packed sequence, B tokens of a block, l blocks that hold
queries of the layout, t queries of a chunk, T tokens of the sequence, H query heads, K key/value heads, d head width,
C selected blocks. With `every`, n are one of each N queries of a document, l one of each N blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_edges, block_ids, first_blocks
from moba_train.attention.layout import Layout, kept


class Attended(NamedTuple):
    """Attention whose probability in each block is asked for: that of rotated q and k with this log-sum-exp."""

    q_nHd: Tensor
    k_TKd: Tensor
    lse_Hn: Tensor
    selected_KnC: Tensor | None
    """int32: the history blocks that it went to; None: all."""
    layout: Layout
    block_size: int
    scale: float
    every: int = 1
    """The queries are one of each N of a document in the layout."""

    @property
    def grid(self) -> "BlockGrid":
        """The blocks, and where the queries are among them."""
        return block_grid(self.layout, self.block_size, self.every)


EDGES = 4
"""Blocks that a shard may share with other ranks, at most: the first and the last of its two token ranges."""

_SCORES_PER_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""A bound for the temporaries of a chunk: 64 MiB each in float32 on a GPU."""


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of a packed sequence, and where the layout's queries are among them."""

    tokens_NB: Tensor
    """int64: index of each block's tokens in the packed sequence; also a valid index where there is no token."""
    present_NB: Tensor
    """bool: True where there is a token. Short and unused blocks have places without one."""
    rows_n: Tensor
    """int64: row of each query among the layout's."""
    tokens_n: Tensor
    """int64: index of each query in the packed sequence."""
    own_n: Tensor
    """int64: each query's own block."""
    first_n: Tensor
    """int64: the first block of its document."""
    own_on_host: Tensor
    """`own_n` in CPU memory."""
    first_on_host: Tensor
    """`first_n` in CPU memory."""

    def visible(self, queries: slice, blocks: slice) -> Tensor:
        """Mask, bool [t, blocks, B]: True where a query may see a token of these blocks."""
        return self.visible_from(self.tokens_n[queries], self.first_n[queries], blocks)

    def visible_from(self, tokens_t: Tensor, first_t: Tensor, blocks: slice) -> Tensor:
        """`visible` for queries at any tokens, in documents that begin with the blocks `first_t`."""
        ids_N = torch.arange(blocks.start, blocks.stop, device=tokens_t.device)
        past_tNB = self.tokens_NB[blocks] <= tokens_t[:, None, None]
        return past_tNB & self.present_NB[blocks] & (ids_N >= first_t[:, None]).unsqueeze(-1)


def block_grid(layout: Layout, block_size: int, every: int = 1) -> BlockGrid:
    """The grid of a layout of any queries, of which it has one of each N of a document, and all keys; kept with it."""
    return _block_grid(layout, block_size, every)  # a default is no part of what `kept` knows a result by


@kept
def _block_grid(layout: Layout, block_size: int, every: int) -> BlockGrid:
    host = _on_host(layout)
    device = layout.cu_seqlens.device
    edges = block_edges(host, block_size).long()
    tokens_NB = edges[:-1, None] + torch.arange(block_size)
    present_NB = tokens_NB < edges[1:, None]
    # Made on the CPU and copied: `causal_chunks` needs these numbers in Python, and to read them back it would wait for
    # the GPU.
    rows_n = _every(host.positions(host.q_tokens, host.q_documents), every).nonzero().flatten()
    tokens_n, documents_n = host.q_tokens[rows_n], host.q_documents[rows_n]
    own_n = block_ids(tokens_n, documents_n, host, block_size)
    first_n = first_blocks(host.cu_seqlens, block_size)[documents_n]
    return BlockGrid(
        tokens_NB.clamp(max=max(layout.total - 1, 0)).to(device),
        present_NB.to(device),
        rows_n.to(device),
        tokens_n.to(device),
        own_n.to(device),
        first_n.to(device),
        own_n,
        first_n,
    )


def _every(places: Tensor, every: int) -> Tensor:
    """Mask of one place of each N in a document: first the middle one, or short documents would have too many, then one
    further each time. At a fixed one, queries of `qsa` would all lie at one place of their blocks of 4 tokens."""
    return places % every == (places // every + every // 2) % every


@dataclass(frozen=True)
class QueryRows:
    """The blocks that hold queries of the layout, one row each."""

    bound: int
    """An upper bound of the number of rows, l, that follows from shapes alone."""
    count: int
    """The number of rows in use."""
    ids_l: Tensor
    """int64 [bound]: each row's block; -1 behind the last."""
    first_l: Tensor
    """int64 [bound]: the first block of its document."""
    queries_lB: Tensor
    """int64: the layout's query at each place; also a valid number where there is none."""
    present_lB: Tensor
    """bool: True where there is a query."""
    row_n: Tensor
    """int64: row of each query; the last, which is not in use, where there is none."""
    edges: tuple[int, ...]
    """Rows whose block may have queries on other ranks, at most EDGES."""
    ids_on_host: Tensor
    """The rows in use, in CPU memory."""
    first_on_host: Tensor
    """The first blocks of their documents, in CPU memory."""


def query_rows_bound(queries: int, layout: Layout, block_size: int, every: int = 1) -> int:
    """`QueryRows.bound` for a number of queries in at most two token ranges; the last row is not in use."""
    return queries // (block_size * every) + layout.cu_seqlens.numel() + 3


def query_rows(layout: Layout, block_size: int, every: int = 1) -> QueryRows:
    """The rows of a layout, of one of each N blocks of a document; kept with it."""
    return _query_rows(layout, block_size, every)


@kept
def _query_rows(layout: Layout, block_size: int, every: int) -> QueryRows:
    host = _on_host(layout)
    device = layout.cu_seqlens.device
    grid = block_grid(layout, block_size)
    queries = len(grid.own_on_host)
    bound = query_rows_bound(queries, layout, block_size, every)
    taken_t = _every(grid.own_on_host - grid.first_on_host, every).nonzero().flatten()
    own_t = grid.own_on_host[taken_t]
    row_t = torch.zeros_like(own_t)
    row_t[1:] = (own_t[1:] != own_t[:-1]).cumsum(0)
    count = int(row_t[-1]) + 1 if len(row_t) else 0
    row_n = torch.full((queries,), bound - 1)
    row_n[taken_t] = row_t
    ids_l = torch.full((bound,), -1)
    ids_l[row_t] = own_t
    first_l = torch.zeros(bound, dtype=torch.int64)
    first_l[row_t] = grid.first_on_host[taken_t]
    queries_lB = torch.full((bound, block_size), -1)
    queries_lB[row_t, host.q_tokens[taken_t] - block_edges(host, block_size).long()[own_t]] = taken_t
    ends = [0, *accumulate(stop - start for start, stop in layout.query_ranges)]
    edges = {int(row_n[at]) for start, stop in pairwise(ends) for at in (start, stop - 1)}
    return QueryRows(
        bound,
        count,
        ids_l.to(device),
        first_l.to(device),
        queries_lB.clamp(min=0).to(device),
        (queries_lB >= 0).to(device),
        row_n.to(device),
        tuple(sorted(edges - {bound - 1})),
        ids_l[:count],
        first_l[:count],
    )


def _on_host(layout: Layout) -> Layout:
    """The layout with its tensors in CPU memory. Waits for the device where `cu_seqlens_cpu` is missing."""
    edges = torch.tensor(layout.edges, dtype=torch.int32)
    return Layout(edges, layout.max_seqlen, layout.total, layout.q_ranges, layout.k_ranges)


def causal_chunks(
    own: Tensor, first: Tensor, scores_per_block: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """(rows, blocks) such that all rows together see no other blocks, with a bounded number of scores.

    `own`, `first`: of each row in ascending order, in CPU memory: its own block and the first of its document.
    `scores_per_block`: of one row and one block.
    """
    budget = _SCORES_PER_CHUNK.get(device.type, 2**18)
    start = 0
    while start < len(own):
        low = int(first[start])
        stop = len(own)
        while stop - start > 1 and (stop - start) * (int(own[stop - 1]) + 1 - low) * scores_per_block > budget:
            # Halved, not computed: every row counts as many blocks as the last one sees, so fewer rows have fewer
            # blocks as well.
            stop = start + (stop - start) // 2
        yield slice(start, stop), slice(low, int(own[stop - 1]) + 1)
        start = stop


def row_chunks(rows: int, numbers_per_row: int, device: torch.device) -> Iterator[slice]:
    """Slices over rows, each with a bounded number of numbers, but at least one row."""
    step = max(1, _SCORES_PER_CHUNK.get(device.type, 2**18) // max(1, numbers_per_row))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
