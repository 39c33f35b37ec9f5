"""Attention to a sliding window, for queries anywhere in a packed sequence. Forward only.

Shape suffixes: n queries, T keys of the whole sequence, H query heads, K key/value heads, D head width.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.masked import Mask, masked_attend
from moba_train.attention.protocol import Layout, TokenRange


class QueryRange(NamedTuple):
    """Queries of one document that are neighbours."""

    row: int
    """The row of the first one among the layout's queries."""
    tokens: TokenRange
    """Their indices in the packed sequence."""
    document: TokenRange
    """The tokens of their document."""


def query_ranges(layout: Layout) -> Iterator[QueryRange]:
    """The layout's queries, in order, known on the host."""
    row = 0
    documents = [TokenRange(*pair) for pair in zip(layout.edges[:-1], layout.edges[1:], strict=True)]
    for start, stop in ((0, layout.total),) if layout.q_ranges is None else layout.q_ranges:
        for document in documents:
            tokens = TokenRange(max(start, document.start), min(stop, document.stop))
            if tokens.start < tokens.stop:
                yield QueryRange(row, tokens, document)
                row += tokens.stop - tokens.start


def attend_to_window(
    q_nHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Layout, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [n, H, D], lse [H, n]) of the layout's queries over the `window` tokens that end with their own.

    Plain PyTorch. A quarter of a window of queries at a time meets the keys in their reach, so that the work is 1.25
    times that of the window.
    """
    out_nHD = torch.empty_like(q_nHD)
    lse_Hn = torch.empty(
        (q_nHD.shape[1], q_nHD.shape[0]), dtype=torch.promote_types(q_nHD.dtype, torch.float32), device=q_nHD.device
    )
    size = max(window // 4, 16)
    for row, tokens, document in query_ranges(layout):
        for first in range(tokens.start, tokens.stop, size):
            last = min(first + size, tokens.stop)
            reach = slice(max(document.start, first - window + 1), last)
            rows = slice(row + first - tokens.start, row + last - tokens.start)
            seen = _window_mask(slice(first, last), reach, window, q_nHD.device)
            out_nHD[rows], lse_Hn[:, rows] = masked_attend(
                q_nHD[rows], k_TKD[reach], v_TKD[reach], seen, scale, prefix=False
            )
    return out_nHD, lse_Hn


def _window_mask(queries: slice, keys: slice, window: int, device: torch.device) -> Mask:
    """The mask of these tokens as queries and those as keys."""
    distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=device)
    seen = (distance >= 0) & (distance < window)
    return lambda rows, columns: seen[rows, columns]
