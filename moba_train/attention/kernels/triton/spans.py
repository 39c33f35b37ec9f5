"""A span of neighbouring keys for each query (../spans.py): forward, dq, and dk and dv, by dense tiles.

Neighbouring queries see nearly the same keys, so nothing is gathered and there are no lists: a program has a tile of
rows and walks all keys that any of them sees, or a tile of keys and walks their rows. Which keys count is a comparison
with two numbers for each row.
"""

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.common.geometry import KeySpans
from moba_train.attention.kernels.common.launch import ceil_div, launch
from moba_train.attention.kernels.common.softmax import LOG2_E, LOWEST, load_rows, load_stats, normalised
from moba_train.attention.kernels.common.tiles import SHARED_MEMORY, TileShape, shared_memory_of


@dataclass(frozen=True)
class SpanShapes:
    """The tile shape of each kernel here."""

    forward: TileShape
    dq: TileShape
    dkdv: TileShape


def span_shapes(head_dim: int, shared_memory: int = SHARED_MEMORY) -> SpanShapes:
    """The fastest on an H200 for a window of 2,048 (benchmarks/LOG.md, "Windows"); smaller ones for less memory."""
    if head_dim <= 64:
        return SpanShapes(TileShape(64, 64, 4, 2), TileShape(64, 64, 4, 3), TileShape(128, 128, 8, 3))
    if shared_memory < SHARED_MEMORY:
        return SpanShapes(*[TileShape(64, 64, 8, 2)] * 3)
    return SpanShapes(TileShape(64, 64, 4, 3), TileShape(128, 64, 8, 4), TileShape(64, 128, 8, 3))


