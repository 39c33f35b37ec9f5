"""Sliding-window attention as a LocalAttention: every query sees the last tokens of its document, and its first ones.

On CUDA, a window is a span of neighbouring keys to the Triton kernels (kernels/triton/spans.py); a varlen flash kernel,
or elsewhere kernels/common/reference.py, masks a band and is given its keys alone. So the work is T times the window,
not T squared. The first tokens, or sinks (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453), are part of the spans, or
further calls in plain PyTorch for each document that is longer than the window.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common.geometry import KeySpans
from moba_train.attention.kernels.common.merge import merge_into, nothing_seen
from moba_train.attention.kernels.common.reference import (
    Mask,
    accumulation_dtype,
    masked_attend,
    masked_attend_backward,
)
from moba_train.attention.kernels.table import call_problem
from moba_train.attention.kernels.varlen import PackagedFlash2, Segments, TorchFlash, VarlenKernel
from moba_train.attention.kind import AttentionKind, KindFacts, MicroBatch, TokenBytes
from moba_train.attention.layout import Layout, TokenRange, TokenRanges, joined_ranges, kept
from moba_train.attention.protocol import (
    AttentionFacts,
    BackwardState,
    Gradients,
    LocalAttention,
    Selection,
    head_parts,
)
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms import window_sinks
from moba_train.mechanisms.local_blocks import key_spans
from moba_train.mechanisms.window_edges import WindowExchange

_LEAST_TILE = 128
"""Queries of a masked call at least: it is given as many keys as the window and these queries have."""

_ROWS_AT_ONCE = 2**18
"""Query rows (tokens x heads): 64 MiB of queries in bfloat16, for heads of 128."""

_BLOCK = 128
"""Tokens of a block, of which none is selected, where the kernels of block attention take windows."""


@dataclass(frozen=True)
class Band:
    """Queries of adjacent tokens and the adjacent keys that any of them sees."""

    queries: TokenRange
    keys: TokenRange
    rows: slice
    """Rows of the queries."""
    key_rows: slice
    """Rows of the keys."""
    sinks: bool = False
    """True if the keys are sinks, which queries see that have them behind their window."""

    @property
    def fits_kernels(self) -> bool:
        """True if the mask is the kernels', which ends at the last query and key."""
        return not self.sinks and self.queries.stop == self.keys.stop


