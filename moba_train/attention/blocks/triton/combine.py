"""The partial results of one query, joined in a fixed order: the own block first, then the selected blocks one by one.

Bound by memory: reads C + 1 rows of 2 * D bytes per query and head and writes one. A partial is normalised and rounded
to 16 bits, which costs the result less than its own rounding does: the weights sum to one.
"""

import triton
import triton.language as tl

from moba_train.attention.blocks.triton.softmax import LOWEST


@triton.jit
def _rows(first_token, last_token, first_kv_head, G: tl.constexpr, M: tl.constexpr):
    """(row within the work range, whether it exists, token, head) of a program's rows."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    token = first_token + row // G
    head = (first_kv_head + tl.program_id(1)) * G + row % G
    return row, token < last_token, token, head


@triton.jit
def _used(slot, ok, bounds, PARTIAL: tl.constexpr):
    """Whether a slot of the selection names a block, some of whose keys are here."""
    block = tl.load(slot, mask=ok, other=-1)
    used = block >= 0
    if PARTIAL:
        start = tl.load(bounds + block * 6 + 3, mask=used, other=0)
        used = used & (tl.load(bounds + block * 6 + 4, mask=used, other=0) > start)
    return used


@triton.jit
def _at(place, entry, used, PLACED: tl.constexpr):
    """Where the partial results of these entries are: in their order, or at `place`."""
    return tl.load(place + entry, mask=used, other=0).to(tl.int64) if PLACED else entry


@triton.jit(do_not_specialize=["tokens", "first_token", "last_token", "first_kv_head", "heads"])
def combine_out(
    out,
    lse,
    own_lse,
    partial_out,
    partial_lse,
    place,
    selected,
    bounds,
    tokens,
    first_token,
    last_token,
    first_kv_head,
    heads,
    PARTIAL: tl.constexpr,
    PLACED: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
):
    """out [T, H, D] holds the own block's part and receives the result; lse [H, T] is written, from own_lse and theirs.

    out may be read and written in place, as every element stays with one thread. A row's lse is read by many threads:
    written in place, a late warp would take what another has stored for the own block's.
    """
    row, ok, token, head = _rows(first_token, last_token, first_kv_head, G, M)
    entry = (tl.program_id(1).to(tl.int64) * (last_token - first_token) * G + row) * C
    slot = selected + (head.to(tl.int64) * tokens + token) * C
    column = tl.arange(0, D)
    lse_at = head.to(tl.int64) * tokens + token
    own_M = tl.load(own_lse + lse_at, mask=ok, other=0.0)
    top_M = own_M
    for j in tl.range(0, C, loop_unroll_factor=4):
        used = _used(slot + j, ok, bounds, PARTIAL)
        at = _at(place, entry + j, used, PLACED)
        top_M = tl.maximum(top_M, tl.load(partial_lse + at, mask=used, other=float("-inf")))
    if PARTIAL:
        top_M = tl.maximum(top_M, LOWEST)
    weight_M = tl.exp(own_M - top_M)
    sum_M = weight_M
    out_at = out + ((token.to(tl.int64) * heads + head) * D)[:, None] + column[None, :]
    total_MD = tl.load(out_at, mask=ok[:, None], other=0.0).to(tl.float32) * weight_M[:, None]
    for j in tl.range(0, C, loop_unroll_factor=4):
        used = _used(slot + j, ok, bounds, PARTIAL)
        at = _at(place, entry + j, used, PLACED)
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
    dq,
    partial_dq,
    place,
    selected,
    bounds,
    tokens,
    first_token,
    last_token,
    first_kv_head,
    heads,
    PARTIAL: tl.constexpr,
    PLACED: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
):
    """dq [T, H, D] holds the own block's part and receives the sum."""
    row, ok, token, head = _rows(first_token, last_token, first_kv_head, G, M)
    entry = (tl.program_id(1).to(tl.int64) * (last_token - first_token) * G + row) * C
    slot = selected + (head.to(tl.int64) * tokens + token) * C
    column = tl.arange(0, D)
    dq_at = dq + ((token.to(tl.int64) * heads + head) * D)[:, None] + column[None, :]
    total_MD = tl.load(dq_at, mask=ok[:, None], other=0.0).to(tl.float32)
    for j in tl.range(0, C, loop_unroll_factor=4):
        used = _used(slot + j, ok, bounds, PARTIAL)
        part = partial_dq + (_at(place, entry + j, used, PLACED) * D)[:, None] + column[None, :]
        total_MD += tl.load(part, mask=used[:, None], other=0.0).to(tl.float32)
    tl.store(dq_at, total_MD.to(dq.dtype.element_ty), mask=ok[:, None])
