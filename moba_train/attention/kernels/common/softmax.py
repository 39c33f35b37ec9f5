"""The softmax of a row, and how partial results become one, in a fixed order. There are no floating-point atomics
anywhere, so results are reproducible.

`prepare` writes what the backward pass reads of each row. `combine_out` and `combine_dq` join the parts of a query: the
diagonal block first, then the selected blocks one by one. `sum_splits` adds up dk and dv of a block, split by split.

Joining is bound by memory: it reads topk rows of 2 * D bytes per query and head and writes one. A partial is
normalised and rounded to 16 bits, which costs the result less than its own rounding does: the weights sum to one.
"""

import triton
import triton.language as tl

from moba_train.attention.kernels.common.lists import key_rows

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: the difference of two of it is 0, not NaN."""


@triton.jit
def normalised(out_MD, top_M, sum_M, PARTIAL: tl.constexpr):
    """(out, natural lse) from the sums of exp2(score - top); a row that saw no key gets (0, -inf) if PARTIAL."""
    lse_M = (top_M + tl.math.log2(sum_M)) * LN_2
    if PARTIAL:
        lse_M = tl.where(sum_M > 0, lse_M, float("-inf"))
        sum_M = tl.where(sum_M > 0, sum_M, 1.0)
    return out_MD * (1.0 / sum_M)[:, None], lse_M


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
    lse_M = tl.where(lse_M == float("-inf"), float("inf"), lse_M * LOG2_E)  # saw no key: probabilities 0
    tl.store(stats + row.to(tl.int64) * 2, lse_M, mask=ok)
    tl.store(stats + row.to(tl.int64) * 2 + 1, tl.sum(product, 1), mask=ok)


@triton.jit
def load_stats(stats, at, head, heads, ok):
    """(lse in log 2 units, delta [M]) of the rows `at` of q; an absent one has lse = inf, so that p = 0."""
    offset = (at.to(tl.int64) * heads + head) * 2
    which = tl.arange(0, 2)[None, :]
    stats_M2 = tl.load(stats + offset[:, None] + which, mask=ok[:, None], other=0.0)
    # Through a sum each number is loaded once. Loaded one by one, every thread would load all it multiplies with.
    lse_M = tl.sum(tl.where(which == 0, stats_M2, 0.0), 1)
    delta_M = tl.sum(tl.where(which == 1, stats_M2, 0.0), 1)
    return tl.where(ok, lse_M, float("inf")), delta_M


@triton.jit
def load_rows(q, dout, stats, at, head, heads, ok, stride_t, D: tl.constexpr):
    """(q, dout [M, D], lse, delta [M]) of the rows `at` of q; zeros and lse = inf for absent ones."""
    column = tl.arange(0, D)
    q_at = at.to(tl.int64) * stride_t + head * D
    dout_at = (at.to(tl.int64) * heads + head) * D
    q_MD = tl.load(q + q_at[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    dout_MD = tl.load(dout + dout_at[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    lse_M, delta_M = load_stats(stats, at, head, heads, ok)
    return q_MD, dout_MD, lse_M, delta_M


@triton.jit
def _rows(first_token, last_token, first_kv_head, G: tl.constexpr, M: tl.constexpr):
    """(row within the work range, whether it exists, token, head) of a program's rows."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    token = first_token + row // G
    head = (first_kv_head + tl.program_id(1)) * G + row % G
    return row, token < last_token, token, head


@triton.jit
def _used(listed, ok, bounds, PARTIAL: tl.constexpr):
    """True if the selection `listed` here names a block, some of whose keys are here."""
    block = tl.load(listed, mask=ok, other=-1)
    used = block >= 0
    if PARTIAL:
        start = tl.load(bounds + block * 6 + 3, mask=used, other=0)
        used = used & (tl.load(bounds + block * 6 + 4, mask=used, other=0) > start)
    return used


@triton.jit
def _at(position_of, slot, used, INDIRECT: tl.constexpr):
    """Positions of the partial results of these slots: in their order, or INDIRECT as `position_of` says."""
    return tl.load(position_of + slot, mask=used, other=0).to(tl.int64) if INDIRECT else slot


