"""Gradients, without floating-point atomics.

dq: a second pass over the forward's row tiles (3 matrix products per pair of row and key), each writing its part of dq
to its entry's place. dk and dv: a program per tile of keys walks its block's list and then the block's own rows (4
products per pair) and writes once. Two products more than one fused pass with atomics would need, and reproducible.

A gathered row costs dk and dv 4 * D bytes against 8 * D * N operations: 256 operations per byte with N = 128 keys, from
L2, as the programs of a block's other key tiles gather the same rows at the same time.
"""

import triton
import triton.language as tl

from moba_train.attention.moba.triton.tiles import tile_of_program

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["rows", "tokens", "heads"])
def prepare(dout, out, lse, stats, rows, tokens, heads, D: tl.constexpr, M: tl.constexpr):
    """stats [T, H, 2]: lse in units of log 2, and delta = dout . out; side by side, as they are gathered together."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    ok = row < rows
    token, head = row // heads, row % heads
    at = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    product = tl.load(dout + at, mask=ok[:, None], other=0.0).to(tl.float32)
    product *= tl.load(out + at, mask=ok[:, None], other=0.0).to(tl.float32)
    lse_M = tl.load(lse + head.to(tl.int64) * tokens + token, mask=ok, other=0.0)
    tl.store(stats + row.to(tl.int64) * 2, lse_M * LOG2_E, mask=ok)
    tl.store(stats + row.to(tl.int64) * 2 + 1, tl.sum(product, 1), mask=ok)


@triton.jit
def load_rows(q, dout, stats, token, head, heads, ok, stride_t, D: tl.constexpr):
    """(q, dout [M, D], lse in log 2 units, delta [M]); an absent row has lse = inf, so that its probabilities are 0."""
    column = tl.arange(0, D)
    q_at = token.to(tl.int64) * stride_t + head * D
    row = token.to(tl.int64) * heads + head
    q_MD = tl.load(q + q_at[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    dout_MD = tl.load(dout + (row * D)[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    lse_M = tl.load(stats + row * 2, mask=ok, other=float("inf"))
    delta_M = tl.load(stats + row * 2 + 1, mask=ok, other=0.0)
    return q_MD, dout_MD, lse_M, delta_M


@triton.jit
def _dq_tile(
    q_MD,
    dout_MD,
    lse_M,
    delta_M,
    token_M,
    k_desc,
    v_desc,
    start,
    length,
    column,
    scale,
    OWN: tl.constexpr,
    EVEN: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """dq [M, D] of one tile from the keys start .. start + length."""
    dq_MD = tl.zeros([M, D], tl.float32)
    for j in tl.range(0, length, N):
        k_ND = k_desc.load([start + j, column])
        v_ND = v_desc.load([start + j, column])
        s = tl.dot(q_MD, k_ND.T)
        p = tl.math.exp2(s * (scale * LOG2_E) - lse_M[:, None])
        if OWN:
            key = start + j + tl.arange(0, N)
            p = tl.where(key[None, :] <= token_M[:, None], p, 0.0)
        elif not EVEN:
            p = tl.where((j + tl.arange(0, N) < length)[None, :], p, 0.0)
        dp = tl.dot(dout_MD, v_ND.T)
        ds = p * (dp - delta_M[:, None])
        dq_MD = tl.dot(ds.to(q_MD.dtype), k_ND, dq_MD)
    return dq_MD * scale


@triton.jit(do_not_specialize=["lists", "blocks", "heads", "first_kv_head", "first_entry", "head_entries"])
def dq_history(
    q,
    dout,
    stats,
    k_desc,
    v_desc,
    partial_dq,
    entries,
    list_of_tile,
    last_tile,
    begin,
    end,
    block_start,
    lists,
    blocks,
    heads,
    first_kv_head,
    first_entry,
    head_entries,
    stride_t,
    scale,
    G: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One row tile of one list: each entry's part of dq, to its place in the segment's buffer."""
    which, first, stop = tile_of_program(tl.program_id(0), list_of_tile, last_tile, begin, end, lists, M)
    if which >= lists:
        return
    part, block = which // blocks, which % blocks
    kv_head = first_kv_head + part
    position = first.to(tl.int64) + tl.arange(0, M)
    ok = position < stop
    entry = tl.load(entries + position, mask=ok, other=0)
    row = entry // C
    token = row // G
    q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, token, kv_head * G + row % G, heads, ok, stride_t, D)
    start = tl.load(block_start + block)
    dq_MD = _dq_tile(
        q_MD,
        dout_MD,
        lse_M,
        delta_M,
        token,
        k_desc,
        v_desc,
        start,
        BLOCK,
        kv_head * D,
        scale,
        OWN=False,
        EVEN=BLOCK % N == 0,
        D=D,
        M=M,
        N=N,
    )
    place = part.to(tl.int64) * head_entries + (entry - first_entry)
    tl.store(partial_dq + place[:, None] * D + tl.arange(0, D)[None, :], dq_MD.to(q_MD.dtype), mask=ok[:, None])


