"""Dense causal attention of any runs of queries to any runs of keys, as calls of kernels that know only documents.

A strip of neighbouring queries sees, of the given keys, all that come before the strip, and its own tokens causally if
they are among them. That is one call for a kernel whose causal mask may have more keys than queries (the last query of
a document then stands beside its last key), and at most two for any other: a rectangle and a square, merged. Which
documents a call spans is settled on the device; all else follows from the runs, on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from moba_train.attention.dense import DenseBackend, nothing_seen
from moba_train.attention.masked import accumulation_dtype
from moba_train.attention.merge import merge
from moba_train.attention.protocol import Layout, Runs, joined
from moba_train.attention.varlen import Gradients, Segments


@dataclass(frozen=True)
class Strip:
    """Neighbouring queries that see the same keys, apart from their own tokens'."""

    rows: slice
    """Of the queries."""
    earlier: int
    """The first `earlier` rows of the keys come before all of them, or are a lone query and what comes before it."""
    own: bool
    """Whether the rows of the keys that follow are their own tokens."""

    def calls(self, bottom_right: bool) -> list[tuple[slice, bool]]:
        """(rows of the keys, whether causal) of the calls that cover what the strip sees, each key once."""
        end = self.earlier + self.rows.stop - self.rows.start
        if not self.own:
            calls = [(slice(0, self.earlier), False)]
        elif bottom_right:
            calls = [(slice(0, end), True)]
        else:
            calls = [(slice(0, self.earlier), False), (slice(self.earlier, end), True)]
        return [(keys, causal) for keys, causal in calls if keys.start < keys.stop]


def strips(q_runs: Runs, k_runs: Runs) -> list[Strip]:
    """The fewest strips that make up the queries, in order. A strip that sees no keys has `earlier` 0 and not `own`."""
    q_runs, k_runs = joined(q_runs), joined(k_runs)
    edges = {edge for run in k_runs for edge in run}
    result: list[Strip] = []
    row = 0
    for first, last in q_runs:
        cuts = sorted({first, last, *(edge for edge in edges if first < edge < last)})
        for start, stop in pairwise(cuts):
            strip = Strip(
                rows=slice(row, row + stop - start),
                earlier=sum(max(0, min(end, start) - begin) for begin, end in k_runs),
                own=any(begin <= start < end for begin, end in k_runs),
            )
            row = strip.rows.stop
            if strip.own and stop - start == 1:
                strip = replace(strip, earlier=strip.earlier + 1, own=False)
            if result and not strip.own and replace(result[-1], rows=strip.rows) == strip:
                result[-1] = replace(strip, rows=slice(result[-1].rows.start, row))
            else:
                result.append(strip)
    return result


@dataclass(frozen=True)
class Piece:
    """One kernel call of a strip's queries."""

    keys: slice
    """Rows of the keys."""
    segments: Segments


Pieces = list[tuple[slice, list[Piece]]]
"""(rows of the queries, the calls that cover all that they see) of every strip, in order."""


def pieces(layout: Layout, bottom_right: bool) -> Pieces:
    """The calls for a kernel with that causal mask (`DenseBackend.bottom_right`); kept with the layout."""
    key = ("dense pieces", bottom_right)
    if key not in layout.cache:
        layout.cache[key] = _cut(layout, bottom_right)
    return cast(Pieces, layout.cache[key])


def _cut(layout: Layout, bottom_right: bool) -> Pieces:
    q_edges, k_edges = (_document_edges(layout.cu_seqlens, runs) for runs in (layout.q_runs, layout.k_runs))

    def piece(rows: slice, keys: slice, causal: bool) -> Piece:
        max_q, max_k = (min(layout.max_seqlen, part.stop - part.start) for part in (rows, keys))
        return Piece(keys, Segments(_clip(q_edges, rows), _clip(k_edges, keys), max_q, max_k, causal))

    runs = (((0, layout.total),) if runs is None else runs for runs in (layout.q_runs, layout.k_runs))
    return [
        (strip.rows, [piece(strip.rows, keys, causal) for keys, causal in strip.calls(bottom_right)])
        for strip in strips(*runs)
    ]


def _document_edges(cu_seqlens: Tensor, runs: Runs | None) -> Tensor:
    """int32 [docs + 1]: where each document begins among the rows of these runs."""
    if runs is None:
        return cu_seqlens
    edges = torch.zeros_like(cu_seqlens)
    for start, stop in runs:
        edges += (cu_seqlens - start).clamp_(0, stop - start)
    return edges


def _clip(edges: Tensor, rows: slice) -> Tensor:
    """The same among `rows` only."""
    return (edges - rows.start).clamp_(0, rows.stop - rows.start)


def attend(
    backend: type[DenseBackend], q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """`LocalAttention.attend` of dense causal attention by `backend`."""
    results = []
    for rows, calls in pieces(layout, backend.bottom_right):
        partial = [
            backend.forward(q_THD[rows], k_SKD[call.keys], v_SKD[call.keys], call.segments, scale) for call in calls
        ]
        results.append(reduce(lambda a, b: merge(*a, *b), partial) if partial else nothing_seen(q_THD[rows]))
    outs, lses = zip(*(results or [nothing_seen(q_THD)]), strict=True)
    return _concatenated(outs, 0), _concatenated(lses, 1)


def attend_backward(
    backend: type[DenseBackend],
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
    scale: float,
) -> Gradients:
    """`LocalAttention.attend_backward` of dense causal attention by `backend`."""
    parts = pieces(layout, backend.bottom_right)

    def backward(rows: slice, call: Piece) -> Gradients:
        k, v = k_SKD[call.keys], v_SKD[call.keys]
        lse = lse_HT[:, rows].contiguous()
        return backend.backward(dout_THD[rows], q_THD[rows], k, v, out_THD[rows], lse, call.segments, scale)

    if [len(calls) for _, calls in parts] == [1] and parts[0][1][0].keys == slice(0, k_SKD.shape[0]):
        return backward(parts[0][0], parts[0][1][0])
    # A sum of two is rounded once in any dtype, so only more terms need a wider one. Those of dq are a strip's calls,
    # at most two; those of dk and dv are at most one for each strip.
    dtype = k_SKD.dtype if len(parts) <= 2 else accumulation_dtype(k_SKD.dtype)
    dk_SKD, dv_SKD = torch.zeros_like(k_SKD, dtype=dtype), torch.zeros_like(v_SKD, dtype=dtype)
    dqs = []
    for rows, calls in parts:
        partial = []
        for call in calls:
            dq, dk, dv = backward(rows, call)
            partial.append(dq)
            dk_SKD[call.keys].add_(dk)
            dv_SKD[call.keys].add_(dv)
        dqs.append(reduce(torch.add, partial) if partial else torch.zeros_like(q_THD[rows]))
    return _concatenated(dqs or [torch.zeros_like(q_THD)], 0), dk_SKD.to(k_SKD.dtype), dv_SKD.to(v_SKD.dtype)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    """As torch.cat, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
