"""MoBA's gate as Triton kernels: bit for bit the mean keys of gate.py, and its selection. Imported only when used.

Gate and top-k are one kernel, the scores never leaving the registers. `_select` holds a tile of queries of one head and
walks the block keys in chunks of N. Column c of every chunk is bucket c; the best LEVELS scores of each bucket stay in
registers, by minima and maxima alone: no reductions, no branches. At the end the winners are drawn from the N * LEVELS
left. That is exact unless one bucket held more than LEVELS of the winners; with N = 64, LEVELS = 4 and topk 12 that is
one row in 36,000, and near blocks, which are alike, lie in different buckets. Such a tile is marked, and
`_select_marked` does it again, exactly: it walks the chunks, inserts what enters one by one, and is an order of
magnitude slower. With more than 16 history blocks it does all. 64K 128/8 took 3.5 ms by insertion alone and takes 1.8
(benchmarks/LOG.md).

A score enters as a sortable int32: the float's bits made monotone, of which the lowest ones, as many as number the
chunks (7 at 1M tokens in blocks of 128), give way to the complement of the chunk: of equal gates the lower block id
wins, and gates that agree to a relative 2**(chunk bits - 23) count as equal: less than the block keys are rounded by.

Work at 1M tokens, 128/8, 32 heads: 35 TFLOP of gate (45 ms at 790 TFLOP/s) and, per score, nine integer operations.
Block keys come from L2. The scores would be 1 TB.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moba_train.attention.kernels.common.call import heads_side_by_side
from moba_train.attention.kernels.common.launch import ceil_div, launch, replayed
from moba_train.attention.kernels.common.lists import block_tables, key_rows
from moba_train.attention.kernels.triton.highest_scores import HIGHEST, enter, found_ids, no_blocks, store_ids
from moba_train.attention.layout import Layout


@replayed
def pool_keys(k_SKD: Tensor, layout: Layout, block_size: int) -> Tensor:
    """Mean of the given keys in each block, [blocks, K, D] in k's dtype; zeros for blocks without any.

    Summed token by token in float32, divided, rounded: bit for bit `gate.pool_keys`. Reads K once (2.1 GB at 1M tokens,
    8 heads of 128: 0.5 ms). One warp per block and head keeps the order; the loads of 16 tokens are in flight at once.
    """
    tables = block_tables(layout, block_size)
    k_SKD = heads_side_by_side(k_SKD.detach())
    _, kv_heads, head_dim = k_SKD.shape
    pooled_NKD = torch.empty(tables.blocks, kv_heads, head_dim, dtype=k_SKD.dtype, device=k_SKD.device)
    if pooled_NKD.numel():
        launch(
            _pool,
            (tables.blocks, kv_heads),
            k=k_SKD,
            pooled=pooled_NKD,
            bounds=tables.bounds,
            stride_t=k_SKD.stride(0),
            D=head_dim,
            UNROLL=16,
            num_warps=1,
        )
    return pooled_NKD


@triton.jit
def _pool(k, pooled, bounds, stride_t, D: tl.constexpr, UNROLL: tl.constexpr):
    block, kv_head = tl.program_id(0), tl.program_id(1)
    start, end, _ = key_rows(bounds, block)
    first = k + start.to(tl.int64) * stride_t + kv_head * D + tl.arange(0, D)
    total = tl.zeros([D], tl.float32)
    whole = (end - start) // UNROLL * UNROLL
    for i in range(0, whole, UNROLL):
        for j in tl.static_range(UNROLL):
            total += tl.load(first + (i + j) * stride_t).to(tl.float32)
    for i in range(whole, end - start):
        total += tl.load(first + i * stride_t).to(tl.float32)
    count = tl.zeros([D], tl.float32) + tl.maximum(end - start, 1)
    offset = (block.to(tl.int64) * tl.num_programs(1) + kv_head) * D + tl.arange(0, D)
    # div_rn: Triton's plain division is approximate, and the mean would differ from the reference's in its last bit.
    tl.store(pooled + offset, tl.div_rn(total, count).to(pooled.dtype.element_ty))


_CHUNK = 64
"""Block keys looked at together, and so the number of buckets."""


@replayed
def select_blocks(
    q_THD: Tensor,
    pooled_NKD: Tensor,
    layout: Layout,
    *,
    block_size: int,
    history_blocks: int,
    select: str,
    always: tuple[str, ...],
    local: int = 1,
) -> Tensor:
    """The history blocks that each query selects, by the rules of `gate.select_blocks`: int32 [H, T, C], ascending, -1
    behind; C = `history_blocks` <= 127."""
    tables = block_tables(layout, block_size)
    q_THD = heads_side_by_side(q_THD.detach())
    pooled_NKD = pooled_NKD.contiguous()
    tokens, heads, head_dim = q_THD.shape
    blocks, kv_heads, _ = pooled_NKD.shape
    selected_HTC = torch.empty(heads, tokens, history_blocks, dtype=torch.int32, device=q_THD.device)
    if selected_HTC.numel() == 0:
        return selected_HTC
    grouped = select == "group"
    rows = 64
    chunks = ceil_div(blocks, _CHUNK)
    # Three levels with a second kernel for the tiles where they may not suffice (0.9 %) took 1.49 + 0.57 ms at 64K
    # 128/8 with topk 8, four levels 1.77 + 0.09 (benchmarks/LOG.md, "Selection and lists").
    levels = min(chunks, history_blocks, 3 if history_blocks <= 5 else 4)
    grid = (ceil_div(tokens, rows), kv_heads if grouped else heads)
    shared = {
        "q": q_THD,
        "diagonal": tables.block_T,
        "first": tables.first_T,
        "selected": selected_HTC,
        "marks": torch.empty(grid[0] * grid[1], dtype=torch.int32, device=q_THD.device),
        "tokens": tokens,
        "blocks": blocks,
        "kv_heads": kv_heads,
        "stride_t": q_THD.stride(0),
        "GROUP": grouped,
        "PREVIOUS": "previous" in always,
        "FIRST": "first" in always,
        "LOCAL": local - 1,
        "G": heads // kv_heads,
        "HISTORY": history_blocks,
        "KEPT": max(2, 1 << (history_blocks - 1).bit_length()),
        "D": head_dim,
        "M": rows,
        "N": _CHUNK,
        "num_warps": warps(history_blocks),
    }
    if history_blocks <= 16:  # with more history blocks, many tiles would have to be done again
        pooled = pooled_NKD.flatten(1)
        desc = TensorDescriptor(pooled, list(pooled.shape), list(pooled.stride()), [_CHUNK, head_dim])
        # By bulk copies: pooled keys are a plain matrix, and what lies past its end reads as zeros.
        launch(_select, grid, pooled_desc=desc, chunk_bits=(chunks - 1).bit_length(), LEVELS=levels, **shared)
    if history_blocks > 16 or levels < min(chunks, history_blocks):
        launch(_select_marked, grid, pooled=pooled_NKD, ALL=history_blocks > 16, **shared)
    return selected_HTC


def warps(history_blocks: int) -> int:
    """Warps of a program: the kept blocks of all its queries stay in registers."""
    return 4 if history_blocks <= 64 else 8


@triton.jit
def _chunk_scores(q_row, q_MD, ok, pooled_desc, at, kv_head, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """Gates [M, N] of one chunk; under GROUP summed over the heads of the group."""
    key_ND = pooled_desc.load([at, kv_head * D])
    if GROUP:
        s = tl.dot(tl.load(q_row + kv_head * G * D, mask=ok[:, None], other=0.0), key_ND.T)
        for g in range(1, G):
            s = tl.dot(tl.load(q_row + (kv_head * G + g) * D, mask=ok[:, None], other=0.0), key_ND.T, s)
    else:
        s = tl.dot(q_MD, key_ND.T)
    return s


@triton.jit
def _chunk_key(s, chunk, chunk_mask):
    """int32 that orders by score, then by lower chunk."""
    bits = s.to(tl.int32, bitcast=True)
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (monotone & ~chunk_mask) | (chunk_mask - chunk)


@triton.jit
def _keep(key, best1, best2, best3, best4, LEVELS: tl.constexpr):
    """The best LEVELS of each bucket, with one more score in it."""
    loser = tl.minimum(best1, key)
    best1 = tl.maximum(best1, key)
    if LEVELS > 1:
        next_loser = tl.minimum(best2, loser)
        best2 = tl.maximum(best2, loser)
        if LEVELS > 2:
            loser = tl.minimum(best3, next_loser)
            best3 = tl.maximum(best3, next_loser)
            if LEVELS > 3:
                best4 = tl.maximum(best4, loser)
    return best1, best2, best3, best4


@triton.jit(do_not_specialize=["tokens", "blocks", "kv_heads", "chunk_bits"])
def _select(
    q, pooled_desc, diagonal, first, selected, marks, tokens, blocks, kv_heads, stride_t, chunk_bits,
    GROUP: tl.constexpr, PREVIOUS: tl.constexpr, FIRST: tl.constexpr, LOCAL: tl.constexpr, G: tl.constexpr,
    HISTORY: tl.constexpr, KEPT: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    # Below every score; and what is left of a bucket when all its levels are drawn, with perhaps more behind.
    EMPTY: tl.constexpr = -0x7FFFFFFF
    HIDDEN: tl.constexpr = -0x80000000
    FORCED: tl.constexpr = 0x7FFFFFFF
    # The last queries have the most candidates: they go first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    kv_head = head if GROUP else head // G
    token = tile * M + tl.arange(0, M)
    ok = token < tokens
    end_M = tl.load(diagonal + token, mask=ok, other=0) - LOCAL
    first_M = tl.load(first + token, mask=ok, other=0)
    lo = tl.min(tl.where(ok, first_M, blocks))
    chunks = tl.maximum(tl.cdiv(tl.max(end_M) - lo, N), 0)
    # Chunks in which every block is an unforced candidate of every query of the tile.
    inner = tl.cdiv(tl.max(first_M) + FIRST - lo, N)
    inner_end = tl.maximum((tl.min(tl.where(ok, end_M, blocks)) - PREVIOUS - lo) // N, inner)

    q_row = q + token.to(tl.int64)[:, None] * stride_t + tl.arange(0, D)[None, :]
    q_MD = None
    if not GROUP:
        q_MD = tl.load(q_row + head * D, mask=ok[:, None], other=0.0)
    chunk_mask = (1 << chunk_bits) - 1
    best1 = tl.full([M, N], EMPTY, tl.int32)
    best2, best3, best4 = best1, best1, best1
    # No mask here, and infinite gates are not clamped, which alone took 4.61 to 4.31 ms at 128K 128/8 (by a program;
    # the output was not kept).
    for chunk in tl.range(inner, inner_end, num_stages=3):
        s = _chunk_scores(q_row, q_MD, ok, pooled_desc, lo + chunk * N, kv_head, GROUP, G, D)
        key = _chunk_key(s, chunk, chunk_mask)
        best1, best2, best3, best4 = _keep(key, best1, best2, best3, best4, LEVELS)
    column = tl.arange(0, N)
    for i in tl.range(0, chunks - (inner_end - inner), num_stages=1):
        chunk = tl.where(i < inner, i, i + inner_end - inner)
        block = lo + chunk * N + column
        s = _chunk_scores(q_row, q_MD, ok, pooled_desc, lo + chunk * N, kv_head, GROUP, G, D)
        key = _chunk_key(s, chunk, chunk_mask)
        forced = FORCED - chunk  # above infinity and NaN, and of two the lower block first
        if PREVIOUS:
            key = tl.where(block[None, :] == end_M[:, None] - 1, forced, key)
        if FIRST:
            key = tl.where(block[None, :] == first_M[:, None], forced, key)
        candidate = (block[None, :] >= first_M[:, None]) & (block[None, :] < end_M[:, None])
        key = tl.where(candidate, key, EMPTY)
        best1, best2, best3, best4 = _keep(key, best1, best2, best3, best4, LEVELS)

    kept = tl.arange(0, KEPT)
    id_MS = tl.full([M, KEPT], 0x7FFFFFFF, tl.int32)
    for c in tl.static_range(HISTORY):
        top_M = tl.max(best1, 1)
        winner_M = tl.min(tl.where(best1 == top_M[:, None], column[None, :], N), 1)
        id_M = lo + (chunk_mask - (top_M & chunk_mask)) * N + winner_M
        id_MS = tl.where((kept == c)[None, :] & (top_M > EMPTY)[:, None], id_M[:, None], id_MS)
        drawn = (column[None, :] == winner_M[:, None]) & (top_M > EMPTY)[:, None]
        best1 = tl.where(drawn, best2 if LEVELS > 1 else HIDDEN, best1)
        if LEVELS > 1:
            best2 = tl.where(drawn, best3 if LEVELS > 2 else HIDDEN, best2)
        if LEVELS > 2:
            best3 = tl.where(drawn, best4 if LEVELS > 3 else HIDDEN, best3)
        if LEVELS > 3:
            best4 = tl.where(drawn, HIDDEN, best4)
    store_ids(selected, id_MS, token, ok, tokens, head, GROUP, G, HISTORY, KEPT)
    if LEVELS < HISTORY:
        hidden_M = tl.max((best1 == HIDDEN).to(tl.int32), 1)
        mark = tl.max(tl.where(ok, hidden_M, 0), 0)
        tl.store(marks + tl.program_id(1) * tl.num_programs(0) + tile, tl.where(chunks > LEVELS, mark, 0))


@triton.jit
def _load_block_keys(pooled, block, lo, hi, kv_heads, kv_head, D: tl.constexpr):
    """Keys [D, N] of the given blocks; zeros outside of [lo, hi)."""
    row = (block.to(tl.int64) * kv_heads + kv_head) * D
    return tl.load(
        pooled + row[None, :] + tl.arange(0, D)[:, None], mask=((block >= lo) & (block < hi))[None, :], other=0.0
    )


@triton.jit(do_not_specialize=["tokens", "blocks", "kv_heads"])
def _select_marked(
    q, pooled, diagonal, first, selected, marks, tokens, blocks, kv_heads, stride_t,
    ALL: tl.constexpr, GROUP: tl.constexpr, PREVIOUS: tl.constexpr, FIRST: tl.constexpr, LOCAL: tl.constexpr,
    G: tl.constexpr, HISTORY: tl.constexpr, KEPT: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head that is marked, or with ALL any."""
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    if (not ALL) and tl.load(marks + head * tl.num_programs(0) + tile) == 0:
        return
    kv_head = head if GROUP else head // G
    token = tile * M + tl.arange(0, M)
    ok = token < tokens
    end_M = tl.load(diagonal + token, mask=ok, other=0) - LOCAL
    first_M = tl.load(first + token, mask=ok, other=0)
    lo = tl.min(tl.where(ok, first_M, blocks))
    hi = tl.max(end_M)
    # Between these, every block is an unforced candidate of every query of the tile.
    inner_lo = tl.max(first_M) + 1
    inner_hi = tl.min(tl.where(ok, end_M, blocks)) - 1

    q_row = q + token.to(tl.int64)[:, None] * stride_t + tl.arange(0, D)[None, :]
    if not GROUP:
        q_MD = tl.load(q_row + head * D, mask=ok[:, None], other=0.0)
    best_MS, worst_M, bar_M = no_blocks(M, HISTORY, KEPT)
    column = tl.arange(0, N)
    steps = tl.maximum(tl.cdiv(hi - lo, N), 0)
    base = lo + (steps - 1) * N
    if not GROUP:
        key_DN = _load_block_keys(pooled, base + column, lo, hi, kv_heads, kv_head, D)
    for _ in range(0, steps):
        block = base + column
        if GROUP:
            key_DN = _load_block_keys(pooled, block, lo, hi, kv_heads, kv_head, D)
            s = tl.zeros([M, N], tl.float32)
            for g in range(0, G):
                q_g = tl.load(q_row + (kv_head * G + g) * D, mask=ok[:, None], other=0.0)
                s = tl.dot(q_g, key_DN, s)
        else:
            # The next chunk is on its way while this one is looked at.
            next_DN = _load_block_keys(pooled, block - N, lo, hi, kv_heads, kv_head, D)
            s = tl.dot(q_MD, key_DN)
            key_DN = next_DN
        if (base < inner_lo) | (base + N > inner_hi):
            s = tl.minimum(tl.maximum(s, -HIGHEST), HIGHEST)
            if PREVIOUS:
                s = tl.where(block[None, :] == end_M[:, None] - 1, float("inf"), s)
            if FIRST:
                s = tl.where(block[None, :] == first_M[:, None], float("inf"), s)
            candidate = (block[None, :] >= first_M[:, None]) & (block[None, :] < end_M[:, None])
            s = tl.where(candidate, s, float("-inf"))
        else:
            s = tl.maximum(s, -HIGHEST)  # a candidate's gate is above no candidate
            if PREVIOUS or FIRST:
                s = tl.minimum(s, HIGHEST)  # and below a forced one
        best_MS, worst_M, bar_M = enter(s, block, best_MS, worst_M, bar_M)
        base -= N

    id_MS = found_ids(best_MS, HISTORY, KEPT)
    store_ids(selected, id_MS, token, ok, tokens, head, GROUP, G, HISTORY, KEPT)
