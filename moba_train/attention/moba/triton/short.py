"""Short blocks, whose keys are one tile: they stay on chip while the rows of their list stream past.

A program takes a span of a list. It loads the block's keys and values once; its rows, gathered by address, are on their
way while the rows before them are worked on. The block's own rows, causal, follow at the end of its first span. With
128 keys a row costs 2 * D bytes of gathering and 2 * D of partial result against 4 * D * 128 operations, 128 a byte.

`gradients` makes a row's part of dq beside dk and dv: five matrix products and one gather, where separate passes take
seven and two. A list of several spans leaves float32 parts of dk and dv, which `sum_spans` adds in order.
"""

import triton
import triton.language as tl

from moba_train.attention.moba.triton.backward import LOG2_E, load_rows
from moba_train.attention.moba.triton.forward import LOWEST, normalised
from moba_train.attention.moba.triton.tables import key_rows, query_rows


@triton.jit
def _span(pid, list_of_span, last_span, begin, end, lists, SPAN: tl.constexpr):
    """(list or `lists`, its spans, number of this span, first entry, one past the last)."""
    which = tl.load(list_of_span + pid)
    safe = tl.minimum(which, lists - 1)
    before = tl.load(last_span + safe - 1, mask=safe > 0, other=0)
    spans = tl.load(last_span + safe) - before
    first = tl.load(begin + safe) + (pid - before) * SPAN
    return which, spans, pid - before, first, tl.minimum(first + SPAN, tl.load(end + safe))


@triton.jit
def _softmax(s_MN, v_ND, scale_log2, PARTIAL: tl.constexpr):
    """(out [M, D] normalised, lse [M], natural) of rows whose keys are all here."""
    top_M = tl.max(s_MN, 1) * scale_log2
    if PARTIAL:
        top_M = tl.maximum(top_M, LOWEST)
    p_MN = tl.math.exp2(s_MN * scale_log2 - top_M[:, None])
    return normalised(tl.dot(p_MN.to(v_ND.dtype), v_ND), top_M, tl.sum(p_MN, 1), PARTIAL)


