"""The parameter-free score of a block (Zhao et al. 2025, arXiv:2509.24663).

Keys are averaged in windows of `window` tokens at every `stride` tokens. A query scores the windows that are complete
at its own position: softmax over their scaled scores. The probabilities are summed over the query heads that share a
key/value head, and a block's score is the largest sum among the windows that overlap it.

A window is a run of neighbouring units of `stride` tokens, of which the caller has the mean keys. Unit w begins window
w; units and blocks are counted as in kernels/common/geometry.py, from each document's start.

Shape suffixes: t a chunk of the queries, W windows in reach of the chunk, N blocks in reach, H query heads, K key/value
heads, G = H / K, D head width.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_bound, block_edges, block_ids, first_blocks
from moba_train.attention.kernels.common.reference import query_chunks
from moba_train.attention.kernels.table import triton_runs_on
from moba_train.attention.layout import Layout, kept


@dataclass(frozen=True)
class BlockScores:
    """Scores of blocks, a chunk of queries at a time, by plain PyTorch or by the kernels of score_kernels.py."""

    window: int
    """Tokens; no window is longer than a block."""
    stride: int
    """Tokens; divides `window` and `block`."""
    block: int
    scale: float

    def chunks(
        self, q_THD: Tensor, windows_UKD: Tensor, layout: Layout, *, kernels: bool
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """(rows, blocks, scores): of these rows of the layout's queries for all blocks in their reach, float32 (float64
        for float64) [K, t, N].

        0 for blocks that no complete window overlaps, nothing of meaning for queries without a complete window. In
        plain PyTorch, products come in the dtype of the queries, and the softmax is computed in float32.

        `windows_UKD`: `window_means`; without `kernels`, plain PyTorch on any device.
        """
        heads, kv_heads = q_THD.shape[1], windows_UKD.shape[1]
        able = _kernel(q_THD) if kernels else None
        by_kernel = None if able is None else self._by_kernel(able, q_THD, windows_UKD, layout)
        # Numbers of a query that exist at once: its scores, which the choice needs twice; or all of its softmax.
        numbers = heads * len(windows_UKD) if able is None else 8 * kv_heads * block_bound(layout, self.block)
        for rows in query_chunks(len(q_THD), numbers, q_THD.device):
            within = reach(layout, rows, self.stride, self.block)
            if by_kernel is not None:
                yield rows, within.blocks, by_kernel(rows, within.blocks)
            else:
                yield rows, within.blocks, self._plain(q_THD[rows], windows_UKD, layout, rows, within)

    def _by_kernel(
        self, kernel: ModuleType, q_THD: Tensor, windows_UKD: Tensor, layout: Layout
    ) -> Callable[[slice, slice], Tensor]:
        """Scores of rows and blocks; the normaliser of all queries is found first."""
        q_THD, windows_UKD = q_THD.contiguous(), windows_UKD.contiguous()
        first_T, end_T = (x.int() for x in self._complete_windows(layout))
        first_unit_N = self._first_units(layout).int()
        lse_HT = kernel.log_sum_exp(q_THD, windows_UKD, first_T, end_T, self.scale)
        shared = q_THD, windows_UKD, lse_HT, first_T, end_T
        overlaps = {"before": -self._overlapping.start, "overlapping": len(self._overlapping)}

        def scores(rows: slice, blocks: slice) -> Tensor:
            found: Tensor = kernel.block_scores(*shared, first_unit_N[blocks], rows, **overlaps, scale=self.scale)
            return found

        return scores

    def _plain(self, q_tHD: Tensor, windows_UKD: Tensor, layout: Layout, rows: slice, within: "Reach") -> Tensor:
        windows_WKD = windows_UKD[within.units]
        queries, kv_heads = q_tHD.shape[0], windows_WKD.shape[1]
        q_KND = q_tHD.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        unseen_tW = self._visible(layout, rows, within).logical_not()
        # The lowest number, not -inf: a query that sees no window would have a softmax of NaN.
        bias_tW = unseen_tW.to(q_tHD.dtype) * torch.finfo(q_tHD.dtype).min
        bias_1NW = bias_tW.repeat(q_KND.shape[1] // queries, 1).unsqueeze(0)
        logits_KNW = torch.baddbmm(bias_1NW, q_KND, windows_WKD.permute(1, 2, 0), alpha=self.scale)
        wide = torch.promote_types(q_tHD.dtype, torch.float32)
        mass_KtW = logits_KNW.unflatten(1, (-1, queries)).softmax(-1, dtype=wide).sum(1)
        return self._block_maxima(mass_KtW, layout, within)

    def _visible(self, layout: Layout, rows: slice, within: "Reach") -> Tensor:
        """Mask, bool [t, W]: True where a window in reach is of the query's document and complete at the query."""
        first_T, end_T = self._complete_windows(layout)
        ids_W = torch.arange(within.units.start, within.units.stop, device=first_T.device)
        return (first_T[rows, None] <= ids_W) & (ids_W < end_T[rows, None])

    def _block_maxima(self, mass_KtW: Tensor, layout: Layout, within: "Reach") -> Tensor:
        """The largest mass among the windows that overlap each block, [K, t, N].

        A window of the document before has no mass for this document's queries, so a block's windows may begin there.
        """
        units_N = self._first_units(layout)[within.blocks]
        maxima_KtN: Tensor | None = None
        for shift in self._overlapping:
            at_N = (units_N - within.units.start + shift).clamp(0, mass_KtW.shape[-1] - 1)
            shifted_KtN = mass_KtW.index_select(-1, at_N)
            maxima_KtN = shifted_KtN if maxima_KtN is None else torch.maximum(maxima_KtN, shifted_KtN)
        assert maxima_KtN is not None
        return maxima_KtN

    @property
    def _overlapping(self) -> range:
        """Offsets of the windows that overlap a block: first units, counted from the block's first unit."""
        return range(1 - self.window // self.stride, self.block // self.stride)

    @kept
    def _complete_windows(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """int64 [T] each: the first window of each query's document, and the one behind the last that is complete."""
        stride = self.stride
        positions_T = layout.positions(layout.q_tokens, layout.q_documents)
        first_T = first_blocks(layout.cu_seqlens, stride)[layout.q_documents]
        return first_T, first_T + (positions_T + 1 - self.window) // stride + 1

    @kept
    def _first_units(self, layout: Layout) -> Tensor:
        """int64 [N]: the unit with which each block begins."""
        tokens_N = block_edges(layout, self.block)[:-1].long().clamp(max=max(layout.total - 1, 0))
        return block_ids(tokens_N, layout.documents(tokens_N), layout, self.stride)


def _kernel(q_THD: Tensor) -> ModuleType | None:
    """The kernels, imported at the first use; None where they cannot take queries like these."""
    if not triton_runs_on(q_THD):
        return None
    from moba_train.mechanisms.infllm_v2 import score_kernels as kernel

    return kernel if kernel.able(q_THD) else None


@dataclass(frozen=True)
class Reach:
    """Units and blocks that the queries of a chunk may look at: those of their documents, up to the last query."""

    units: slice
    blocks: slice


def reach(layout: Layout, rows: slice, stride: int, block: int) -> Reach:
    """The reach of these rows of the layout's queries, found on the host. `rows` is not empty."""
    first, last = (_token_of_row(layout, row) for row in (rows.start, rows.stop - 1))
    first_document, last_document = (bisect_right(layout.edges, token) - 1 for token in (first, last))

    def in_reach(size: int) -> slice:
        before = _units_before(layout, size)
        return slice(before[first_document], before[last_document] + (last - layout.edges[last_document]) // size + 1)

    return Reach(in_reach(stride), in_reach(block))


def _token_of_row(layout: Layout, row: int) -> int:
    for start, stop in layout.q_ranges or ():
        if row < stop - start:
            return start + row
        row -= stop - start
    return row


@kept
def _units_before(layout: Layout, size: int) -> list[int]:
    """Number of units of `size` tokens before each document, with the number of all units at the end."""
    return [0, *accumulate(-(-(stop - start) // size) for start, stop in pairwise(layout.edges))]


def window_means(units_UKD: Tensor, count: int) -> Tensor:
    """The mean key of the window of `count` units that begins with each, [U, K, D], from the mean keys of all units.

    Windows that run into another document or past the end have no meaning; no query sees them.
    """
    wide = units_UKD.to(torch.promote_types(units_UKD.dtype, torch.float32))
    total_UKD = wide.clone()
    for shift in range(1, count):
        total_UKD[: len(wide) - shift] += wide[shift:]
    return (total_UKD / count).to(units_UKD.dtype)