@triton.jit(do_not_specialize=["tokens", "first_token", "last_token", "first_kv_head", "heads"])
def combine_out(
    out, lse, diagonal_lse, partial_out, partial_lse, position_of, selected, bounds, tokens, first_token, last_token,
    first_kv_head, heads,
    PARTIAL: tl.constexpr, INDIRECT: tl.constexpr, G: tl.constexpr, HISTORY: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """out [T, H, D] holds the diagonal block's part and receives the result; lse [H, T] is written, from
    diagonal_lse and theirs.

    out may be read and written in place, as every element stays with one thread. A row's lse is read by many threads:
    written in place, a late warp would take what another has stored for the diagonal block's, as happened to one of
    1,100 calls (benchmarks/LOG.md, "Wrong results").
    """
    row, ok, token, head = _rows(first_token, last_token, first_kv_head, G, M)
    slot = (tl.program_id(1).to(tl.int64) * (last_token - first_token) * G + row) * HISTORY
    listed = selected + (head.to(tl.int64) * tokens + token) * HISTORY
    column = tl.arange(0, D)
    lse_at = head.to(tl.int64) * tokens + token
    diagonal_M = tl.load(diagonal_lse + lse_at, mask=ok, other=0.0)
    top_M = diagonal_M
    # Two loops, as the largest lse must be known before the sum. Unrolled, the loads of four blocks can be in flight at
    # once; joining is bound by memory.
    for j in tl.range(0, HISTORY, loop_unroll_factor=4):
        used = _used(listed + j, ok, bounds, PARTIAL)
        at = _at(position_of, slot + j, used, INDIRECT)
        top_M = tl.maximum(top_M, tl.load(partial_lse + at, mask=used, other=float("-inf")))
    if PARTIAL:
        # A row whose keys are all elsewhere: -inf less -inf would be NaN.
        top_M = tl.maximum(top_M, LOWEST)
    weight_M = tl.exp(diagonal_M - top_M)
    sum_M = weight_M
    out_at = out + ((token.to(tl.int64) * heads + head) * D)[:, None] + column[None, :]
    total_MD = tl.load(out_at, mask=ok[:, None], other=0.0).to(tl.float32) * weight_M[:, None]
    for j in tl.range(0, HISTORY, loop_unroll_factor=4):
        used = _used(listed + j, ok, bounds, PARTIAL)
        at = _at(position_of, slot + j, used, INDIRECT)
        weight_M = tl.exp(tl.load(partial_lse + at, mask=used, other=float("-inf")) - top_M)
        part = partial_out + (at * D)[:, None] + column[None, :]
        total_MD += tl.load(part, mask=used[:, None], other=0.0).to(tl.float32) * weight_M[:, None]
        sum_M += weight_M
    lse_M = top_M + tl.log(sum_M)
    if PARTIAL:
        lse_M = tl.where(sum_M > 0, lse_M, float("-inf"))
        sum_M = tl.where(sum_M > 0, sum_M, 1.0)
    tl.store(out_at, (total_MD * (1.0 / sum_M)[:, None]).to(out.dtype.element_ty), mask=ok[:, None])
    tl.store(lse + lse_at, lse_M, mask=ok)


@triton.jit(do_not_specialize=["tokens", "first_token", "last_token", "first_kv_head", "heads"])
def combine_dq(
    dq, partial_dq, position_of, selected, bounds, tokens, first_token, last_token, first_kv_head, heads,
    PARTIAL: tl.constexpr, INDIRECT: tl.constexpr, G: tl.constexpr, HISTORY: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """dq [T, H, D] holds the diagonal block's part and receives the sum."""
    row, ok, token, head = _rows(first_token, last_token, first_kv_head, G, M)
    slot = (tl.program_id(1).to(tl.int64) * (last_token - first_token) * G + row) * HISTORY
    listed = selected + (head.to(tl.int64) * tokens + token) * HISTORY
    column = tl.arange(0, D)
    dq_at = dq + ((token.to(tl.int64) * heads + head) * D)[:, None] + column[None, :]
    total_MD = tl.load(dq_at, mask=ok[:, None], other=0.0).to(tl.float32)
    for j in tl.range(0, HISTORY, loop_unroll_factor=4):
        used = _used(listed + j, ok, bounds, PARTIAL)
        part = partial_dq + (_at(position_of, slot + j, used, INDIRECT) * D)[:, None] + column[None, :]
        total_MD += tl.load(part, mask=used[:, None], other=0.0).to(tl.float32)
    tl.store(dq_at, total_MD.to(dq.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["blocks", "first_kv_head", "kv_heads", "diagonal_heads"])
def sum_splits(
    dk, dv, diagonal_dk, diagonal_dv, part_dk, part_dv, first_split, splits_of, bounds, blocks, first_kv_head, kv_heads,
    diagonal_heads,
    ADD: tl.constexpr, D: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv [S, K, D] of KEYS keys of a list of several splits; its parts are [splits, N keys, D].

    ADD: with diagonal_dk and diagonal_dv [S, diagonal_heads, D] of these heads, and for every list.
    """
    which = tl.program_id(0)
    splits = tl.load(splits_of + which)
    # With one split the kernel before has written the result itself.
    if (not ADD) and splits < 2:
        return
    part, block = which // blocks, which % blocks
    # A grid over keys and a loop over splits: the order of the sum is that of the splits, whatever runs first.
    key = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, D)
    split = tl.load(first_split + which).to(tl.int64)
    dk_ND = tl.zeros([KEYS, D], tl.float32)
    dv_ND = tl.zeros([KEYS, D], tl.float32)
    for number in tl.range(0, splits):
        at = ((split + number) * N + key)[:, None] * D + column[None, :]
        dk_ND += tl.load(part_dk + at)
        dv_ND += tl.load(part_dv + at)
    start, stop, _ = key_rows(bounds, block)
    row = (start + key).to(tl.int64)
    mask = (start + key < stop)[:, None]
    if ADD:
        own_head = part + tl.where(diagonal_heads == kv_heads, first_kv_head, 0)
        at = ((row * diagonal_heads + own_head) * D)[:, None] + column[None, :]
        dk_ND += tl.load(diagonal_dk + at, mask=mask, other=0.0).to(tl.float32)
        dv_ND += tl.load(diagonal_dv + at, mask=mask, other=0.0).to(tl.float32)
    at = ((row * kv_heads + first_kv_head + part) * D)[:, None] + column[None, :]
    tl.store(dk + at, dk_ND.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + at, dv_ND.to(dv.dtype.element_ty), mask=mask)
