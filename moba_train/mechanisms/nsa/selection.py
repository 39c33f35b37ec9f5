"""Selection of blocks by the probabilities of the compressed branch, for the selected branch of the kind `nsa`.

The score of a selection block is the sum of the probabilities of the compressed blocks that overlap with it, each
counted once for every stride that the two share, over the query heads of a group (arXiv:2502.11089, equations 8 to 10).
Equation 9 as printed, p[(B / s) j - m - n], ends with the first stride of block j; its sum is taken here over the
strides of block j itself, p[(B / s) j + m - n], as the text describes it and as published implementations do.

Probabilities are computed again from the compressed branch's log-sum-exp; they carry no gradient. On a GPU a kernel
(selection_kernel.py) keeps them in registers; in plain PyTorch they exist for a chunk of queries at a time.

The places of compressed blocks and the choice are torch operators, which torch.compile keeps whole: if it traced them,
values kept with the layout would make a recomputed layer differ from the first pass. Their callers give
`operators.layout_arguments` instead of the layout.

Shape suffixes: n queries of the layout, t a chunk of them, N compressed blocks, M selection blocks, O offsets,
H query heads, K key/value heads, D head width, C selected blocks of a query.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_bound, first_blocks, query_blocks
from moba_train.attention.kernels.common.reference import accumulation_dtype, query_chunks
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.kernels.table import triton_runs_on
from moba_train.attention.layout import Layout, kept
from moba_train.mechanisms.layout_operators import with_layout
from moba_train.mechanisms.nsa.compressed import CompressedBlocks


@dataclass(frozen=True)
class BlockChoice:
    """The choice of selection blocks by the probabilities of compressed ones."""

    compressed: CompressedBlocks
    block_size: int
    """Tokens of a selection block: a multiple of the stride, at least the size of a compressed block."""
    topk: int
    """Selected blocks of a query, its own included."""
    first: int
    local: int
    backend: str = "auto"
    """auto, or reference for plain PyTorch on any device."""

    @torch.no_grad()
    def choose(self, q_nHD: Tensor, k_NKD: Tensor, lse_Hn: Tensor, layout: Layout, scale: float) -> Tensor:
        """int32 [H, n, C]: the selected history blocks, equal in a group of query heads (kernels/common/selection.py).

        `k_NKD`: compressed keys; `lse_Hn`: of the queries over those they see.
        """
        heads, kv_heads = q_nHD.shape[1], k_NKD.shape[1]
        count = min(self.topk - 1, block_bound(layout, self.block_size))
        kernel = None if self.backend == "reference" else _kernel(q_nHD, count)
        if kernel is None:
            selected_KnC = self._choose_in_chunks(q_nHD, k_NKD, lse_Hn, layout, scale, count)
        else:
            selected_KnC = kernel.choose(
                q_nHD,
                k_NKD,
                lse_Hn,
                self.compressed.seen(layout),
                query_blocks(layout, self.block_size),
                *self._overlaps(layout),
                scale,
                count,
                first=self.first,
                local=self.local,
            )
        return selected_KnC.repeat_interleave(heads // kv_heads, 0)

    def _choose_in_chunks(
        self, q_nHD: Tensor, k_NKD: Tensor, lse_Hn: Tensor, layout: Layout, scale: float, count: int
    ) -> Tensor:
        """int32 [K, n, count] in plain PyTorch: the scores of a chunk of queries at a time."""
        queries = query_blocks(layout, self.block_size)
        selected_KnC = torch.empty(k_NKD.shape[1], len(q_nHD), count, dtype=torch.int32, device=q_nHD.device)
        first_n, end_n = self.compressed.seen(layout)
        for rows in query_chunks(len(q_nHD), q_nHD.shape[1] * max(1, len(k_NKD)), q_nHD.device):
            # The blocks from here on are behind all queries of the chunk.
            seen = min(len(k_NKD), _last_token(layout, rows) // self.compressed.stride)
            probabilities_KtN = group_probabilities(
                q_nHD[rows], k_NKD[:seen], lse_Hn[:, rows], first_n[rows], end_n[rows], scale
            )
            scores_KtM = self.block_scores(probabilities_KtN, layout)
            selected_KnC[:, rows] = choose_blocks(
                scores_KtM, queries.rows(rows), count, first=self.first, local=self.local
            )
        return selected_KnC

    def block_scores(self, probabilities_KtN: Tensor, layout: Layout) -> Tensor:
        """[K, t, M]: sums over the compressed blocks that overlap with each selection block."""
        ids_OM, weights_O = self._overlaps(layout)
        given = probabilities_KtN.shape[-1]  # without the blocks that none of the chunk's queries sees
        scores_KtM = probabilities_KtN.new_zeros(*probabilities_KtN.shape[:2], ids_OM.shape[1])
        if given:
            for ids_M, weight in zip(ids_OM, weights_O, strict=True):
                factor_M = (weight * (ids_M < given)).to(scores_KtM.dtype)
                scores_KtM += probabilities_KtN.index_select(-1, ids_M.clamp(max=given - 1)) * factor_M
        return scores_KtM

    @kept
    def _overlaps(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """int64 [O, M]: the compressed blocks that overlap with each selection block, by their offset from the one that
        begins with it; float32 [O]: how many strides each shares with it. Ids of no block are larger than all others.
        """
        stride = self.compressed.stride
        shared = Counter(m - n for m in range(self.block_size // stride) for n in range(self.compressed.size // stride))
        first = self.compressed.first(layout)
        blocks = first_blocks(layout.cu_seqlens, self.block_size)
        ids_M = torch.arange(block_bound(layout, self.block_size), device=first.device)
        document_M = torch.searchsorted(blocks[1:], ids_M, right=True).clamp_(max=blocks.numel() - 2)
        begins_M = first[document_M] + (ids_M - blocks[document_M]) * (self.block_size // stride)
        offsets_O1 = torch.tensor(sorted(shared), device=first.device).unsqueeze(-1)
        ids_OM = begins_M + offsets_O1
        exists_OM = (first[document_M] <= ids_OM) & (ids_OM < first[document_M + 1])
        weights = [float(shared[offset]) for offset in sorted(shared)]
        # An id beyond all blocks, which no query sees: the kernel needs no second mask.
        return torch.where(exists_OM, ids_OM, layout.total), torch.tensor(weights, device=first.device)


def group_probabilities(
    q_tHD: Tensor, k_NKD: Tensor, lse_Ht: Tensor, first_t: Tensor, end_t: Tensor, scale: float
) -> Tensor:
    """[K, t, N]: exp(scale q . k - lse), summed over the query heads of a group; 0 for blocks that a query does not
    see: ids before `first_t` and from `end_t` on. In float32, or float64 for float64."""
    q_KGtD = q_tHD.unflatten(1, (k_NKD.shape[1], -1)).permute(1, 2, 0, 3)
    scores_KxN = _products(q_KGtD.flatten(1, 2), k_NKD.permute(1, 2, 0))
    scores_KGtN = scores_KxN.view(*q_KGtD.shape[:3], len(k_NKD))
    lse_KGt1 = lse_Ht.unflatten(0, (k_NKD.shape[1], -1)).unsqueeze(-1)
    probabilities_KtN = scores_KGtN.mul_(scale).sub_(lse_KGt1).exp_().sum(1)
    ids_N = torch.arange(len(k_NKD), device=q_tHD.device)
    seen_tN = (first_t.unsqueeze(-1) <= ids_N) & (ids_N < end_t.unsqueeze(-1))
    return probabilities_KtN.masked_fill_(~seen_tN, 0)


def _kernel(q_nHD: Tensor, count: int) -> ModuleType | None:
    """selection_kernel.py, imported at the first use; None if it cannot choose `count` blocks for such queries."""
    if not triton_runs_on(q_nHD):
        return None
    from moba_train.mechanisms.nsa import selection_kernel as kernel

    return kernel if kernel.able(q_nHD, count) else None


def _products(q_KxD: Tensor, k_KDN: Tensor) -> Tensor:
    """q k in float32 (float64 for float64), [K, x, N]; 16-bit inputs are multiplied as such where CUDA can."""
    dtype = accumulation_dtype(q_KxD.dtype)
    if q_KxD.is_cuda and q_KxD.dtype != dtype:
        return torch.bmm(q_KxD, k_KDN, out_dtype=dtype)
    return q_KxD.to(dtype) @ k_KDN.to(dtype)


def _last_token(layout: Layout, rows: slice) -> int:
    """Index behind the last token of these rows of the queries, known on the host."""
    stop = rows.stop
    for first, last in layout.query_ranges:
        if stop <= last - first:
            return first + stop
        stop -= last - first
    raise AssertionError("fewer queries than rows")


@torch.library.custom_op("moba_train::nsa_places", mutates_args=())
@with_layout
def places(layout: Layout, size: int, stride: int) -> tuple[Tensor, Tensor]:
    """`CompressedBlocks.places`, int64 [N] each."""
    return CompressedBlocks(size, stride).places(layout)


@places.register_fake
@partial(with_layout, traced=True)
def _(layout: Layout, size: int, stride: int) -> tuple[Tensor, Tensor]:
    like = layout.cu_seqlens.new_empty((CompressedBlocks(size, stride).bound(layout),), dtype=torch.int64)
    return like, torch.empty_like(like)


@torch.library.custom_op("moba_train::nsa_choose", mutates_args=())
@with_layout
def choose(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    layout: Layout,
    size: int,
    stride: int,
    block_size: int,
    topk: int,
    first: int,
    local: int,
    backend: str,
    scale: float,
) -> Tensor:
    """`BlockChoice.choose`: int32 [H, n, C]. Without gradient."""
    choice = BlockChoice(CompressedBlocks(size, stride), block_size, topk, first, local, backend)
    return choice.choose(q, k, lse, layout, scale)


@choose.register_fake
@partial(with_layout, traced=True)
def _(
    q: Tensor, k: Tensor, lse: Tensor, layout: Layout, size: int, stride: int, block_size: int, topk: int, *_rest: Any
) -> Tensor:
    count = min(topk - 1, block_bound(layout, block_size))
    return q.new_empty((q.shape[1], q.shape[0], count), dtype=torch.int32)