@triton.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "heads", "tokens", "first_entry", "head_entries"])
def attend(
    q,
    k_desc,
    v_desc,
    out,
    lse,
    partial_out,
    partial_lse,
    entries,
    list_of_span,
    last_span,
    begin,
    end,
    bounds,
    lists,
    blocks,
    first_kv_head,
    heads,
    tokens,
    first_entry,
    head_entries,
    stride_t,
    scale_log2,
    PARTIAL: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One span: the partial (out, lse) of each entry; with a list's first span out [T, H, D], lse [H, T] of its block's
    own rows, in the segment that has the first entries. The block is one tile."""
    which, _, number, first, last = _span(tl.program_id(0), list_of_span, last_span, begin, end, lists, SPAN)
    if which >= lists:
        return
    part, block = which // blocks, which % blocks
    kv_head = first_kv_head + part
    start, stop, key_shift = key_rows(bounds, block)
    k_ND = k_desc.load([start, kv_head * D])
    v_ND = v_desc.load([start, kv_head * D])
    column, key = tl.arange(0, D), start + tl.arange(0, N)
    if PARTIAL:
        last = tl.where(start < stop, last, first)
    for at in tl.range(first, last, M):
        position = at + tl.arange(0, M)
        ok = position < last
        entry = tl.load(entries + position, mask=ok, other=0)
        row = entry // C
        q_at = (row // G).to(tl.int64) * stride_t + (kv_head * G + row % G) * D
        s = tl.dot(tl.load(q + q_at[:, None] + column[None, :], mask=ok[:, None], other=0.0), k_ND.T)
        if BLOCK < N or PARTIAL:
            s = tl.where((key < stop)[None, :], s, float("-inf"))
        out_MD, lse_M = _softmax(s, v_ND, scale_log2, False)
        place = part.to(tl.int64) * head_entries + (entry - first_entry)
        tl.store(partial_out + place[:, None] * D + column[None, :], out_MD.to(v_ND.dtype), mask=ok[:, None])
        tl.store(partial_lse + place, lse_M, mask=ok)
    if (number > 0) | (first_entry > 0):
        return
    first_row, last_row, shift = query_rows(bounds, block)
    for at in tl.range(0, (last_row - first_row) * G, M):
        row = at + tl.arange(0, M)
        at_M, head = first_row + row // G, kv_head * G + row % G
        ok = at_M < last_row
        q_at = at_M.to(tl.int64) * stride_t + head * D
        s = tl.dot(tl.load(q + q_at[:, None] + column[None, :], mask=ok[:, None], other=0.0), k_ND.T)
        visible = key[None, :] <= (at_M + shift - key_shift)[:, None]
        if PARTIAL:
            visible = visible & (key < stop)[None, :]
        out_MD, lse_M = _softmax(tl.where(visible, s, float("-inf")), v_ND, scale_log2, PARTIAL)
        out_at = (at_M.to(tl.int64) * heads + head) * D
        tl.store(out + out_at[:, None] + column[None, :], out_MD.to(v_ND.dtype), mask=ok[:, None])
        tl.store(lse + head.to(tl.int64) * tokens + at_M, lse_M, mask=ok)


@triton.jit
def _gradients(q_MD, dout_MD, p_NM, dp_NM, delta_M, k_ND, dk_ND, dv_ND):
    """(dq [M, D], dk, dv [N, D]) with the rows' part, dq and dk not yet scaled."""
    dv_ND = tl.dot(p_NM.to(q_MD.dtype), dout_MD, dv_ND)
    ds_NM = (p_NM * (dp_NM - delta_M[None, :])).to(q_MD.dtype)
    dk_ND = tl.dot(ds_NM, q_MD, dk_ND)
    return tl.dot(ds_NM.T, k_ND), dk_ND, dv_ND


@triton.jit(do_not_specialize=["lists", "blocks", "first_kv_head", "heads", "head_entries"])
def gradients(
    q,
    dout,
    stats,
    k_desc,
    v_desc,
    dq,
    dk,
    dv,
    partial_dq,
    part_dk,
    part_dv,
    slots,
    entries,
    list_of_span,
    last_span,
    begin,
    end,
    bounds,
    lists,
    blocks,
    first_kv_head,
    heads,
    head_entries,
    stride_t,
    scale,
    PARTIAL: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One span: each entry's part of dq, and dk and dv [S, K, D]; with a list's first span its block's own rows and
    their dq [T, H, D].

    Of a list of several spans, dk and dv go in parts to part_dk and part_dv [slots, N, D].
    """
    which, spans, number, first, last = _span(tl.program_id(0), list_of_span, last_span, begin, end, lists, SPAN)
    if which >= lists:
        return
    part, block = which // blocks, which % blocks
    kv_head = first_kv_head + part
    start, stop, key_shift = key_rows(bounds, block)
    first_row, last_row, shift = query_rows(bounds, block)
    k_ND = k_desc.load([start, kv_head * D])
    v_ND = v_desc.load([start, kv_head * D])
    column, key = tl.arange(0, D), start + tl.arange(0, N)
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    scale_log2 = scale * LOG2_E
    if PARTIAL:
        last = tl.where(start < stop, last, first)
    for at in tl.range(first, last, M):
        position = at + tl.arange(0, M)
        ok = position < last
        entry = tl.load(entries + position, mask=ok, other=0)
        row = entry // C
        q_MD, dout_MD, lse_M, delta_M = load_rows(
            q, dout, stats, row // G, kv_head * G + row % G, heads, ok, stride_t, D
        )
        s = tl.dot(k_ND, q_MD.T)
        dp = tl.dot(v_ND, dout_MD.T)
        p = tl.math.exp2(s * scale_log2 - lse_M[None, :])
        if BLOCK < N or PARTIAL:
            p = tl.where((key < stop)[:, None], p, 0.0)
        dq_MD, dk_ND, dv_ND = _gradients(q_MD, dout_MD, p, dp, delta_M, k_ND, dk_ND, dv_ND)
        place = part.to(tl.int64) * head_entries + entry
        at_MD = partial_dq + place[:, None] * D + column[None, :]
        tl.store(at_MD, (dq_MD * scale).to(q_MD.dtype), mask=ok[:, None])
    if number == 0:
        shift -= key_shift
        for at in tl.range(0, (last_row - first_row) * G, M):
            row = at + tl.arange(0, M)
            at_M, head = first_row + row // G, kv_head * G + row % G
            ok = at_M < last_row
            q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, at_M, head, heads, ok, stride_t, D)
            s = tl.dot(k_ND, q_MD.T)
            dp = tl.dot(v_ND, dout_MD.T)
            p = tl.math.exp2(s * scale_log2 - lse_M[None, :])
            visible = key[:, None] <= (at_M + shift)[None, :]
            if PARTIAL:
                visible = visible & (key < stop)[:, None]
            p = tl.where(visible, p, 0.0)
            dq_MD, dk_ND, dv_ND = _gradients(q_MD, dout_MD, p, dp, delta_M, k_ND, dk_ND, dv_ND)
            at_MD = dq + (at_M.to(tl.int64) * heads + head)[:, None] * D + column[None, :]
            tl.store(at_MD, (dq_MD * scale).to(q_MD.dtype), mask=ok[:, None])
    if spans == 1:
        place = (key.to(tl.int64) * (heads // G) + kv_head) * D
        at_ND, mask = place[:, None] + column[None, :], (key < stop)[:, None]
        tl.store(dk + at_ND, (dk_ND * scale).to(dk.dtype.element_ty), mask=mask)
        tl.store(dv + at_ND, dv_ND.to(dv.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + which).to(tl.int64) + number
        at_ND = (slot * N + tl.arange(0, N))[:, None] * D + column[None, :]
        tl.store(part_dk + at_ND, dk_ND * scale)
        tl.store(part_dv + at_ND, dv_ND)


@triton.jit(do_not_specialize=["blocks", "first_kv_head", "kv_heads"])
def sum_spans(
    dk,
    dv,
    part_dk,
    part_dv,
    slots,
    spans_of,
    bounds,
    blocks,
    first_kv_head,
    kv_heads,
    ADD: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dk and dv [S, K, D] of KEYS keys of a list of several spans; its parts are [spans, N keys, D].

    ADD: to what is there already, and for a list of one span too.
    """
    which = tl.program_id(0)
    spans = tl.load(spans_of + which)
    if spans < (1 if ADD else 2):
        return
    part, block = which // blocks, which % blocks
    key, column = tl.program_id(1) * KEYS + tl.arange(0, KEYS), tl.arange(0, D)
    slot = tl.load(slots + which).to(tl.int64)
    dk_ND = tl.zeros([KEYS, D], tl.float32)
    dv_ND = tl.zeros([KEYS, D], tl.float32)
    for number in tl.range(0, spans):
        at = ((slot + number) * N + key)[:, None] * D + column[None, :]
        dk_ND += tl.load(part_dk + at)
        dv_ND += tl.load(part_dv + at)
    start, stop, _ = key_rows(bounds, block)
    at = (((start + key).to(tl.int64) * kv_heads + first_kv_head + part) * D)[:, None] + column[None, :]
    mask = (start + key < stop)[:, None]
    if ADD:
        dk_ND += tl.load(dk + at, mask=mask, other=0.0).to(tl.float32)
        dv_ND += tl.load(dv + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dk + at, dk_ND.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + at, dv_ND.to(dv.dtype.element_ty), mask=mask)