def heads_at_once(q_THD: Tensor, k_SKD: Tensor) -> Iterator[tuple[slice, slice]]:
    """`head_parts` that a backward pass takes at once, so that its memory, several times that of their queries, stays
    small compared with that of all queries."""
    tokens, heads, _ = q_THD.shape
    return head_parts(heads, k_SKD.shape[1], _ROWS_AT_ONCE * k_SKD.shape[1] // max(1, tokens * heads))


def bands(q_ranges: TokenRanges, k_ranges: TokenRanges, window: int, tile: int) -> Iterator[Band]:
    """Bands of at most `tile` queries that together have every pair of a query and a key in its window.

    Those whose last query and last key are not the same token have queries of at most `window` tokens: what is behind
    the end of the given keys.
    """
    row = 0
    for start, stop in joined_ranges(q_ranges):
        for first in range(start, stop, tile):
            queries = TokenRange(first, min(first + tile, stop))
            key_row = 0
            for begin, end in joined_ranges(k_ranges):
                among = TokenRange(max(queries.start, begin), min(queries.stop, end))
                behind = TokenRange(max(queries.start, end), min(queries.stop, end + window - 1))
                for part in (among, behind):
                    if part.start < part.stop:
                        keys = TokenRange(max(begin, part.start - window + 1), min(end, part.stop))
                        rows = slice(row + part.start - start, row + part.stop - start)
                        yield Band(part, keys, rows, slice(key_row + keys.start - begin, key_row + keys.stop - begin))
                key_row += end - begin
        row += stop - start


def sink_bands(layout: Layout, window: int, sinks: int, tile: int) -> Iterator[Band]:
    """Bands of at most `tile` queries with every pair of a query and a sink behind the query's window: of the first
    `sinks` tokens of its document. Sinks in the window belong to `bands`."""
    for document, end in pairwise(layout.edges):
        behind = document + window  # the first query that lacks a token of its document
        key_row = 0
        for begin, stop in joined_ranges(layout.key_ranges):
            keys = TokenRange(max(begin, document), min(stop, document + sinks))
            key_rows = slice(key_row + keys.start - begin, key_row + keys.stop - begin)
            key_row += stop - begin
            if keys.start >= keys.stop:
                continue
            row = 0
            for first, last in joined_ranges(layout.query_ranges):
                for start in range(max(first, behind), min(last, end), tile):
                    queries = TokenRange(start, min(last, end, start + tile))
                    rows = slice(row + queries.start - first, row + queries.stop - first)
                    yield Band(queries, keys, rows, key_rows, sinks=True)
                row += last - first


@kept
def _all_bands(layout: Layout, window: int, sinks: int, tile: int) -> list[Band]:
    """`bands` and, with sinks, `sink_bands`."""
    of_sinks = sink_bands(layout, window, sinks, tile) if sinks else ()
    return [*bands(layout.query_ranges, layout.key_ranges, window, tile), *of_sinks]


@kept
def _spans(layout: Layout, window: int, sinks: int) -> KeySpans:
    """The keys of each query, for the kernels of spans."""
    starts_T = layout.cu_seqlens.long()[layout.q_documents]
    first_T = torch.maximum(layout.q_tokens - (window - 1), starts_T)
    return window_sinks.with_sinks(key_spans(first_T, layout), first_T, layout, sinks, window)


class WindowAttention(LocalAttention):
    """Every query attends to the last `window` tokens of its document, its own included, and to the first `sinks`."""

    def __init__(
        self, window: int, head_dim: int, backend: str = "auto", sinks: int = 0, cap: float | None = None
    ) -> None:
        """`backend`: reference for plain PyTorch on any device, which alone has a `cap` of the scores; any other: the
        fastest that can run."""
        self.window = window
        self.sinks = sinks
        exchange = None if sinks else WindowExchange(window)
        self.facts = AttentionFacts(work_grows=False, exchange=exchange)
        self.scale = head_dim**-0.5
        self.backend = backend
        self.cap = cap
        self.blocks = BlockAttention(_BLOCK, self.scale, "triton", "attention.window.backend")

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the given keys in each query's window."""
        if self.takes_spans(q_THD, layout):
            return self.blocks.attend(q_THD, k_SKD, v_SKD, layout, *self._selection_and_spans(q_THD, k_SKD, layout))
        calls = self._calls(q_THD, layout)
        parts = (self._attend(q_THD[band.rows], k_SKD, v_SKD, layout, band, kernel) for band, kernel in calls)
        # What the first call gives is joined with nothing only where it lacks some of the queries.
        first = int(bool(calls) and calls[0][0].rows == slice(0, q_THD.shape[0]))
        out_THD, lse_HT = next(parts) if first else nothing_seen(q_THD)
        for (band, _), part in zip(calls[first:], parts, strict=True):
            merge_into(out_THD[band.rows], lse_HT[:, band.rows], *part)
        return out_THD, lse_HT

    def _attend(
        self,
        q_tHD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        layout: Layout,
        band: Band,
        kernel: type[VarlenKernel] | None,
    ) -> tuple[Tensor, Tensor]:
        k_sKD, v_sKD = k_SKD[band.key_rows], v_SKD[band.key_rows]
        if kernel is None:
            return masked_attend(q_tHD, k_sKD, v_sKD, self._mask(layout, band), self.scale, prefix=False, cap=self.cap)
        return kernel.forward(q_tHD, k_sKD, v_sKD, self._segments(layout, band), self.scale)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        if self.takes_spans(state.q, layout):
            return self.blocks.attend_backward(state, layout, *self._selection_and_spans(state.q, state.k, layout))
        calls = self._calls(state.q, layout)
        # A sum of two is rounded once in any dtype. With all keys a query has at most two terms, its window's and its
        # sinks'; a key has one for each call.
        wide = accumulation_dtype(state.q.dtype)
        dq_THD = torch.zeros_like(state.q, dtype=wide if len(calls) > 1 and layout.k_ranges is not None else None)
        dk_SKD, dv_SKD = (torch.zeros_like(x, dtype=wide if len(calls) > 1 else None) for x in (state.k, state.v))
        for band, kernel in calls:
            part = state.part(rows=band.rows)._replace(k=state.k[band.key_rows], v=state.v[band.key_rows])
            # Some heads at a time: the kernel's backward pass takes several times the memory of the queries that it is
            # given.
            for heads, kv_heads in heads_at_once(part.q, part.k):
                slices = part.part(heads=heads, kv_heads=kv_heads)
                if kernel is None:
                    mask = self._mask(layout, band)
                    grads = masked_attend_backward(slices, mask, self.scale, prefix=False, cap=self.cap)
                else:
                    fixed_order = torch.are_deterministic_algorithms_enabled()
                    grads = kernel.backward(slices, self._segments(layout, band), self.scale, deterministic=fixed_order)
                dq_THD[band.rows, heads] += grads[0]
                for sum_SKD, grad_sKD in ((dk_SKD, grads[1]), (dv_SKD, grads[2])):
                    sum_SKD[band.key_rows, kv_heads] += grad_sKD
        return dq_THD.to(state.q.dtype), dk_SKD.to(state.k.dtype), dv_SKD.to(state.v.dtype)

    def _calls(self, q_THD: Tensor, layout: Layout) -> list[tuple[Band, type[VarlenKernel] | None]]:
        """The bands of a layout, each with the kernel for it; None: kernels/common/reference.py."""
        kernel = self._kernel(q_THD, layout)
        # A masked call computes all scores of its tile, so tiles of about the window waste half; a kernel skips what is
        # masked.
        tile = max(self.window, _LEAST_TILE) if kernel is None else max(1, layout.total)
        found = _all_bands(layout, self.window, self.sinks, tile)
        return [(band, kernel if band.fits_kernels else None) for band in found]

    def takes_spans(self, q_THD: Tensor, layout: Layout) -> bool:
        """True if the Triton kernels take the windows of queries like these. A new token alone is left to a flash
        kernel: tables of spans have all keys."""
        return self.backend != "reference" and len(q_THD) > 1 and not call_problem(q_THD, layout, _BLOCK, 0)

    def _selection_and_spans(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> tuple[Selection, KeySpans]:
        """No selected block, and the keys of each query."""
        selected_HT0 = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0], 0), dtype=torch.int32)
        selection = self.blocks.selection(selected_HT0, q_THD, layout, k_SKD.shape[1])
        return selection, _spans(layout, self.window, self.sinks)

    def _kernel(self, q_THD: Tensor, layout: Layout) -> type[VarlenKernel] | None:
        """The kernel for queries like these; None: there is none."""
        documents = layout.cu_seqlens.numel() - 1
        if self.backend == "reference":
            return None
        for kernel in (TorchFlash, PackagedFlash2):
            if documents <= kernel.most_segments and not kernel.refuses(q_THD):
                return kernel
        return None

    def _segments(self, layout: Layout, band: Band) -> Segments:
        """The documents among a band's queries and keys."""
        cu_q, cu_k = ((layout.cu_seqlens - start).clamp_(0, stop - start) for start, stop in (band.queries, band.keys))
        max_q, max_k = (min(layout.max_seqlen, stop - start) for start, stop in (band.queries, band.keys))
        return Segments(cu_q, cu_k, max_q, max_k, causal=True, window=self.window)

    def _mask(self, layout: Layout, band: Band) -> Mask:
        """The mask inside a band: bool [1, rows, keys]."""
        device = layout.cu_seqlens.device
        q_tokens, k_tokens = (torch.arange(start, stop, device=device) for start, stop in (band.queries, band.keys))
        q_documents, k_documents = layout.documents(q_tokens), layout.documents(k_tokens)

        def mask(rows: slice, keys: slice) -> Tensor:
            back = q_tokens[rows, None] - k_tokens[keys]
            if band.sinks:  # of the queries' document
                return (back >= self.window).unsqueeze(0)
            same = q_documents[rows, None] == k_documents[keys]
            return (same & (back >= 0) & (back < self.window)).unsqueeze(0)

        return mask


