"""The kind `gdn`: Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), the linear layers of Qwen3-Next.

    q, k = l2(silu(conv(.))), v = silu(conv(.)),  alpha_t = exp(-exp(A) softplus(W_alpha x_t + b)),
    beta_t = sigmoid(W_beta x_t),  out_t = RMSNorm(S_t^T q_t / sqrt(d)) * silu(W_gate x_t)

with S_t by the delta rule (delta.py). It is `kda` whose channels of a head all decay alike, so that it runs wherever
`kda` does: on a GPU by fla-core's kernels of that, which read a decay for each channel.

Shape suffixes: n rows, D hidden size, H query heads, K key/value heads, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.config.model import ModelConfig
from moba_train.mechanisms.linear.delta import DeltaInputs
from moba_train.mechanisms.linear.kda import DeltaParameters, KdaKind


class GdnParameters(DeltaParameters):
    """A layer's convolutions, decays, step sizes, output gate and output norm."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.decay = nn.Linear(model.hidden_size, model.heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(model.heads))
        self.gate = nn.Linear(model.hidden_size, model.heads * model.head_width, bias=False)

    def delta_inputs(self, x_nD: Tensor, q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor) -> DeltaInputs:
        """Inputs of the delta rule: each head's decay for each of its channels."""
        decay_nHd = self.decay(x_nD).unsqueeze(-1).expand_as(q_nHd).contiguous()
        bias_h = self.dt_bias.repeat_interleave(q_nHd.shape[-1])
        return DeltaInputs(q_nHd, k_nKd, v_nKd, decay_nHd, self.beta(x_nD), self.A_log, bias_h)

    def gated(self, out_nHd: Tensor, x_nD: Tensor) -> Tensor:
        """The layer's output, normed for each head and gated."""
        return self.norm(out_nHd) * F.silu(self.gate(x_nD)).view_as(out_nHd)


class GdnKind(KdaKind):
    """Each head keeps a state, which forgets at one rate and replaces what a key held before."""

    name = "gdn"
    Parameters = GdnParameters
