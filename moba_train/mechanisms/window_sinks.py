"""First keys of a document, or sinks, that queries see in addition to a span of keys: for the kernels of spans.

Shape suffixes: T queries, S keys; d documents longer than the window, C chunks of queries, P keys of a chunk's copy.
"""

from dataclasses import replace

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import KeySpans, SinkCopies
from moba_train.attention.layout import Layout

QUERIES_OF_SINKS = 2048
"""Queries that share a copy of the sinks at most. A backward kernel has one program for each head and tile of keys:
with one copy for 128K queries, both passes took 52.3 ms with 64 sinks and 38.3 without (window 2048, an H200)."""
_TILE = 128
"""Keys of a tile divide it: no tile has two copies."""


def with_sinks(spans: KeySpans, first_tokens_T: Tensor, layout: Layout, sinks: int, window: int) -> KeySpans:
    """`spans`, which begin at these tokens (int64, ascending), and before each the first `sinks` tokens of its
    document, which has some there only if it is longer than `window`."""
    if not sinks or layout.max_seqlen <= window or not len(layout.k_tokens):
        return spans
    starts_T = layout.cu_seqlens.long()[layout.q_documents]
    first_T = torch.searchsorted(layout.k_tokens, starts_T)
    end_T = torch.searchsorted(layout.k_tokens, torch.minimum(starts_T + sinks, first_tokens_T))
    some_T = first_T < end_T
    return replace(
        spans,
        sink_first_T=first_T.where(some_T, len(layout.k_tokens)).int(),
        sink_end_T=end_T.where(some_T, 0).int(),
        copies=_copies(first_tokens_T, spans.end_row_S, layout, sinks, window),
    )


def _copies(first_tokens_T: Tensor, end_row_S: Tensor, layout: Layout, sinks: int, window: int) -> SinkCopies:
    # Short documents have none. The host knows only how many others there may be.
    edges = layout.cu_seqlens.long()
    long_d = (edges.diff() <= window).int().argsort(stable=True)[: max(1, layout.total // window)]
    starts_d, ends_d = edges[long_d], edges[long_d + 1]
    key_d = torch.searchsorted(layout.k_tokens, starts_d)
    end_key_d = torch.searchsorted(layout.k_tokens, torch.minimum(starts_d + sinks, ends_d))
    row_d = torch.searchsorted(first_tokens_T, starts_d, right=True)
    end_d = torch.searchsorted(layout.q_tokens, ends_d).where(key_d < end_key_d, 0)
    chunks_d = (end_d - row_d + QUERIES_OF_SINKS - 1).clamp_(min=0) // QUERIES_OF_SINKS
    last_d = chunks_d.cumsum(0)
    ids_C = torch.arange(len(first_tokens_T) // QUERIES_OF_SINKS + len(long_d), device=last_d.device)
    of_C = torch.searchsorted(last_d, ids_C, right=True).clamp_(max=len(long_d) - 1)
    row_C = row_d[of_C] + (ids_C - (last_d - chunks_d)[of_C]) * QUERIES_OF_SINKS
    end_C = torch.minimum(row_C + QUERIES_OF_SINKS, end_d[of_C])
    rows_dP = key_d[:, None] + torch.arange(-(-sinks // _TILE) * _TILE, device=last_d.device)
    rows_dP = rows_dP.where(rows_dP < end_key_d[:, None], -1)
    rows_CP = rows_dP[of_C].clamp_(min=0)
    first_CP = torch.maximum(end_row_S[rows_CP], row_C[:, None])
    return SinkCopies(rows_CP, first_CP.int(), end_C[:, None].expand_as(rows_CP).int(), chunks_d, rows_dP)
