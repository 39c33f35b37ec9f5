"""The softmax of a row, as both kinds of blocks need it: how a partial result is normalised, and what the backward pass
reads of each row.

There are no floating-point atomics anywhere, so gradients are reproducible.
"""

import triton
import triton.language as tl

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
    place = (at.to(tl.int64) * heads + head) * 2
    which = tl.arange(0, 2)[None, :]
    stats_M2 = tl.load(stats + place[:, None] + which, mask=ok[:, None], other=0.0)
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