@triton.jit(do_not_specialize=["tiles"])
def dq_own(
    q,
    dout,
    stats,
    k_desc,
    v_desc,
    dq,
    block_start,
    block_end,
    tiles,
    stride_t,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One row tile of one block's own rows, causal: dq [T, H, D]."""
    pid, kv_head = tl.program_id(0), tl.program_id(1)
    block, tile = pid // tiles, tiles - 1 - pid % tiles
    start, end = tl.load(block_start + block), tl.load(block_end + block)
    if start + tile * M // G >= end:
        return
    row = tile * M + tl.arange(0, M)
    token = start + row // G
    ok = token < end
    heads = tl.num_programs(1) * G
    head = kv_head * G + row % G
    q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, token, head, heads, ok, stride_t, D)
    dq_MD = _dq_tile(
        q_MD,
        dout_MD,
        lse_M,
        delta_M,
        token,
        k_desc,
        v_desc,
        start,
        tl.minimum(end - start, (tile * M + M - 1) // G + 1),
        kv_head * D,
        scale,
        OWN=True,
        EVEN=False,
        D=D,
        M=M,
        N=N,
    )
    place = (token.to(tl.int64) * heads + head) * D
    tl.store(dq + place[:, None] + tl.arange(0, D)[None, :], dq_MD.to(q_MD.dtype), mask=ok[:, None])


@triton.jit(do_not_specialize=["blocks", "kv_heads", "key_tiles"])
def dkdv(
    q,
    dout,
    stats,
    k_desc,
    v_desc,
    dk,
    dv,
    entries,
    order,
    begin,
    end,
    block_start,
    block_end,
    blocks,
    kv_heads,
    key_tiles,
    stride_t,
    scale,
    G: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """dk and dv [S, K, D] of one tile of keys: from its block's list, then from the block's own rows.

    Programs of one list are neighbours; lists come longest first (`order`). With C = 0 there are no lists, `order` is
    not read.
    """
    pid = tl.program_id(0)
    which = pid // key_tiles
    if C > 0:
        which = tl.load(order + which).to(tl.int32)
    kv_head, block = which // blocks, which % blocks
    start, stop = tl.load(block_start + block), tl.load(block_end + block)
    first_key = start + pid % key_tiles * N
    if first_key >= stop:
        return
    heads = kv_heads * G
    k_ND = k_desc.load([first_key, kv_head * D])
    v_ND = v_desc.load([first_key, kv_head * D])
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    scale_log2 = scale * LOG2_E
    if C > 0:
        last = tl.load(end + which)
        for first in tl.range(tl.load(begin + which), last, M):
            position = first + tl.arange(0, M)
            ok = position < last
            entry = tl.load(entries + position, mask=ok, other=0)
            row = entry // C
            head = kv_head * G + row % G
            q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, row // G, head, heads, ok, stride_t, D)
            p = tl.math.exp2(tl.dot(k_ND, q_MD.T) * scale_log2 - lse_M[None, :])
            dv_ND = tl.dot(p.to(q_MD.dtype), dout_MD, dv_ND)
            ds = p * (tl.dot(v_ND, dout_MD.T) - delta_M[None, :])
            dk_ND = tl.dot(ds.to(q_MD.dtype), q_MD, dk_ND)

    key = first_key + tl.arange(0, N)
    for first in tl.range((first_key - start) * G, (stop - start) * G, M):
        row = first + tl.arange(0, M)
        token = start + row // G
        head = kv_head * G + row % G
        q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, token, head, heads, token < stop, stride_t, D)
        p = tl.math.exp2(tl.dot(k_ND, q_MD.T) * scale_log2 - lse_M[None, :])
        p = tl.where(key[:, None] <= token[None, :], p, 0.0)
        dv_ND = tl.dot(p.to(q_MD.dtype), dout_MD, dv_ND)
        ds = p * (tl.dot(v_ND, dout_MD.T) - delta_M[None, :])
        dk_ND = tl.dot(ds.to(q_MD.dtype), q_MD, dk_ND)

    place = (key.to(tl.int64) * kv_heads + kv_head) * D
    mask = (key < stop)[:, None]
    at = place[:, None] + tl.arange(0, D)[None, :]
    tl.store(dk + at, (dk_ND * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + at, dv_ND.to(dv.dtype.element_ty), mask=mask)
