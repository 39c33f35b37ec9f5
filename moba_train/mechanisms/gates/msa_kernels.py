"""The index scores of `msa`, and attention's probabilities, in Triton; the same functions as in msa_reference.py.

A pair is a query and a block that it may see, or has selected; pairs are listed by group of heads and block. A program
takes M pairs of one block and group of heads, and its keys; of the scores of all tokens only a block's best one, the
token that has it, and the sum of the probabilities leave the chip. The gradient of a best score reaches one key. That
of the keys is made for each block at once, as the product of a matrix with one number for each pair and the queries: no
atomics, so equal calls give equal bits.

At 32K tokens and 8 groups of 4 heads, all blocks of 128: 33 million pairs, of which each has 128 * 64 * 10 products and
512 exponentials: 2.7 TFLOP, and 5 ms at the 16 exponentials a cycle of an H200's multiprocessors.

Shape suffixes: n queries of the layout, t a chunk of them, N blocks, b blocks of a chunk, K groups of heads, C selected
blocks, j these and the own one, y a token's index keys side by side: w for all groups, or K * w. Sizes in kernels: K
groups with G query heads each, D head width, W index width, C blocks that a query's results have room for; a tile has M
pairs and N keys; OWN: each group has an index key of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_edges
from moba_train.attention.kernels.common.lists import BlockLists, invert
from moba_train.attention.kernels.common.softmax import LOG2_E
from moba_train.attention.kernels.common.tiles import RowTiles, TileShape, cut_lists, tile_of_program
from moba_train.attention.layout import Layout
from moba_train.mechanisms.gates.grid import Attended, block_grid, causal_chunks

_COPIES = 4
"""Tensors of scores that exist at once while the gate learns, for `causal_chunks`; one while it selects."""
_KEPT_PAIRS = 2**27
"""Pairs of a layout up to which their lists are kept for its other layers: 8 MiB of tiles, some 50 where few queries
see many blocks."""
_TILE_PAIRS = 64
"""Pairs of a tile."""


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
    slots: Tensor | None
    """int32: query * C + offset, of list 0, list 1, ...; None: a list is a range of queries, the offset the block's."""
    begin: Tensor
    end: Tensor
    """int [K * blocks]: the part of `slots`, or the range of queries, of list `group * blocks + block`."""
    most: int
    """An upper bound of the number of pairs."""
    groups: int

    def empty(self, fill: float, dtype: torch.dtype) -> Tensor:
        """[K, t, C] of one number."""
        shape = self.groups, len(self.tokens_t), self.width
        return torch.full(shape, fill, dtype=dtype, device=self.tokens_t.device)

    @cached_property
    def tiles(self) -> RowTiles:
        """The lists cut into tiles."""
        # By a bound: a list has at most one tile that is not full; the number of tiles itself only the device knows.
        return cut_lists(self.begin, self.end, self.most // _TILE_PAIRS + len(self.begin), _TILE_PAIRS)

    @property
    def listing(self) -> tuple[Tensor, Tensor, Tensor]:
        """token_of, edges and slots of the kernels; `slots` is not looked at where there are none."""
        return self.tokens_t, self.edges_b, self.tokens_t if self.slots is None else self.slots

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """blocks, queries, width and groups of the kernels."""
        return self.blocks.stop - self.blocks.start, len(self.tokens_t), self.width, self.groups


def history_pairs(layout: Layout, block_size: int, groups: int, copies: int, every: int = 1) -> Iterable[Pairs]:
    """Every N-th query with every block up to its own, as many queries at a time as `copies` of their scores allow.

    To make them takes some twenty launches, and they depend on the layout alone: a few are kept with it.
    """
    made = _history_pairs(layout, block_size, groups, copies, every)
    queries, blocks = len(block_grid(layout, block_size, every).own_on_host), len(block_edges(layout, block_size))
    if groups * queries * blocks > _KEPT_PAIRS:
        return made
    return layout.cached(("history pairs", block_size, groups, copies, every), lambda: tuple(made))


def _history_pairs(layout: Layout, block_size: int, groups: int, copies: int, every: int) -> Iterator[Pairs]:
    grid = block_grid(layout, block_size, every)
    edges_N = block_edges(layout, block_size)
    for queries, blocks in causal_chunks(grid.own_on_host, grid.first_on_host, groups * copies, edges_N.device):
        edges_b = edges_N[blocks.start : blocks.stop + 1].clone()  # aligned, or the kernels would be compiled again
        tokens_t = grid.tokens_n[queries]
        # Tokens ascend, and with them documents: the queries that see a block are neighbours.
        begin_b = torch.searchsorted(tokens_t, edges_b[:-1].long(), out_int32=True)
        ids_b = torch.arange(blocks.start, blocks.stop, device=edges_N.device)
        end_b = torch.searchsorted(grid.first_n[queries], ids_b, right=True, out_int32=True).maximum(begin_b)
        lists = begin_b.repeat(groups), end_b.repeat(groups)
        seen = int((grid.own_on_host[queries] - grid.first_on_host[queries] + 1).sum())
        yield Pairs(queries, blocks, edges_b, tokens_t.int(), len(ids_b), None, *lists, groups * seen, groups)


def selected_pairs(selected_KnC: Tensor, layout: Layout, block_size: int, every: int = 1) -> Pairs:
    """Every N-th query with the selected blocks and its own."""
    grid = block_grid(layout, block_size, every)
    edges = block_edges(layout, block_size)
    groups, queries, _ = selected_KnC.shape
    selected_Knj = torch.cat([selected_KnC, grid.own_n.int()[:, None].expand(groups, -1, 1)], 2)
    blocks = len(edges) - 1
    lists = BlockLists.from_tensors(*invert(selected_Knj, groups, blocks), selected_Knj, groups, blocks)
    # A list ends where the next begins: `invert` cuts it into chunks of queries, which the kernels here don't need.
    begin, end = lists.starts[: -1 : lists.chunks], lists.starts[lists.chunks :: lists.chunks]
    return Pairs(
        slice(0, queries),
        slice(0, blocks),
        edges,
        grid.tokens_n.int(),
        selected_Knj.shape[2],
        lists.slots,
        begin.contiguous(),
        end.contiguous(),
        selected_Knj.numel(),
        groups,
    )


KEY_PARTS = 8
"""Summands of the index keys' gradient: programs for a block that work at the same time."""

KEY_GRADIENTS = TileShape(rows=64, keys=64, warps=4, stages=3)
QUERY_GRADIENT_ROWS = 32
REGISTERS = 128
"""Most registers of a thread: two programs share a multiprocessor, and one multiplies while the other takes
exponentials."""


def tile_shape(block_size: int) -> TileShape:
    """Pairs and keys of a tile: a block, or 128 keys of a longer one."""
    keys = min(128, max(16, triton.next_power_of_2(block_size)))
    return TileShape(rows=_TILE_PAIRS, keys=keys, warps=8, stages=2)


@dataclass(frozen=True)
class Scored:
    """Blocks of some queries of all groups, with what the divergence compares: as in msa_reference.py."""

    queries: slice
    logits_gtb: Tensor
    best_gtb: Tensor
    """int32"""
    mass_gtb: Tensor
    pairs: Pairs
    block_size: int

    def add_gradients(
        self, dlogits_gtb: Tensor, q_index_nKw: Tensor, k_index_Ty: Tensor, dq_nKw: Tensor, dk_STy: Tensor
    ) -> None:
        """Set these queries' `dq_nKw`, and add to `dk_STy`: the gradients of scores that are not scaled."""
        pairs, shape = self.pairs, KEY_GRADIENTS
        blocks, queries, width, groups = pairs.counts
        dlogits_gtb = dlogits_gtb.contiguous()
        own = own_keys(q_index_nKw, k_index_Ty)
        _query_gradients[(triton.cdiv(queries, QUERY_GRADIENT_ROWS), groups)](
            dlogits_gtb,
            self.best_gtb,
            k_index_Ty.contiguous(),
            dq_nKw[self.queries],
            queries,
            width,
            groups,
            OWN=own,
            W=q_index_nKw.shape[2],
            M=QUERY_GRADIENT_ROWS,
        )
        parts = groups if own else len(dk_STy)
        _key_gradients[(blocks, triton.cdiv(self.block_size, shape.keys), parts)](
            dlogits_gtb,
            self.best_gtb,
            q_index_nKw[self.queries].contiguous(),
            dk_STy,
            *pairs.listing,
            pairs.begin,
            pairs.end,
            *pairs.counts,
            dk_STy.shape[1],
            LISTED=pairs.slots is not None,
            OWN=own,
            W=q_index_nKw.shape[2],
            M=shape.rows,
            N=shape.keys,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )


def own_keys(q_index_nKw: Tensor, k_index_Ty: Tensor) -> bool:
    """True if each of several groups has an index key of its own."""
    return k_index_Ty.shape[1] > q_index_nKw.shape[2]


def block_scores(
    q_index_nKw: Tensor, k_index_Ty: Tensor, layout: Layout, block_size: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, blocks, the scores of their best tokens, float32 [K, t, b]) a chunk of queries at a time; -inf for
    blocks that a query does not see."""
    for pairs in history_pairs(layout, block_size, q_index_nKw.shape[1], 1):
        scores_Ktb = pairs.empty(-torch.inf, torch.float32)
        q_index_tKw = q_index_nKw[pairs.queries]
        # Without attention, the kernel does not look at its tensors.
        _launch(q_index_tKw, k_index_Ty, q_index_tKw, k_index_Ty, scores_Ktb, [scores_Ktb] * 3, pairs, block_size, None)
        yield pairs.queries, pairs.blocks, scores_Ktb


def scored(q_index_nKw: Tensor, k_index_Ty: Tensor, attended: Attended) -> Iterator[Scored]:
    """Every query of all groups: with the selected blocks and the own one, or with all, some queries at a time."""
    q_nHd, k_TKd, lse_Hn, selected_KnC, layout, block_size, scale, every = attended
    if not len(q_nHd):
        return
    if selected_KnC is None:
        parts = history_pairs(layout, block_size, k_TKd.shape[1], _COPIES, every)
    else:
        parts = (selected_pairs(selected_KnC, layout, block_size, every),)
    for pairs in parts:
        logits_gtb, mass_gtb = pairs.empty(-torch.inf, torch.float32), pairs.empty(0.0, torch.float32)
        best_gtb = pairs.empty(0, torch.int32)
        results = [logits_gtb, best_gtb, mass_gtb]
        q_tHd, lse_Ht = q_nHd[pairs.queries], lse_Hn[:, pairs.queries].float()
        _launch(q_index_nKw[pairs.queries], k_index_Ty, q_tHd, k_TKd, lse_Ht, results, pairs, block_size, scale)
        yield Scored(pairs.queries, logits_gtb, best_gtb, mass_gtb, pairs, block_size)


def _launch(
    q_index_tKw: Tensor,
    k_index_Ty: Tensor,
    q_tHd: Tensor,
    k_TKd: Tensor,
    lse_Ht: Tensor,
    results: list[Tensor],
    pairs: Pairs,
    block_size: int,
    scale: float | None,
) -> None:
    """Fill scores, best tokens and probabilities [K, t, C] of the pairs; without a scale, scores alone."""
    shape, tiles = tile_shape(block_size), pairs.tiles
    _scores[(tiles.bound,)](
        *(x.contiguous() for x in (q_index_tKw, k_index_Ty, q_tHd, k_TKd, lse_Ht)),
        *results,
        *pairs.listing,
        tiles.list_of_tile,
        tiles.last_tile,
        tiles.begin,
        tiles.end,
        len(pairs.begin),
        *pairs.counts,
        q_index_tKw.shape[2] ** -0.5,
        (scale or 0.0) * LOG2_E.value,
        ATTENTION=scale is not None,
        LISTED=pairs.slots is not None,
        OWN=own_keys(q_index_tKw, k_index_Ty),
        G=q_tHd.shape[1] // pairs.groups,
        D=q_tHd.shape[2],
        W=q_index_tKw.shape[2],
        M=shape.rows,
        N=shape.keys,
        num_warps=shape.warps,
        num_stages=shape.stages,
        maxnreg=REGISTERS,
    )


@triton.jit
def _pair(slots, position, ok, block, group, queries, width, LISTED: tl.constexpr):
    """(int64 query, its offset in [K, t, C]) of the pairs at these positions of a list."""
    if LISTED:
        listed = tl.load(slots + position, mask=ok, other=0)
        query = (listed // width).to(tl.int64)
        slot = listed % width
    else:
        query = position.to(tl.int64)
        slot = block
    return query, (group * queries + query) * width + slot


@triton.jit
def _key_row(token, group, groups, OWN: tl.constexpr):
    """Rows of these tokens' index keys for a group."""
    return token * groups + group if OWN else token


# Counts that change from batch to batch; see attention/kernels/triton/__init__.py.
@triton.jit(do_not_specialize=["lists", "blocks", "queries", "width", "groups"])
def _scores(
    q_index,
    k_index,
    q,
    k,
    lse,
    logits,
    best,
    mass,
    token_of,
    edges,
    slots,
    list_of_tile,
    last_tile,
    begin,
    end,
    lists,
    blocks,
    queries,
    width,
    groups,
    index_scale,
    scale_log2,
    ATTENTION: tl.constexpr,
    LISTED: tl.constexpr,
    OWN: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One tile of a list: best index scores; under ATTENTION their tokens, and the probabilities of the group's heads.

    All are float32 or int32 [K, t, C]; without ATTENTION, q, k, lse, best and mass are not looked at.
    """
    which, first, last = tile_of_program(tl.program_id(0), list_of_tile, last_tile, begin, end, lists, M)
    if which >= lists:
        return
    group, block = which // blocks, which % blocks
    position = first + tl.arange(0, M)
    ok_M = position < last
    query_M, offset_M = _pair(slots, position, ok_M, block, group, queries, width, LISTED)
    start, stop = tl.load(edges + block), tl.load(edges + block + 1)
    last_key_M = tl.minimum(tl.load(token_of + query_M, mask=ok_M, other=-1), stop - 1)
    # In a query's own block the keys behind the tile's last query are not read at all.
    stop = tl.minimum(stop, tl.max(last_key_M, 0) + 1)
    column_W = tl.arange(0, W)
    q_at = (query_M * groups + group) * W
    q_index_MW = tl.load(q_index + q_at[:, None] + column_W[None, :], mask=ok_M[:, None], other=0.0)
    top_M = tl.full([M], float("-inf"), tl.float32)
    best_M = tl.zeros([M], tl.int32)
    mass_M = tl.zeros([M], tl.float32)
    for base in range(start, stop, N):
        key = base + tl.arange(0, N)
        visible_MN = key[None, :] <= last_key_M[:, None]
        k_at = _key_row(key.to(tl.int64), group, groups, OWN)[:, None] * W + column_W[None, :]
        k_index_NW = tl.load(k_index + k_at, mask=(key < stop)[:, None], other=0.0)
        s_MN = tl.where(visible_MN, tl.dot(q_index_MW, k_index_NW.T), float("-inf"))
        if ATTENTION:
            here_M, at_M = tl.max(s_MN, 1, return_indices=True)
            # Of equal scores the earliest token stays, as torch's max has it: one token gets the whole gradient.
            best_M = tl.where(here_M > top_M, base + at_M, best_M)
            top_M = tl.maximum(top_M, here_M)
            column_D = tl.arange(0, D)
            k_at = (key.to(tl.int64) * groups + group)[:, None] * D + column_D[None, :]
            k_ND = tl.load(k + k_at, mask=(key < stop)[:, None], other=0.0)
            for g in range(G):
                head = group * G + g
                q_at = (query_M * (groups * G) + head) * D
                q_MD = tl.load(q + q_at[:, None] + column_D[None, :], mask=ok_M[:, None], other=0.0)
                lse_M = tl.load(lse + head * queries + query_M, mask=ok_M, other=0.0)
                p_MN = tl.math.exp2(tl.dot(q_MD, k_ND.T) * scale_log2 - lse_M[:, None] * LOG2_E)
                mass_M += tl.sum(tl.where(visible_MN, p_MN, 0.0), 1)  # what is not visible may have overflowed
        else:
            top_M = tl.maximum(top_M, tl.max(s_MN, 1))
    tl.store(logits + offset_M, top_M * index_scale, mask=ok_M)
    if ATTENTION:
        tl.store(best + offset_M, best_M, mask=ok_M)
        tl.store(mass + offset_M, mass_M, mask=ok_M)


@triton.jit(do_not_specialize=["queries", "width", "groups"])
def _query_gradients(
    dlogits, best, k_index, dq, queries, width, groups, OWN: tl.constexpr, W: tl.constexpr, M: tl.constexpr
):
    """dq [t, K, W] of M queries of a group: the sum of their blocks' best keys."""
    group = tl.program_id(1)
    query_M = tl.program_id(0) * M + tl.arange(0, M)
    ok_M = query_M < queries
    column_W = tl.arange(0, W)
    offset_M = (group.to(tl.int64) * queries + query_M) * width
    dq_MW = tl.zeros([M, W], tl.float32)
    for j in tl.range(0, width, num_stages=4):
        dlogit_M = tl.load(dlogits + offset_M + j, mask=ok_M, other=0.0)
        best_M = tl.load(best + offset_M + j, mask=ok_M, other=0).to(tl.int64)
        k_at = _key_row(best_M, group, groups, OWN)[:, None] * W + column_W[None, :]
        k_MW = tl.load(k_index + k_at, mask=ok_M[:, None], other=0.0)
        dq_MW += dlogit_M[:, None] * k_MW.to(tl.float32)
    dq_at = (query_M.to(tl.int64) * groups + group)[:, None] * W + column_W[None, :]
    tl.store(dq + dq_at, dq_MW.to(dq.dtype.element_ty), mask=ok_M[:, None])


@triton.jit(do_not_specialize=["blocks", "queries", "width", "groups", "keys"])
def _key_gradients(
    dlogits,
    best,
    q_index,
    sum_dk,
    token_of,
    edges,
    slots,
    begin,
    end,
    blocks,
    queries,
    width,
    groups,
    keys,
    LISTED: tl.constexpr,
    OWN: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """sum_dk [S, T, W] of N keys of a block, from its lists of every S-th group, or under OWN [T, K, W], each from one
    group's: added to what is there."""
    block, part = tl.program_id(0), tl.program_id(2)
    base = tl.load(edges + block) + tl.program_id(1) * N
    stop = tl.load(edges + block + 1)
    if base >= stop:
        return
    key = base + tl.arange(0, N)
    column_W = tl.arange(0, W)
    dk_NW = tl.zeros([N, W], tl.float32)
    # Groups share the index keys: their sums go to KEY_PARTS tensors, added in a fixed order, where atomics would add
    # them in any.
    for group in range(part, groups, tl.num_programs(2)):
        last = tl.load(end + group * blocks + block)
        for first in range(tl.load(begin + group * blocks + block), last, M):
            position = first + tl.arange(0, M)
            ok_M = position < last
            query_M, offset_M = _pair(slots, position, ok_M, block, group, queries, width, LISTED)
            dlogit_M = tl.load(dlogits + offset_M, mask=ok_M, other=0.0)
            best_M = tl.load(best + offset_M, mask=ok_M, other=-1)
            q_at = (query_M * groups + group)[:, None] * W + column_W[None, :]
            q_MW = tl.load(q_index + q_at, mask=ok_M[:, None], other=0.0).to(tl.float32)
            dlogit_NM = tl.where(key[:, None] == best_M[None, :], dlogit_M[None, :], 0.0)
            dk_NW = tl.dot(dlogit_NM, q_MW, dk_NW)
    row_N = key.to(tl.int64) * groups + part if OWN else part.to(tl.int64) * keys + key
    at_NW = row_N[:, None] * W + column_W[None, :]
    mask_N1 = (key < stop)[:, None]
    dk_NW += tl.load(sum_dk + at_NW, mask=mask_N1, other=0.0)
    tl.debug_barrier()  # all is read before a thread writes
    tl.store(sum_dk + at_NW, dk_NW, mask=mask_N1)
