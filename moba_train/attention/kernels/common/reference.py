"""The reference backend: attention to selected blocks as a mask over dense attention, in plain PyTorch.

Exact attention under any mask, a chunk of queries at a time: any device, any floating dtype up to float64, explicit
backward. Scores are computed in float32 (float64 for float64 input) and exist for one chunk of queries only. A mask
needs the selected blocks alone. Block lists behind them are ignored: kernels may have made them for queries that then
meet keys which the kernels refuse (block_attention.py).

Shape suffixes: T queries, t a chunk of them, S keys, s a range of them, N blocks, H query heads, K key/value heads, G =
H / K, D head width, C selected blocks.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_bound, block_ids
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, Selection

Mask = Callable[[slice, slice], Tensor]
"""(query rows, key rows) -> bool, broadcastable to [H, rows, keys]: which scores count."""

# 4 MiB and 512 MiB of float32 scores.
_SCORES_PER_CHUNK = {"cpu": 2**20, "cuda": 2**27}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype scores are computed in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def query_chunks(queries: int, scores_per_query: int, device: torch.device) -> Iterator[slice]:
    """Slices over `queries` rows, each with a bounded number of scores."""
    budget = _SCORES_PER_CHUNK.get(device.type, 2**20)
    # At least 16 rows, or very long sequences would be one product of a single row after the other.
    rows = max(16, budget // max(1, scores_per_query))
    for start in range(0, queries, rows):
        yield slice(start, min(start + rows, queries))


class _Scores:
    """Scores and probabilities of a chunk of queries; keys and values are upcast and laid out once."""

    def __init__(self, q_THD: Tensor, k_SKD: Tensor, mask: Mask, scale: float, prefix: bool, cap: float | None) -> None:
        self.dtype = accumulation_dtype(q_THD.dtype)
        self.q_THD = q_THD
        self.mask = mask
        self.scale = scale
        self.prefix = prefix
        self.cap = cap
        self.k_KSD = k_SKD.to(self.dtype).transpose(0, 1)
        self.queries, self.heads, self.head_dim = q_THD.shape
        self.kv_heads = k_SKD.shape[1]

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """(query rows, the key rows they may see)."""
        keys = self.k_KSD.shape[1]
        for rows in query_chunks(self.queries, self.heads * keys, self.q_THD.device):
            yield rows, slice(0, rows.stop if self.prefix else keys)

    def grouped(self, x_tHD: Tensor) -> Tensor:
        """[t, H, D] -> [K, G * t, D] in the accumulation dtype: the queries of a key/value head side by side."""
        chunk = x_tHD.shape[0]
        x_KGtD = x_tHD.to(self.dtype).view(chunk, self.kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        return x_KGtD.reshape(self.kv_heads, -1, self.head_dim)

    def ungrouped(self, x_KND: Tensor) -> Tensor:
        """The inverse of `grouped`: [K, G * t, D] -> [t, H, D]."""
        group = self.heads // self.kv_heads
        return x_KND.view(self.kv_heads, group, -1, self.head_dim).permute(2, 0, 1, 3).flatten(1, 2)

    def by_kv_head(self, x_Hts: Tensor) -> Tensor:
        """[H, t, s] -> [K, G * t, s], a view; s may be 0."""
        return x_Hts.unflatten(0, (self.kv_heads, -1)).flatten(1, 2)

    def masked(self, rows: slice, keys: slice) -> Tensor:
        """Scaled scores [H, t, s], capped if they are, -inf where the mask is False."""
        scores_KNs = self.grouped(self.q_THD[rows]) @ self.k_KSD[:, keys].transpose(1, 2)
        scores_Hts = scores_KNs.mul_(self.scale).view(self.heads, rows.stop - rows.start, -1)
        if self.cap is not None:
            scores_Hts = scores_Hts.div_(self.cap).tanh_().mul_(self.cap)
        return scores_Hts.masked_fill_(~self.mask(rows, keys), -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for rows that saw no key, so that their probabilities become exp(-inf - 0) = 0, not NaN."""
    return torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)


