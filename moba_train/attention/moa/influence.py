"""What masking would cost: the first-order change of the loss if attention from one token to another were masked.

With A the probabilities of a row and g = dL/dA = dout . v, masking key j scales the others by 1 / (1 - A_j). So the
loss changes by E_j = A_j / (1 - A_j) (sum_n A_n g_n - g_j), and by -A_j g_j where j is the row's only key (Fu et al.
2024, arXiv:2406.14909).

Shape suffixes: T tokens of a document, t a chunk of its queries, s keys, H query heads, K key/value heads, G = H / K,
D head width, N blocks of the document, C rules.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.masked import accumulation_dtype, query_chunks
from moba_train.attention.moa.spans import SpanRule, Spans


@torch.no_grad()
def block_influence(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, dout_THD: Tensor, *, scale: float, block_size: int
) -> Tensor:
    """[H, N, N]: influences of full attention in one document, summed over blocks of queries and of keys.

    q and k rotated; dout: gradient of the loss with respect to attention's output. float32, or float64 for float64.
    """
    tokens, heads, _ = q_THD.shape
    dtype = accumulation_dtype(q_THD.dtype)
    blocks = -(-tokens // block_size)
    k_TKD, v_TKD = k_TKD.to(dtype), v_TKD.to(dtype)
    token_T = torch.arange(tokens, device=q_THD.device)
    block_N1 = torch.arange(blocks, device=q_THD.device).unsqueeze(1)
    found_HNN = torch.zeros(heads, blocks, blocks, dtype=dtype, device=q_THD.device)
    for rows in query_chunks(tokens, heads * tokens, q_THD.device):
        keys = slice(0, rows.stop)
        scores_Hts = _products(q_THD[rows].to(dtype), k_TKD[keys]) * scale
        scores_Hts.masked_fill_(token_T[rows, None] < token_T[None, keys], -torch.inf)
        influence_Hts = _influence(scores_Hts.softmax(-1), _products(dout_THD[rows].to(dtype), v_TKD[keys]))
        if rows.start == 0:
            influence_Hts[:, 0, 0] = -(dout_THD[0].to(dtype) * _for_query_heads(v_TKD[0], heads)).sum(-1)
        influence_HtN = F.pad(influence_Hts, (0, blocks * block_size - rows.stop)).unflatten(-1, (blocks, -1)).sum(-1)
        within_Nt = (token_T[rows] // block_size == block_N1).to(dtype)  # not index_add_, whose order varies on a GPU
        found_HNN += within_Nt @ influence_HtN
    return found_HNN


def _influence(probs_Hts: Tensor, grad_Hts: Tensor) -> Tensor:
    """E of each key of each row, for rows of several keys."""
    mean_Ht1 = (probs_Hts * grad_Hts).sum(-1, keepdim=True)
    rest_Hts = (1 - probs_Hts).clamp_(min=torch.finfo(probs_Hts.dtype).eps)
    return probs_Hts / rest_Hts * (mean_Ht1 - grad_Hts)


def _products(x_tHD: Tensor, y_sKD: Tensor) -> Tensor:
    """[H, t, s]: products of query heads with the key/value head that they share."""
    x_tKGD = x_tHD.unflatten(1, (y_sKD.shape[1], -1))
    return torch.einsum("tkgd,skd->kgts", x_tKGD, y_sKD).flatten(0, 1)


def _for_query_heads(x_KD: Tensor, heads: int) -> Tensor:
    return x_KD.repeat_interleave(heads // x_KD.shape[0], 0)


def masked_influence(influence_HNN: Tensor, rules: Sequence[SpanRule], block_size: int) -> Tensor:
    """float64 [H, C]: the sum of the influences that each rule would mask, if every head had it.

    `influence_HNN` in blocks of `block_size`, of which the rules' blocks are multiples.
    """
    before_HNN = F.pad(influence_HNN.double().cumsum(-1), (1, 0))
    block_N = torch.arange(influence_HNN.shape[1], device=influence_HNN.device)
    return torch.stack([_masked(before_HNN, rule, block_N, block_size) for rule in rules], dim=1)


def _masked(before_HNN: Tensor, rule: SpanRule, block_N: Tensor, block_size: int) -> Tensor:
    """[H]: the influences between the sinks and the span, from their sums before each block."""
    if not rule.block_size:
        return before_HNN.new_zeros(before_HNN.shape[0])
    longer = rule.block_size // block_size
    spans = Spans((rule,))
    starts_1N = spans.starts(block_N // longer)
    until_N, since_N = (x_1N[0] * longer for x_1N in (starts_1N, spans.sinks(starts_1N)))
    return (before_HNN[:, block_N, until_N] - before_HNN[:, block_N, since_N]).sum(-1)
