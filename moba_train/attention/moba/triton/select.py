"""Gate and top-k in one kernel.

A program holds a tile of queries of one head, walks the block keys from the last candidate to the first (near blocks
tend to score high, so the bar is high early) and keeps the best C of each query. A score enters as one sortable int64:
the float's bits made monotone above, the complement of the block id below, so that of equal gates the lower id wins.

Work at 1M tokens, 128/8, 32 heads: 35 TFLOP of gate (45 ms at 790 TFLOP/s); block keys come from L2, 64 FLOP per byte
and 64 queries. The scores would be 1 TB and never leave the registers. Merging costs a few passes over the tile's
scores per entering block; how many enter grows with log(blocks) only, and chunks in which none does are skipped.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def select_blocks(
    q_THD: Tensor,
    pooled_NKD: Tensor,
    own_T: Tensor,
    first_T: Tensor,
    *,
    topk: int,
    select: str,
    always: tuple[str, ...],
) -> Tensor:
    """The same choice as `selection.select_blocks`: int32 [H, T, C], ascending, -1 behind.

    `own_T` and `first_T`: int32, each query's block and the first block of its document.
    """
    tokens, heads, head_dim = q_THD.shape
    blocks, kv_heads, _ = pooled_NKD.shape
    choices = min(topk - 1, blocks)
    chosen_HTC = torch.empty(heads, tokens, choices, dtype=torch.int32, device=q_THD.device)
    if chosen_HTC.numel() == 0:
        return chosen_HTC
    slots = max(2, triton.next_power_of_2(choices))
    group = heads // kv_heads
    rows = 128 if slots <= 16 else 64
    grouped = select == "group"
    _select[(triton.cdiv(tokens, rows), kv_heads if grouped else heads)](
        q_THD,
        pooled_NKD,
        own_T,
        first_T,
        chosen_HTC,
        tokens,
        blocks,
        kv_heads,
        q_THD.stride(0),
        GROUP=grouped,
        PREVIOUS="previous" in always,
        FIRST="first" in always,
        G=group,
        C=choices,
        SLOTS=slots,
        D=head_dim,
        M=rows,
        N=64,
        num_warps=8 if rows == 128 else 4,
    )
    return chosen_HTC


@triton.jit
def _load_block_keys(pooled, block, lo, hi, kv_heads, kv_head, D: tl.constexpr):
    """Keys [D, N] of the given blocks; zeros outside of [lo, hi)."""
    row = (block.to(tl.int64) * kv_heads + kv_head) * D
    return tl.load(
        pooled + row[None, :] + tl.arange(0, D)[:, None], mask=((block >= lo) & (block < hi))[None, :], other=0.0
    )


@triton.jit
def _sortable(score, block):
    """int64 that orders by score, then by lower block id."""
    bits = score.to(tl.int32, bitcast=True)
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (monotone.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)


@triton.jit
def _score_of(key):
    monotone = (key >> 32).to(tl.int32)
    bits = monotone ^ ((monotone >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens", "blocks", "kv_heads"])
def _select(
    q,
    pooled,
    own,
    first,
    chosen,
    tokens,
    blocks,
    kv_heads,
    stride_t,
    GROUP: tl.constexpr,
    PREVIOUS: tl.constexpr,
    FIRST: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    HIGHEST: tl.constexpr = 3.4028234663852886e38
    # The last queries have the most candidates: they go first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    kv_head = head if GROUP else head // G
    token = tile * M + tl.arange(0, M)
    ok = token < tokens
    own_M = tl.load(own + token, mask=ok, other=0)
    first_M = tl.load(first + token, mask=ok, other=0)
    lo = tl.min(tl.where(ok, first_M, blocks))
    hi = tl.max(own_M)
    # Between these, every block is an unforced candidate of every query of the tile.
    inner_lo = tl.max(first_M) + 1
    inner_hi = tl.min(tl.where(ok, own_M, blocks)) - 1

    q_row = q + token.to(tl.int64)[:, None] * stride_t + tl.arange(0, D)[None, :]
    if not GROUP:
        q_MD = tl.load(q_row + head * D, mask=ok[:, None], other=0.0)
    slot = tl.arange(0, SLOTS)
    empty = slot.to(tl.int64) - 0x7FFFFFFFFFFFFF00  # distinct, and below every score
    # Slots that are not used are full from the start, so that nothing ever enters them.
    best_MS = tl.where(slot < C, empty, 0x7FFFFFFFFFFFFF00 + slot.to(tl.int64))[None, :] + tl.zeros(
        [M, SLOTS], tl.int64
    )
    worst_M = tl.min(best_MS, 1)
    bar_M = tl.full([M], float("-inf"), tl.float32)

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
                s = tl.where(block[None, :] == own_M[:, None] - 1, float("inf"), s)
            if FIRST:
                s = tl.where(block[None, :] == first_M[:, None], float("inf"), s)
            candidate = (block[None, :] >= first_M[:, None]) & (block[None, :] < own_M[:, None])
            s = tl.where(candidate, s, float("-inf"))
        else:
            s = tl.maximum(s, -HIGHEST)  # a candidate's gate is above no candidate
            if PREVIOUS or FIRST:
                s = tl.minimum(s, HIGHEST)  # and below a forced one
        top_M = tl.max(s, 1)
        more = tl.max(((top_M >= bar_M) & (top_M > float("-inf"))).to(tl.int32), 0)
        while more > 0:
            winner_M = tl.min(tl.where(s == top_M[:, None], block[None, :], 0x7FFFFFFF), 1)
            key_M = _sortable(top_M, winner_M)
            enters_M = (key_M > worst_M) & (top_M > float("-inf"))
            best_MS = tl.where(enters_M[:, None] & (best_MS == worst_M[:, None]), key_M[:, None], best_MS)
            worst_M = tl.min(best_MS, 1)
            bar_M = tl.where(worst_M > -0x7FFFFFFFFFFF0000, _score_of(worst_M), float("-inf"))
            # What did not enter is below the bar, and so is all the rest of its row in this chunk.
            s = tl.where(block[None, :] == winner_M[:, None], float("-inf"), s)
            s = tl.where(enters_M[:, None], s, float("-inf"))
            top_M = tl.max(s, 1)
            more = tl.max(((top_M >= bar_M) & (top_M > float("-inf"))).to(tl.int32), 0)
        base -= N

    taken = (best_MS > -0x7FFFFFFFFFFF0000) & (slot < C)[None, :]
    id_MS = tl.where(taken, 0x7FFFFFFF - (best_MS & 0x7FFFFFFF).to(tl.int32), 0x7FFFFFFF)
    id_MS = tl.sort(id_MS, 1)
    id_MS = tl.where(id_MS == 0x7FFFFFFF, -1, id_MS)
    place = token.to(tl.int64)[:, None] * C + slot[None, :]
    mask = ok[:, None] & (slot < C)[None, :]
    if GROUP:
        for g in range(0, G):
            tl.store(chosen + (kv_head * G + g).to(tl.int64) * tokens * C + place, id_MS, mask=mask)
    else:
        tl.store(chosen + head.to(tl.int64) * tokens * C + place, id_MS, mask=mask)
