"""Full attention of any token ranges of queries to any token ranges of keys, cut into calls of kernels that know only
documents.

Of the given keys, a chunk of neighbouring queries sees all that come before the chunk, and its own tokens causally if
they are among the keys. That is one call for a kernel whose causal mask may have more keys than queries (the last query
of a document is aligned with its last key), and at most two for any other: a rectangle and a square, merged. Which
documents a call covers is computed on the device; all else follows from the ranges, on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import rows_before
from moba_train.attention.kernels.common.merge import merge, nothing_seen
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.varlen import Segments, VarlenKernel
from moba_train.attention.layout import Layout, TokenRanges, joined_ranges, kept
from moba_train.attention.protocol import BackwardState, Gradients


@dataclass(frozen=True)
class QueryChunk:
    """Neighbouring queries that see the same keys, apart from their own tokens'."""

    rows: slice
    """Rows of the queries."""
    earlier: int
    """The first `earlier` rows of the keys come before the chunk, or are a single query and what comes before it."""
    own: bool
    """True if the next rows of the keys are the chunk's own tokens."""

    def visible(self, bottom_right: bool) -> list[tuple[slice, bool]]:
        """(rows of the keys, whether causal) of the calls that cover what the chunk sees, each key once."""
        end = self.earlier + self.rows.stop - self.rows.start
        if not self.own:
            calls = [(slice(0, self.earlier), False)]
        elif bottom_right:
            calls = [(slice(0, end), True)]
        else:
            calls = [(slice(0, self.earlier), False), (slice(self.earlier, end), True)]
        return [(keys, causal) for keys, causal in calls if keys.start < keys.stop]


def query_chunks(q_ranges: TokenRanges, k_ranges: TokenRanges) -> list[QueryChunk]:
    """The fewest chunks that make up the queries, in order. A chunk that sees no keys has `earlier` 0 and not `own`."""
    q_ranges = joined_ranges(q_ranges)
    k_ranges = joined_ranges(k_ranges)
    edges = {edge for k_range in k_ranges for edge in k_range}
    chunks: list[QueryChunk] = []
    row = 0
    for first, last in q_ranges:
        cuts = sorted({first, last, *(edge for edge in edges if first < edge < last)})
        for start, stop in pairwise(cuts):
            chunk = QueryChunk(
                rows=slice(row, row + stop - start),
                earlier=sum(max(0, min(end, start) - begin) for begin, end in k_ranges),
                own=any(begin <= start < end for begin, end in k_ranges),
            )
            row = chunk.rows.stop
            # A single query sees its own key as it sees earlier ones, without a mask: neighbours of this form become
            # one call.
            if chunk.own and stop - start == 1:
                chunk = replace(chunk, earlier=chunk.earlier + 1, own=False)
            if chunks and not chunk.own and replace(chunks[-1], rows=chunk.rows) == chunk:
                chunks[-1] = replace(chunk, rows=slice(chunks[-1].rows.start, row))
            else:
                chunks.append(chunk)
    return chunks


@dataclass(frozen=True)
class KernelCall:
    """One kernel call of a chunk's queries."""

    keys: slice
    """Rows of the keys."""
    segments: Segments


KernelCalls = list[tuple[slice, list[KernelCall]]]
"""(rows of the queries, the calls that cover all that they see) of every chunk, in order."""


@kept
def kernel_calls(layout: Layout, bottom_right: bool) -> KernelCalls:
    """The calls for a kernel with that causal mask (`VarlenKernel.bottom_right`)."""
    # int32 [docs + 1]: where each document begins among the given queries and keys.
    q_edges, k_edges = (rows_before(layout.cu_seqlens, ranges) for ranges in (layout.query_ranges, layout.key_ranges))

    def call(rows: slice, keys: slice, causal: bool) -> KernelCall:
        # Bounds from ranges alone: exact lengths would make the host wait for the GPU.
        max_q, max_k = (min(layout.max_seqlen, part.stop - part.start) for part in (rows, keys))
        return KernelCall(keys, Segments(_clip(q_edges, rows), _clip(k_edges, keys), max_q, max_k, causal))

    return [
        (chunk.rows, [call(chunk.rows, keys, causal) for keys, causal in chunk.visible(bottom_right)])
        for chunk in query_chunks(layout.query_ranges, layout.key_ranges)
    ]


def _clip(edges: Tensor, rows: slice) -> Tensor:
    """int32 [docs + 1]: where each document begins among `rows`, from where it begins among all rows."""
    return (edges - rows.start).clamp_(0, rows.stop - rows.start)


def attend(
    backend: type[VarlenKernel], q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """`LocalAttention.attend` of full attention by `backend`."""
    results = []
    for rows, calls in kernel_calls(layout, backend.bottom_right):
        partial = [
            backend.forward(q_THD[rows], k_SKD[call.keys], v_SKD[call.keys], call.segments, scale) for call in calls
        ]
        results.append(reduce(lambda a, b: merge(*a, *b), partial) if partial else nothing_seen(q_THD[rows]))
    outs, lses = zip(*(results or [nothing_seen(q_THD)]), strict=True)
    return _concatenated(outs, 0), _concatenated(lses, 1)


def attend_backward(backend: type[VarlenKernel], state: BackwardState, layout: Layout, scale: float) -> Gradients:
    """`LocalAttention.attend_backward` of full attention by `backend`."""
    _, q_THD, k_SKD, v_SKD, _, _ = state
    chunks = kernel_calls(layout, backend.bottom_right)

    def backward(rows: slice, call: KernelCall) -> Gradients:
        part = state.part(rows=rows)._replace(k=k_SKD[call.keys], v=v_SKD[call.keys])
        return backend.backward(part, call.segments, scale, deterministic=torch.are_deterministic_algorithms_enabled())

    if [len(calls) for _, calls in chunks] == [1] and chunks[0][1][0].keys == slice(0, k_SKD.shape[0]):
        return backward(chunks[0][0], chunks[0][1][0])
    # A sum of two is rounded once in any dtype, so only more terms need a wider one. Those of dq are a chunk's calls,
    # at most two; those of dk and dv are at most one for each chunk.
    dtype = k_SKD.dtype if len(chunks) <= 2 else accumulation_dtype(k_SKD.dtype)
    dk_SKD, dv_SKD = torch.zeros_like(k_SKD, dtype=dtype), torch.zeros_like(v_SKD, dtype=dtype)
    dqs = []
    for rows, calls in chunks:
        partial = []
        for call in calls:
            dq, dk, dv = backward(rows, call)
            partial.append(dq)
            dk_SKD[call.keys].add_(dk)
            dv_SKD[call.keys].add_(dv)
        dqs.append(reduce(torch.add, partial) if partial else torch.zeros_like(q_THD[rows]))
    return _concatenated(dqs or [torch.zeros_like(q_THD)], 0), dk_SKD.to(k_SKD.dtype), dv_SKD.to(v_SKD.dtype)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, without a copy where there is one part only."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
