"""Attention to short blocks that a group of query heads selects, in Triton, for short_blocks.py.

Forward and for dq, a program has one query with the heads of its group as the rows of a tile. It walks the tokens of
the selected blocks, then those of the query's own block up to itself, N at a time: one sequence of slots, in which slot
s of a block's list is token s % B of block s // B. For dk and dv a program has the keys of one block and walks the
queries that selected it, M at a time, head by head; lists of queries come from `msa_kernels.selected_pairs`. Every sum
has one order: equal calls give equal bits.

At 32K tokens, 3 groups of 3 heads of width 64 and 2,048 keys a query: 98,304 queries of a group gather 51 GB forward
from keys that stay in the L2 cache, and 16 rows of a tile make 0.8 TFLOP of 0.15 that count.

Sizes in kernels: K groups with G query heads each, D head width, C blocks that a query's list has room for, B tokens of
a block; a tile has M rows and N keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_edges
from moba_train.attention.kernels.common.softmax import LOG2_E
from moba_train.attention.kernels.common.tiles import TileShape
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients
from moba_train.mechanisms.gates.grid import block_grid
from moba_train.mechanisms.gates.msa_kernels import selected_pairs

LEAST = 16
"""Fewest rows or keys of a matrix product."""
KEYS = 64
QUERIES = 64
WARPS = 4
STAGES = 2


def query_tile(group: int) -> TileShape:
    """Heads of a group and keys at once."""
    return TileShape(max(LEAST, triton.next_power_of_2(group)), KEYS, WARPS, STAGES)


def key_tile(block_size: int, head_dim: int) -> TileShape:
    """Queries and keys at once: a block, or 32 keys of a longer one."""
    keys = min(2 * LEAST, max(LEAST, triton.next_power_of_2(block_size)))
    # Of 32 keys of width 128, 4 warps would spill the sums.
    return TileShape(QUERIES, keys, 2 * WARPS if keys * head_dim > 2048 else WARPS, STAGES)


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    layout: Layout,
    selected_KTC: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], lse float32 [H, T]) over the own and the selected blocks; all keys are given."""
    q, k, v = (x.contiguous() for x in (q_THD, k_SKD, v_SKD))
    queries, heads, width = q.shape
    kv_heads = k.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(heads, queries, dtype=torch.float32, device=q.device)
    tile = query_tile(heads // kv_heads)
    _attend[(queries, kv_heads)](
        *(q, k, v, out, lse),
        *_lists(layout, selected_KTC, block_size),
        *(queries, kv_heads, selected_KTC.shape[2], scale * LOG2_E.value),
        **{"G": heads // kv_heads, "D": width, "B": block_size, "M": tile.rows, "N": tile.keys},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out, lse


def attend_backward(
    state: BackwardState, layout: Layout, selected_KTC: Tensor, block_size: int, scale: float
) -> Gradients:
    """(dq, dk, dv) of `attend`."""
    dout, q, k, v, out, lse = (x.contiguous() for x in state)
    queries, heads, width = q.shape
    kv_heads = k.shape[1]
    delta = (dout.float() * out.float()).sum(-1).T.contiguous()
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    sizes = {"G": heads // kv_heads, "D": width}
    tile = query_tile(heads // kv_heads)
    _query_gradients[(queries, kv_heads)](
        *(q, k, v, dout, lse, delta, dq),
        *_lists(layout, selected_KTC, block_size),
        *(queries, kv_heads, selected_KTC.shape[2], scale, scale * LOG2_E.value),
        **sizes,
        **{"B": block_size, "M": tile.rows, "N": tile.keys},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    pairs = selected_pairs(selected_KTC, layout, block_size)
    tile = key_tile(block_size, width)
    blocks = len(pairs.edges_b) - 1
    _key_gradients[(blocks, triton.cdiv(block_size, tile.keys), kv_heads)](
        *(q, k, v, dout, lse, delta, dk, dv),
        *(*pairs.listing, pairs.begin, pairs.end),
        *(blocks, queries, kv_heads, pairs.width, scale, scale * LOG2_E.value),
        **sizes,
        **{"M": tile.rows, "N": tile.keys},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return dq, dk, dv


def _lists(layout: Layout, selected_KTC: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """selected, counts, edges, own and token_of of the kernels, int32."""
    grid = block_grid(layout, block_size)
    counts = (selected_KTC >= 0).sum(-1, dtype=torch.int32)
    edges = block_edges(layout, block_size)
    return selected_KTC.contiguous(), counts, edges, grid.own_n.int(), grid.tokens_n.int()


@triton.jit
def _query(selected, counts, edges, own, token_of, query, group, queries, width, B: tl.constexpr):
    """The list of a query, its slots that are history, the first token of its own block, and all its slots."""
    row = group.to(tl.int64) * queries + query
    history = tl.load(counts + row) * B
    start = tl.load(edges + tl.load(own + query))
    return selected + row * width, history, start, history + tl.load(token_of + query) - start + 1


@triton.jit
def _tokens(ids, edges, slot_N, history, start, B: tl.constexpr):
    """int64: the token of each slot of a query's list."""
    is_history_N = slot_N < history
    id_N = tl.load(ids + slot_N // B, mask=is_history_N, other=0)
    first_N = tl.load(edges + id_N, mask=is_history_N, other=0)
    return tl.where(is_history_N, first_N + slot_N % B, start + slot_N - history).to(tl.int64)


# Counts that change from batch to batch; see attention/kernels/triton/__init__.py.
@triton.jit(do_not_specialize=["queries", "kv_heads", "width"])
def _attend(
    q, k, v, out, lse, selected, counts, edges, own, token_of, queries, kv_heads, width, scale_log2,
    G: tl.constexpr, D: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    query, group = tl.program_id(0), tl.program_id(1)
    ids, history, start, slots = _query(selected, counts, edges, own, token_of, query, group, queries, width, B)
    head_M = tl.arange(0, M)
    ok_M = head_M < G
    column_D = tl.arange(0, D)
    q_at = (query.to(tl.int64) * (kv_heads * G) + group * G + head_M)[:, None] * D + column_D[None, :]
    q_MD = tl.load(q + q_at, mask=ok_M[:, None], other=0.0)
    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    out_MD = tl.zeros([M, D], tl.float32)
    for base in range(0, slots, N):
        slot_N = base + tl.arange(0, N)
        ok_N = slot_N < slots
        token_N = _tokens(ids, edges, slot_N, history, start, B)
        at_ND = (token_N * kv_heads + group)[:, None] * D + column_D[None, :]
        k_ND = tl.load(k + at_ND, mask=ok_N[:, None], other=0.0)
        v_ND = tl.load(v + at_ND, mask=ok_N[:, None], other=0.0)
        s_MN = tl.where(ok_N[None, :], tl.dot(q_MD, k_ND.T) * scale_log2, float("-inf"))
        above_M = tl.maximum(top_M, tl.max(s_MN, 1))
        p_MN = tl.math.exp2(s_MN - above_M[:, None])
        shrink_M = tl.math.exp2(top_M - above_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        out_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, out_MD * shrink_M[:, None])
        top_M = above_M
    tl.store(out + q_at, (out_MD / sum_M[:, None]).to(out.dtype.element_ty), mask=ok_M[:, None])
    lse_at = (group * G + head_M).to(tl.int64) * queries + query
    tl.store(lse + lse_at, (top_M + tl.math.log2(sum_M)) / LOG2_E, mask=ok_M)


@triton.jit(do_not_specialize=["queries", "kv_heads", "width"])
def _query_gradients(
    q, k, v, dout, lse, delta, dq, selected, counts, edges, own, token_of, queries, kv_heads, width, scale, scale_log2,
    G: tl.constexpr, D: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    query, group = tl.program_id(0), tl.program_id(1)
    ids, history, start, slots = _query(selected, counts, edges, own, token_of, query, group, queries, width, B)
    head_M = tl.arange(0, M)
    ok_M = head_M < G
    column_D = tl.arange(0, D)
    q_at = (query.to(tl.int64) * (kv_heads * G) + group * G + head_M)[:, None] * D + column_D[None, :]
    q_MD = tl.load(q + q_at, mask=ok_M[:, None], other=0.0)
    dout_MD = tl.load(dout + q_at, mask=ok_M[:, None], other=0.0)
    at_M = (group * G + head_M).to(tl.int64) * queries + query
    lse_M = tl.load(lse + at_M, mask=ok_M, other=0.0) * LOG2_E
    delta_M = tl.load(delta + at_M, mask=ok_M, other=0.0)
    dq_MD = tl.zeros([M, D], tl.float32)
    for base in range(0, slots, N):
        slot_N = base + tl.arange(0, N)
        ok_N = slot_N < slots
        token_N = _tokens(ids, edges, slot_N, history, start, B)
        at_ND = (token_N * kv_heads + group)[:, None] * D + column_D[None, :]
        k_ND = tl.load(k + at_ND, mask=ok_N[:, None], other=0.0)
        v_ND = tl.load(v + at_ND, mask=ok_N[:, None], other=0.0)
        p_MN = tl.math.exp2(tl.dot(q_MD, k_ND.T) * scale_log2 - lse_M[:, None])
        ds_MN = tl.where(ok_N[None, :], p_MN * (tl.dot(dout_MD, v_ND.T) - delta_M[:, None]), 0.0)
        dq_MD = tl.dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD)
    tl.store(dq + q_at, (dq_MD * scale).to(dq.dtype.element_ty), mask=ok_M[:, None])


@triton.jit(do_not_specialize=["blocks", "queries", "kv_heads", "width"])
def _key_gradients(
    q, k, v, dout, lse, delta, dk, dv, token_of, edges, slots, begin, end,
    blocks, queries, kv_heads, width, scale, scale_log2,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, group = tl.program_id(0), tl.program_id(2)
    base, stop = tl.load(edges + block) + tl.program_id(1) * N, tl.load(edges + block + 1)
    if base >= stop:
        return
    key_N = base + tl.arange(0, N)
    ok_N = key_N < stop
    column_D = tl.arange(0, D)
    at_ND = (key_N.to(tl.int64) * kv_heads + group)[:, None] * D + column_D[None, :]
    k_ND = tl.load(k + at_ND, mask=ok_N[:, None], other=0.0)
    v_ND = tl.load(v + at_ND, mask=ok_N[:, None], other=0.0)
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    last = tl.load(end + group * blocks + block)
    for first in range(tl.load(begin + group * blocks + block), last, M):
        position_M = first + tl.arange(0, M)
        ok_M = position_M < last
        query_M = (tl.load(slots + position_M, mask=ok_M, other=0) // width).to(tl.int64)
        token_M = tl.load(token_of + query_M, mask=ok_M, other=-1)
        sees_NM = key_N[:, None] <= token_M[None, :]
        for g in range(G):
            head = group * G + g
            q_at = (query_M * (kv_heads * G) + head)[:, None] * D + column_D[None, :]
            q_MD = tl.load(q + q_at, mask=ok_M[:, None], other=0.0)
            dout_MD = tl.load(dout + q_at, mask=ok_M[:, None], other=0.0)
            at_M = head.to(tl.int64) * queries + query_M
            lse_M = tl.load(lse + at_M, mask=ok_M, other=0.0) * LOG2_E
            delta_M = tl.load(delta + at_M, mask=ok_M, other=0.0)
            p_NM = tl.math.exp2(tl.dot(k_ND, q_MD.T) * scale_log2 - lse_M[None, :])
            p_NM = tl.where(sees_NM, p_NM, 0.0)  # what is not seen may have overflowed
            dv_ND = tl.dot(p_NM.to(dout_MD.dtype), dout_MD, dv_ND)
            ds_NM = tl.where(sees_NM, p_NM * (tl.dot(v_ND, dout_MD.T) - delta_M[None, :]), 0.0)
            dk_ND = tl.dot(ds_NM.to(q_MD.dtype), q_MD, dk_ND)
    tl.store(dk + at_ND, (dk_ND * scale).to(dk.dtype.element_ty), mask=ok_N[:, None])
    tl.store(dv + at_ND, dv_ND.to(dv.dtype.element_ty), mask=ok_N[:, None])
