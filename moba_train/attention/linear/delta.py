"""The delta rule with a decay for each channel, token by token in plain PyTorch: for CPUs, and for short sequences.

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,   out_t = S_t^T q_t

(Kimi Linear, arXiv:2510.26692, equation 1). A GPU computes it in chunks by fla-core (fla.py).

Shape suffixes: n rows, H query heads, d head width, N segments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def delta_attention(
    q_nHd: Tensor,
    k_nHd: Tensor,
    v_nHd: Tensor,
    log_alpha_nHd: Tensor,
    beta_nH: Tensor,
    edges: Sequence[int],
    initial_NHdd: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, d] in the dtype of v and the states behind the segments [N, H, d, d] in float32 or float64.

    `edges` [N + 1]: rows where segments begin, and n. `initial_NHdd`: the states before the segments; zeros if None.
    Autograd keeps several states for every token.
    """
    dtype = torch.promote_types(v_nHd.dtype, torch.float32)
    outputs = []
    finals = []
    for segment in range(len(edges) - 1):
        rows = slice(edges[segment], edges[segment + 1])
        inputs = [x[rows].to(dtype).unbind(0) for x in (q_nHd, k_nHd, v_nHd, log_alpha_nHd.exp(), beta_nH)]
        state_Hdd = (
            q_nHd.new_zeros((*q_nHd.shape[1:], v_nHd.shape[-1]), dtype=dtype)
            if initial_NHdd is None
            else initial_NHdd[segment]
        )
        for q_Hd, k_Hd, v_Hd, alpha_Hd, beta_H in zip(*inputs, strict=True):
            state_Hdd = alpha_Hd[..., None] * state_Hdd
            change_Hd = beta_H[..., None] * (v_Hd - torch.einsum("hd,hde->he", k_Hd, state_Hdd))
            state_Hdd = state_Hdd + k_Hd[..., None] * change_Hd[:, None]
            outputs.append(torch.einsum("hd,hde->he", q_Hd, state_Hdd))
        finals.append(state_Hdd)
    return torch.stack(outputs).to(v_nHd.dtype), torch.stack(finals)