@triton.jit
def _rows_and_spans(first, end, tokens, keys, G: tl.constexpr, M: tl.constexpr):
    """(token, head of the group, whether it exists, first key and one past the last [M]; those of the whole tile)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # later queries may see more keys: they go first
    row = tile * M + tl.arange(0, M)
    at_M, head = row // G, tl.program_id(1) * G + row % G
    ok = at_M < tokens
    first_M = tl.load(first + at_M, mask=ok, other=keys)
    end_M = tl.load(end + at_M, mask=ok, other=0)
    return at_M, head, ok, first_M, end_M, tl.min(first_M), tl.max(end_M)


@triton.jit
def _sinks(sink_first, sink_end, at_M, ok, keys, N: tl.constexpr, SINKS: tl.constexpr):
    """(each row's first sink, one past its last [M], the tile's first, tiles of them)."""
    if SINKS:
        first_M = tl.load(sink_first + at_M, mask=ok, other=keys)
        end_M = tl.load(sink_end + at_M, mask=ok, other=0)
        low = tl.min(first_M)
        tiles = tl.maximum(tl.cdiv(tl.max(end_M) - low, N), 0)
    else:
        first_M, end_M, low, tiles = at_M, at_M, 0, 0
    return first_M, end_M, low, tiles


@triton.jit(do_not_specialize=["tokens", "keys"])
def forward_spans(
    q, k_desc, v_desc, out, lse, first, end, sink_first, sink_end, tokens, keys, stride_t, scale_log2,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows: out [T, H, D] and lse [H, T]; (0, -inf) for rows without keys."""
    at_M, head, ok, first_M, end_M, low, high = _rows_and_spans(first, end, tokens, keys, G, M)
    column = tl.arange(0, D)
    q_at = at_M.to(tl.int64) * stride_t + head * D
    q_MD = tl.load(q + q_at[:, None] + column[None, :], mask=ok[:, None], other=0.0)
    top_M = tl.full([M], LOWEST, tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    out_MD = tl.zeros([M, D], tl.float32)
    # Tiles of keys in between, nearly all of a long span's, need no mask.
    inner_low, inner_high = tl.max(first_M), tl.min(end_M)
    sink_M, sink_end_M, sink_low, sink_tiles = _sinks(sink_first, sink_end, at_M, ok, keys, N, SINKS)
    for i in tl.range(0, sink_tiles + tl.maximum(tl.cdiv(high - low, N), 0)):
        in_span = i >= sink_tiles
        at = tl.where(in_span, low - sink_tiles * N, sink_low) + i * N
        k_ND = k_desc.load([at, tl.program_id(1) * D])
        v_ND = v_desc.load([at, tl.program_id(1) * D])
        s = tl.dot(q_MD, k_ND.T)
        if (at < inner_low) | (at + N > inner_high) | (i < sink_tiles):
            key = at + tl.arange(0, N)
            from_M, to_M = tl.where(in_span, first_M, sink_M), tl.where(in_span, end_M, sink_end_M)
            seen = (key[None, :] >= from_M[:, None]) & (key[None, :] < to_M[:, None])
            s = tl.where(seen, s, float("-inf"))
        new_M = tl.maximum(top_M, tl.max(s, 1) * scale_log2)
        p = tl.math.exp2(s * scale_log2 - new_M[:, None])
        shrink_M = tl.math.exp2(top_M - new_M)
        sum_M = sum_M * shrink_M + tl.sum(p, 1)
        out_MD = tl.dot(p.to(q_MD.dtype), v_ND, out_MD * shrink_M[:, None])
        top_M = new_M
    out_MD, lse_M = normalised(out_MD, top_M, sum_M, True)
    heads = tl.num_programs(1) * G
    offset = (at_M.to(tl.int64) * heads + head) * D
    tl.store(out + offset[:, None] + column[None, :], out_MD.to(q_MD.dtype), mask=ok[:, None])
    tl.store(lse + head.to(tl.int64) * tokens + at_M, lse_M, mask=ok)


@triton.jit(do_not_specialize=["tokens", "keys"])
def dq_spans(
    q, dout, stats, k_desc, v_desc, dq, first, end, sink_first, sink_end, tokens, keys, stride_t, scale,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows: dq [T, H, D]."""
    at_M, head, ok, first_M, end_M, low, high = _rows_and_spans(first, end, tokens, keys, G, M)
    heads = tl.num_programs(1) * G
    q_MD, dout_MD, lse_M, delta_M = load_rows(q, dout, stats, at_M, head, heads, ok, stride_t, D)
    dq_MD = tl.zeros([M, D], tl.float32)
    inner_low, inner_high = tl.max(first_M), tl.min(end_M)
    sink_M, sink_end_M, sink_low, sink_tiles = _sinks(sink_first, sink_end, at_M, ok, keys, N, SINKS)
    for i in tl.range(0, sink_tiles + tl.maximum(tl.cdiv(high - low, N), 0)):
        in_span = i >= sink_tiles
        at = tl.where(in_span, low - sink_tiles * N, sink_low) + i * N
        k_ND = k_desc.load([at, tl.program_id(1) * D])
        v_ND = v_desc.load([at, tl.program_id(1) * D])
        p = tl.math.exp2(tl.dot(q_MD, k_ND.T) * (scale * LOG2_E) - lse_M[:, None])
        if (at < inner_low) | (at + N > inner_high) | (i < sink_tiles):
            key = at + tl.arange(0, N)
            from_M, to_M = tl.where(in_span, first_M, sink_M), tl.where(in_span, end_M, sink_end_M)
            seen = (key[None, :] >= from_M[:, None]) & (key[None, :] < to_M[:, None])
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(dout_MD, v_ND.T) - delta_M[:, None])
        dq_MD = tl.dot(ds.to(q_MD.dtype), k_ND, dq_MD)
    offset = (at_M.to(tl.int64) * heads + head) * D
    tl.store(dq + offset[:, None] + tl.arange(0, D)[None, :], (dq_MD * scale).to(q_MD.dtype), mask=ok[:, None])


@triton.jit(do_not_specialize=["first_kv_head", "heads", "tokens", "keys"])
def dkdv_spans(
    q_desc, dout_desc, stats, k_desc, v_desc, sum_dk, sum_dv, first, end, first_kv_head, heads, tokens, keys, scale,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of keys: float32 dk and dv [S, some K, D]. `first`, `end`: each key's first query, one past its last."""
    key = tl.program_id(0) * N + tl.arange(0, N)
    part = tl.program_id(1)
    kv_head = first_kv_head + part
    ok = key < keys
    first_N = tl.load(first + key, mask=ok, other=tokens)
    end_N = tl.load(end + key, mask=ok, other=0)
    k_ND = k_desc.load([tl.program_id(0) * N, kv_head * D])
    v_ND = v_desc.load([tl.program_id(0) * N, kv_head * D])
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    low = tl.min(first_N)
    inner_low, inner_high = tl.max(first_N), tl.min(end_N)
    tiles = tl.maximum(tl.cdiv(tl.max(end_N) - low, M), 0)
    divisor = tl.maximum(tiles, 1)  # dividing by zero is undefined (`dkdv_diagonal`)
    for i in tl.range(0, tiles * G):
        at, head = low + i % divisor * M, kv_head * G + i // divisor
        q_MD = q_desc.load([at, head * D])
        dout_MD = dout_desc.load([at, head * D])
        at_M = at + tl.arange(0, M)
        lse_M, delta_M = load_stats(stats, at_M, head, heads, at_M < tokens)
        p = tl.math.exp2(tl.dot(k_ND, q_MD.T) * (scale * LOG2_E) - lse_M[None, :])
        if (at < inner_low) | (at + M > inner_high):
            seen = (first_N[:, None] <= at_M[None, :]) & (at_M[None, :] < end_N[:, None])
            p = tl.where(seen, p, 0.0)
        dv_ND = tl.dot(p.to(q_MD.dtype), dout_MD, dv_ND)
        ds = p * (tl.dot(v_ND, dout_MD.T) - delta_M[None, :])
        dk_ND = tl.dot(ds.to(q_MD.dtype), q_MD, dk_ND)
    offset = (key.to(tl.int64) * tl.num_programs(1) + part) * D
    at_ND = offset[:, None] + tl.arange(0, D)[None, :]
    tl.store(sum_dk + at_ND, dk_ND * scale, mask=ok[:, None])
    tl.store(sum_dv + at_ND, dv_ND, mask=ok[:, None])


@dataclass(frozen=True)
class SpanCall:
    """The launches of one call."""

    call: BlockCall
    spans: KeySpans

    @property
    def shapes(self) -> SpanShapes:
        """Tile shapes of the call's head width."""
        return span_shapes(self.call.head_dim, shared_memory_of(self.call.q_THD.device))

    def attend(self, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Write out [T, H, D] and lse [H, T] of the spans alone."""
        call, shape = self.call, self.shapes.forward
        launch(
            forward_spans,
            self._row_tiles(shape),
            q=call.q_THD,
            **call.descriptors(shape.keys),
            out=out_THD,
            lse=lse_HT,
            **self._row_spans(),
            tokens=call.tokens,
            keys=call.k_SKD.shape[0],
            stride_t=call.q_THD.stride(0),
            scale_log2=call.scale_log2,
            **call.sizes(shape),
        )

    def dq(self, dout_THD: Tensor, stats_TH2: Tensor, dq_THD: Tensor) -> None:
        """Write the spans' part to dq [T, H, D]."""
        call, shape = self.call, self.shapes.dq
        launch(
            dq_spans,
            self._row_tiles(shape),
            q=call.q_THD,
            dout=dout_THD,
            stats=stats_TH2,
            **call.descriptors(shape.keys),
            dq=dq_THD,
            **self._row_spans(),
            tokens=call.tokens,
            keys=call.k_SKD.shape[0],
            stride_t=call.q_THD.stride(0),
            scale=call.scale,
            **call.sizes(shape),
        )

    def dkdv(self, dout_THD: Tensor, stats_TH2: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """float32 dk and dv [S, heads, D] of the spans, and of the sinks before them."""
        call, shape, copies = self.call, self.shapes.dkdv, self.spans.copies
        keys, count = call.k_SKD.shape[0], heads.stop - heads.start
        sum_dk, sum_dv = (stats_TH2.new_empty(keys, count, call.head_dim) for _ in range(2))
        if keys:
            launch(
                dkdv_spans,
                (ceil_div(keys, shape.keys), count),
                q_desc=call.descriptor(call.q_THD, shape.rows),
                dout_desc=call.descriptor(dout_THD, shape.rows),
                stats=stats_TH2,
                **call.descriptors(shape.keys),
                sum_dk=sum_dk,
                sum_dv=sum_dv,
                first=self.spans.first_row_S,
                end=self.spans.end_row_S,
                first_kv_head=heads.start,
                heads=call.heads,
                tokens=call.tokens,
                keys=keys,
                scale=call.scale,
                **call.sizes(shape),
            )
        if copies is not None:
            rows, first, end = (x.flatten() for x in copies[:3])
            some = replace(call, k_SKD=call.k_SKD[rows], v_SKD=call.v_SKD[rows])
            spans = replace(self.spans, first_row_S=first, end_row_S=end, copies=None)
            part_dk, part_dv = SpanCall(some, spans).dkdv(dout_THD, stats_TH2, heads)
            copies.add(part_dk, sum_dk)
            copies.add(part_dv, sum_dv)
        return sum_dk, sum_dv

    def _row_spans(self) -> dict[str, Any]:
        spans, sinks = self.spans, self.spans.sink_first_T is not None
        first, end = (spans.sink_first_T, spans.sink_end_T) if sinks else (spans.first_T, spans.end_T)
        return {"first": spans.first_T, "end": spans.end_T, "sink_first": first, "sink_end": end, "SINKS": sinks}

    def _row_tiles(self, shape: TileShape) -> tuple[int, int]:
        return ceil_div(self.call.tokens * self.call.group, shape.rows), self.call.kv_heads
