"""Pairs of a query and a block for the kernels of `msa`, listed by group of heads and block.

Shape suffixes: n queries of the layout, t a chunk of them, N blocks, b blocks of a chunk, K groups of heads, C selected
blocks, j these and the own one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.blocks.geometry import block_edges
from moba_train.attention.blocks.triton.lists import BlockLists, invert
from moba_train.attention.gates.grid import block_grid, causal_chunks
from moba_train.attention.protocol import Layout

_NUMBERS_PER_BLOCK = 4
"""Numbers of a block and group for `causal_chunks`, so that 4 million scores of blocks exist at once; several copies
are needed."""


@dataclass(frozen=True)
class Pairs:
    """Queries and the blocks that count for each, listed by group and block."""

    queries: slice
    blocks: slice
    """The listed blocks."""
    edges_b: Tensor
    """int32 [blocks + 1]: first token of each of these blocks, and one past the last."""
    tokens_t: Tensor
    """int32: index of each query in the packed sequence."""
    width: int
    """Blocks that a query's results have room for, C."""
    entries: Tensor | None
    """int32: query * C + place, of list 0, list 1, ...; None: a list is a range of queries, the place the block's."""
    begin: Tensor
    end: Tensor
    """int [K * blocks]: the part of `entries`, or the range of queries, of list `group * blocks + block`."""
    most: int
    """An upper bound of the number of pairs."""
    groups: int

    def empty(self, fill: float, dtype: torch.dtype) -> Tensor:
        """[K, t, C] of one number."""
        shape = self.groups, len(self.tokens_t), self.width
        return torch.full(shape, fill, dtype=dtype, device=self.tokens_t.device)

    @property
    def listing(self) -> tuple[Tensor, Tensor, Tensor]:
        """token_of, edges and entries of the kernels; `entries` is not looked at where there are none."""
        return self.tokens_t, self.edges_b, self.tokens_t if self.entries is None else self.entries

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """blocks, queries, width and groups of the kernels."""
        return self.blocks.stop - self.blocks.start, len(self.tokens_t), self.width, self.groups


def history_pairs(layout: Layout, block_size: int, groups: int) -> Iterator[Pairs]:
    """Every query with every block up to its own, some queries at a time."""
    grid = block_grid(layout, block_size)
    edges_N = block_edges(layout, block_size)
    numbers = groups * _NUMBERS_PER_BLOCK
    for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, numbers, edges_N.device):
        edges_b = edges_N[blocks.start : blocks.stop + 1].clone()  # aligned, or the kernels would be compiled anew
        tokens_t = grid.tokens_n[queries]
        # Tokens ascend, and with them documents: the queries that see a block are neighbours.
        begin_b = torch.searchsorted(tokens_t, edges_b[:-1].long(), out_int32=True)
        ids_b = torch.arange(blocks.start, blocks.stop, device=edges_N.device)
        end_b = torch.searchsorted(grid.first_n[queries], ids_b, right=True, out_int32=True).maximum(begin_b)
        lists = begin_b.repeat(groups), end_b.repeat(groups)
        seen = int((grid.own_on_host[queries] - grid.first_on_host[queries] + 1).sum())
        yield Pairs(queries, blocks, edges_b, tokens_t.int(), len(ids_b), None, *lists, groups * seen, groups)


def selected_pairs(selected_KnC: Tensor, layout: Layout, block_size: int) -> Pairs:
    """Every query with the selected blocks and its own."""
    grid = block_grid(layout, block_size)
    edges = block_edges(layout, block_size)
    groups, queries, _ = selected_KnC.shape
    selected_Knj = torch.cat([selected_KnC, grid.own_n.int()[:, None].expand(groups, -1, 1)], 2)
    blocks = len(edges) - 1
    lists = BlockLists.from_tensors(*invert(selected_Knj, groups, blocks), selected_Knj, groups, blocks)
    begin, end = lists.starts[: -1 : lists.chunks], lists.starts[lists.chunks :: lists.chunks]
    return Pairs(
        slice(0, queries),
        slice(0, blocks),
        edges,
        grid.tokens_n.int(),
        selected_Knj.shape[2],
        lists.entries,
        begin.contiguous(),
        end.contiguous(),
        selected_Knj.numel(),
        groups,
    )