def masked_attend(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, mask: Mask, scale: float, *, prefix: bool, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the keys that `mask` admits; with `cap`, of cap tanh(scores / cap).

    `prefix`: query row i sees keys 0..i at most (queries and keys are the same whole sequence), which halves the work.
    Returns out [T, H, D] in q's dtype and lse [H, T] (natural log; float32, or float64 for float64 input); a row
    without keys gives (0, -inf).
    """
    scores = _Scores(q_THD, k_SKD, mask, scale, prefix, cap)
    v_KSD = v_SKD.to(scores.dtype).transpose(0, 1)
    out_THD = torch.zeros_like(q_THD)
    lse_HT = torch.full((q_THD.shape[1], q_THD.shape[0]), -torch.inf, dtype=scores.dtype, device=q_THD.device)
    for rows, keys in scores.chunks():
        scores_Hts = scores.masked(rows, keys)
        lse_Ht = scores_Hts.logsumexp(-1)
        probs_Hts = scores_Hts.sub_(_finite(lse_Ht).unsqueeze(-1)).exp_()
        out_KND = scores.by_kv_head(probs_Hts) @ v_KSD[:, keys]
        out_THD[rows] = scores.ungrouped(out_KND).to(out_THD.dtype)
        lse_HT[:, rows] = lse_Ht
    return out_THD, lse_HT


def masked_attend_backward(
    state: BackwardState, mask: Mask, scale: float, *, prefix: bool, cap: float | None = None
) -> Gradients:
    """Gradients (dq, dk, dv) of `masked_attend`, in the dtypes of q, k and v.

    The state's `out` and `lse` may come from more keys than its `k` holds: then these are the parts of the gradients
    that pass through the given keys (Dao et al. 2022, arXiv:2205.14135, appendix B.2).
    """
    dout_THD, q_THD, k_SKD, v_SKD, out_THD, lse_HT = state
    scores = _Scores(q_THD, k_SKD, mask, scale, prefix, cap)
    v_KSD = v_SKD.to(scores.dtype).transpose(0, 1)
    dk_KSD, dv_KSD = torch.zeros_like(scores.k_KSD), torch.zeros_like(v_KSD)
    dq_THD = torch.zeros_like(q_THD)
    delta_HT = (dout_THD.to(scores.dtype) * out_THD.to(scores.dtype)).sum(-1).T
    for rows, keys in scores.chunks():
        scores_Hts = scores.masked(rows, keys)
        # The slope of tanh; 0 where the mask is False, where its argument is -inf.
        slopes_Hts = None if cap is None else (1 - (scores_Hts / cap).square()).clamp_(min=0)
        probs_Hts = scores_Hts.sub_(_finite(lse_HT[:, rows]).unsqueeze(-1)).exp_()
        q_KND = scores.grouped(q_THD[rows])
        dout_KND = scores.grouped(dout_THD[rows])
        probs_KNs = scores.by_kv_head(probs_Hts)
        dv_KSD[:, keys] += probs_KNs.transpose(1, 2) @ dout_KND
        delta_KN1 = delta_HT[:, rows].reshape(scores.kv_heads, -1, 1)
        dscores_KNs = (dout_KND @ v_KSD[:, keys].transpose(1, 2)).sub_(delta_KN1).mul_(probs_KNs).mul_(scale)
        if slopes_Hts is not None:
            dscores_KNs.mul_(scores.by_kv_head(slopes_Hts))
        dk_KSD[:, keys] += dscores_KNs.transpose(1, 2) @ q_KND
        dq_THD[rows] = scores.ungrouped(dscores_KNs @ scores.k_KSD[:, keys]).to(dq_THD.dtype)
    return dq_THD, dk_KSD.transpose(0, 1).to(k_SKD.dtype), dv_KSD.transpose(0, 1).to(v_SKD.dtype)


NAME = "reference"


def block_lists(selected_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Selection:
    """Nothing."""
    return ()


empty_block_lists = block_lists


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    layout: Layout,
    selection: Selection,
    *,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] of any queries over the given keys of their own and their selected blocks."""
    mask = selected_mask(selection[0], layout, block_size)
    return masked_attend(q_THD, k_SKD, v_SKD, mask, scale, prefix=layout.is_whole)


def attend_backward(
    state: BackwardState, layout: Layout, selection: Selection, *, block_size: int, scale: float
) -> Gradients:
    """(dq, dk, dv) of `attend`."""
    mask = selected_mask(selection[0], layout, block_size)
    return masked_attend_backward(state, mask, scale, prefix=layout.is_whole)


def selected_mask(selected_HTC: Tensor, layout: Layout, block_size: int, *, diagonal: bool = True) -> Mask:
    """The mask of attention to selected history blocks (int [H, T, C], -1 = none) and the diagonal block: [H, rows,
    keys].

    Without `diagonal`, this block counts only if it is listed.

    A key counts when its block is the query's own or a selected one and it is not in the future; history blocks lie
    wholly in the past, so the one comparison of token indices makes only the diagonal block causal inside.
    """
    blocks = block_bound(layout, block_size)
    q_blocks_T = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
    k_blocks_S = block_ids(layout.k_tokens, layout.k_documents, layout, block_size)
    q_tokens_T = layout.q_tokens
    k_tokens_S = layout.k_tokens

    def mask(rows: slice, keys: slice) -> Tensor:
        selected_HtC = selected_HTC[:, rows].long()
        own_Ht1 = q_blocks_T[rows].view(1, -1, 1).expand(selected_HtC.shape[0], -1, 1)
        # One column more, into which absent blocks (-1) are scattered and which no key has.
        attended_HtN = torch.zeros(*own_Ht1.shape[:2], blocks + 1, dtype=torch.bool, device=selected_HTC.device)
        attended_HtN.scatter_(2, torch.where(selected_HtC < 0, blocks, selected_HtC), True)
        if diagonal:
            attended_HtN.scatter_(2, own_Ht1, True)
        past_ts = k_tokens_S[None, keys] <= q_tokens_T[rows, None]
        return attended_HtN[:, :, k_blocks_S[keys]] & past_ts

    return mask