class WindowKind(AttentionKind):
    """Sliding-window attention with sinks: what each MoBA layer has to be better than."""

    name = "window"
    facts = KindFacts(takes_sink=True)

    class Options(Section):
        """Options of `kind: window`."""

        window: Length = Field(
            2048, description="last tokens of its document that a query attends to, its own included"
        )
        sinks: int = Field(0, ge=0, description="first tokens of a document that all of it attends to")
        backend: Literal["auto", "reference"] = Field(
            "auto",
            description="auto: on a GPU the Triton kernels of `moba_window`, or a varlen flash kernel if they "
            "cannot run; reference: plain PyTorch",
        )

    def __init__(self, options: Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.window = options.window
        self.sinks = options.sinks
        self.attentions = (WindowAttention(options.window, head_dim, options.backend, options.sinks),)

    @classmethod
    def full_attention(cls, options: Any, keep_windows: bool = False) -> LayerAttention | None:
        """Kind `full`, or itself: models with windows are other models without them."""
        return LayerAttention(cls.name, options) if keep_windows else super().full_attention(options)

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Those of full attention inside the window, then a window for each token, and the sinks behind it."""
        return sum(map(self._pairs_of_document, lengths))

    def _pairs_of_document(self, length: int) -> float:
        outside = max(0, length - self.window)  # queries that have tokens behind their window
        growing = min(outside, self.sinks)  # of these, queries that have 1, 2, ... sinks behind it
        sinks = growing * (growing + 1) / 2 + (outside - growing) * self.sinks
        inside = min(length, self.window)
        return inside**2 / 2 + outside * (self.window - 0.5) + sinks

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Gradients of keys and values are summed in float32. Copies of the sinks for groups of queries, up to 128 of
        them a tenth of that, are not counted."""
        return TokenBytes(workspace=4 * 2 * model.kv_heads * model.head_width)
