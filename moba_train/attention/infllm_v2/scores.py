"""The parameter-free score of a block (Zhao et al. 2025, arXiv:2509.24663).

Keys are averaged in windows of `window` tokens at every `stride` tokens. A query scores the windows that are complete
at its own position: softmax over their scaled scores. The probabilities are summed over the query heads that share a
key/value head, and a block's score is the largest sum among the windows that overlap it.

A window is a run of neighbouring units of `stride` tokens, of which the caller has the mean keys. Unit w begins window
w; units and blocks are counted as in blocks/geometry.py, from each document's start.

Shape suffixes: t a chunk of the queries, W windows in reach of the chunk, N blocks in reach, H query heads, K key/value
heads, G = H / K, D head width.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moba_train.attention.blocks.geometry import block_edges, block_ids, first_blocks
from moba_train.attention.protocol import Layout


@dataclass(frozen=True)
class WindowSizes:
    """Sizes in tokens. `stride` divides `window` and `block`; no window is longer than a block."""

    window: int
    stride: int
    block: int


@dataclass(frozen=True)
class Reach:
    """What the queries of a chunk may look at: units and blocks of their documents, up to the last query."""

    units: slice
    blocks: slice
    longest: int
    """Tokens of the longest history among these queries, their own token included."""


def reach(layout: Layout, rows: slice, sizes: WindowSizes) -> Reach:
    """The reach of these rows of the layout's queries, found on the host. `rows` is not empty."""
    edges = layout.edges
    first, last = (_token_of_row(layout, row) for row in (rows.start, rows.stop - 1))
    first_document, last_document = (bisect_right(edges, token) - 1 for token in (first, last))

    def in_reach(size: int) -> slice:
        before = layout.cached(("units before", size), lambda: _units_before(edges, size))
        return slice(before[first_document], before[last_document] + (last - edges[last_document]) // size + 1)

    histories = [stop - start for start, stop in pairwise((*edges[first_document : last_document + 1], last + 1))]
    return Reach(in_reach(sizes.stride), in_reach(sizes.block), max(histories))


def _token_of_row(layout: Layout, row: int) -> int:
    for start, stop in layout.q_ranges or ():
        if row < stop - start:
            return start + row
        row -= stop - start
    return row


def _units_before(edges: tuple[int, ...], size: int) -> list[int]:
    """For each document, the units of `size` tokens in the documents before it."""
    return [0, *accumulate(-(-(stop - start) // size) for start, stop in pairwise(edges))]


def window_means(units_UKD: Tensor, sizes: WindowSizes) -> Tensor:
    """The mean key of the window that begins with each unit, [U, K, D], from the mean keys of all units.

    Windows that run into another document or past the end have no meaning; no query sees them.
    """
    count = sizes.window // sizes.stride
    wide = units_UKD.to(torch.promote_types(units_UKD.dtype, torch.float32))
    total_UKD = wide.clone()
    for shift in range(1, count):
        total_UKD[: len(wide) - shift] += wide[shift:]
    return (total_UKD / count).to(units_UKD.dtype)


def block_scores(
    q_tHD: Tensor, windows_UKD: Tensor, layout: Layout, rows: slice, within: Reach, sizes: WindowSizes, scale: float
) -> Tensor:
    """The score of every block in reach, float32 (float64 for float64) [K, t, N]; 0 for blocks that no complete window
    overlaps, nothing of meaning for queries without a complete window.

    Products come in the dtype of the queries, the softmax is computed in float32.
    """
    windows_WKD = windows_UKD[within.units]
    queries, kv_heads = q_tHD.shape[0], windows_WKD.shape[1]
    q_KND = q_tHD.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    bias_tW = _visible(layout, rows, within, sizes).logical_not().to(q_tHD.dtype) * torch.finfo(q_tHD.dtype).min
    bias_1NW = bias_tW.repeat(q_KND.shape[1] // queries, 1).unsqueeze(0)
    logits_KNW = torch.baddbmm(bias_1NW, q_KND, windows_WKD.permute(1, 2, 0), alpha=scale)
    wide = torch.promote_types(q_tHD.dtype, torch.float32)
    mass_KtW = logits_KNW.unflatten(1, (-1, queries)).softmax(-1, dtype=wide).sum(1)
    return _block_maxima(mass_KtW, layout, within, sizes)


def _visible(layout: Layout, rows: slice, within: Reach, sizes: WindowSizes) -> Tensor:
    """Whether each window in reach is complete at each query and of its document, bool [t, W]."""
    first_T, end_T = layout.cached(("windows of queries", sizes), lambda: _complete_windows(layout, sizes))
    ids_W = torch.arange(within.units.start, within.units.stop, device=first_T.device)
    return (first_T[rows, None] <= ids_W) & (ids_W < end_T[rows, None])


def _complete_windows(layout: Layout, sizes: WindowSizes) -> tuple[Tensor, Tensor]:
    """int64 [T] each: the first window of each query's document, and the one behind the last that is complete."""
    positions_T = layout.positions(layout.q_tokens, layout.q_documents)
    first_T = first_blocks(layout.cu_seqlens, sizes.stride)[layout.q_documents]
    return first_T, first_T + (positions_T + 1 - sizes.window) // sizes.stride + 1


def _block_maxima(mass_KtW: Tensor, layout: Layout, within: Reach, sizes: WindowSizes) -> Tensor:
    """The largest mass among the windows that overlap each block, [K, t, N].

    A window of the document before has no mass for this document's queries, so a block's windows may begin there.
    """
    units_N = layout.cached(("first unit of a block", sizes), lambda: _first_units(layout, sizes))[within.blocks]
    overlapping = range(1 - sizes.window // sizes.stride, sizes.block // sizes.stride)
    maxima_KtN: Tensor | None = None
    for shift in overlapping:
        at_N = (units_N - within.units.start + shift).clamp(0, mass_KtW.shape[-1] - 1)
        shifted_KtN = mass_KtW.index_select(-1, at_N)
        maxima_KtN = shifted_KtN if maxima_KtN is None else torch.maximum(maxima_KtN, shifted_KtN)
    assert maxima_KtN is not None
    return maxima_KtN


def _first_units(layout: Layout, sizes: WindowSizes) -> Tensor:
    """int64 [N]: the unit with which each block begins."""
    tokens_N = block_edges(layout, sizes.block)[:-1].long().clamp(max=max(layout.total - 1, 0))
    return block_ids(tokens_N, layout.documents(tokens_N), layout, sizes.stride)
