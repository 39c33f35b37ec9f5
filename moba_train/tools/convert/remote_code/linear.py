"""Kinds of attention whose heads keep a state of all tokens instead of their keys and values.

- `lightning`: linear attention with a constant decay for each head (Qin et al. 2024, arXiv:2401.04658).
- `gdn`: Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464).
- `kda`: Kimi Delta Attention (Kimi Linear, arXiv:2510.26692).

Prompts are read a chunk of tokens at a time, in plain PyTorch. A state has no past: caches with one cannot be cut, as
speculative decoding does.

Shape suffixes as in `attention`, and c tokens of a chunk, C channels of a convolution.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import KINDS, Call, Kind
from .cache import wide

_CHUNK = 32
"""Tokens of a chunk; the delta rule keeps c * c * d decays of each head."""
_TAPS = 4
"""Tokens that a convolution sees, its own included."""


class Linear(Kind):
    """Base of the kinds here: neither positions nor sinks."""

    takes_sink = False
    keeps_state = True
    decodes_full = False

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.heads, self.width = config.num_attention_heads, config.head_dim

    def of_query_heads(self, x_BKTd: Tensor) -> Tensor:
        """Keys or values of the query heads that share them, in float32 or float64."""
        return x_BKTd.to(wide(x_BKTd.dtype)).repeat_interleave(self.heads // x_BKTd.shape[1], 1)

    def state(self, call: Call) -> Tensor:
        """The state [B, H, d, d] before the new tokens."""
        found = call.store.state("state", call.text)
        shape = call.new.q.shape[0], self.heads, self.width, self.width
        return call.new.q.new_zeros(shape, dtype=wide(call.new.q.dtype)) if found is None else found


class Lightning(Linear):
    """S_t = lambda S_(t-1) + silu(k_t)^T v_t, out_t = RMSNorm(silu(q_t) S_t) * sigmoid(W x_t)."""

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.gate = nn.Linear(config.hidden_size, self.heads * self.width, bias=False)
        self.norm = nn.RMSNorm(self.heads * self.width, config.rms_norm_eps)
        self.place = layer / config.num_hidden_layers, layer / max(config.num_hidden_layers - 1, 1)

    def log_decays(self, device: torch.device) -> Tensor:
        """log lambda of each head, float64 [H]."""
        fractions_H = torch.arange(1, self.heads + 1, dtype=torch.float64, device=device) / self.heads
        if self.options.get("decay", "linear") == "linear":
            return -8 * fractions_H * (1 - self.place[0])
        return -torch.exp2(-8 * fractions_H) * (1 - self.place[1] + 1e-5)

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        dtype = wide(call.new.q.dtype)
        log_decay_H1 = self.log_decays(call.new.q.device)[:, None]
        q_BHTd = F.silu(call.new.q.to(dtype))
        k_BHTd, v_BHTd = F.silu(self.of_query_heads(call.new.k)), self.of_query_heads(call.new.v)
        state_BHdd = self.state(call)
        outs = []
        for q, k, v in zip(*(x.split(_CHUNK, 2) for x in (q_BHTd, k_BHTd, v_BHTd)), strict=True):
            steps_c = torch.arange(q.shape[2], device=q.device)
            between_cc = steps_c[:, None] - steps_c
            decay_Hcc = (log_decay_H1[..., None] * between_cc.clamp(min=0)).exp().to(dtype) * (between_cc >= 0)
            from_state_Hc1 = (log_decay_H1 * (steps_c + 1)).exp().to(dtype)[..., None]
            to_state_Hc1 = (log_decay_H1 * (len(steps_c) - 1 - steps_c)).exp().to(dtype)[..., None]
            outs.append((q @ k.transpose(2, 3) * decay_Hcc) @ v + from_state_Hc1 * q @ state_BHdd)
            state_BHdd = from_state_Hc1[:, -1:] * state_BHdd + (to_state_Hc1 * k).transpose(2, 3) @ v
        call.store.set_state("state", call.text, state_BHdd)
        out_BTx = torch.cat(outs, 2).to(call.new.q.dtype).transpose(1, 2).flatten(2)
        out_BTx = self.norm(out_BTx) * self.gate(call.new.x).sigmoid()
        return out_BTx.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class ShortConvolution(nn.Module):
    """silu of a causal convolution of each channel over `_TAPS` tokens."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, _TAPS))

    def forward(self, x_BKTd: Tensor, name: str, call: Call) -> Tensor:
        """The convolution [B, K, T, d]; keeps the last tokens as a state."""
        x_BCT = x_BKTd.transpose(2, 3).flatten(1, 2)
        tail = call.store.state(name, call.text)
        x_BCT = F.pad(x_BCT, (_TAPS - 1, 0)) if tail is None else torch.cat([tail, x_BCT], 2)
        call.store.set_state(name, call.text, x_BCT[..., 1 - _TAPS :])
        out_BCT = F.silu(F.conv1d(x_BCT, self.weight[:, None], groups=len(self.weight)))
        return out_BCT.unflatten(1, (x_BKTd.shape[1], -1)).transpose(2, 3)


def delta_rule(
    q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor, log_alpha_BHTd: Tensor, beta_BHT1: Tensor, state_BHdd: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs S_t^T q_t, and the last state, of S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_(t-1) + beta_t k_t v_t^T.

    In a chunk S_t = Diag(decay since its start) S + sum over i <= t of Diag(decay since i) k_i u_i^T, where each u_i is
    beta_i (v_i - what k_i reads of the state before it): a triangular system.
    """
    outs = []
    for q, k, v, log_alpha, beta in zip(
        *(x.split(_CHUNK, 2) for x in (q_BHTd, k_BHTd, v_BHTd, log_alpha_BHTd, beta_BHT1)), strict=True
    ):
        since_start = log_alpha.cumsum(2)
        steps_c = torch.arange(q.shape[2], device=q.device)
        later_cc1 = (steps_c > steps_c[:, None])[..., None]
        # Masked before the power: decays to later tokens would overflow.
        decay_BHccd = (since_start[:, :, :, None] - since_start[:, :, None]).masked_fill(later_cc1, -torch.inf).exp()
        keys_BHcc = (k[:, :, :, None] * k[:, :, None] * decay_BHccd).sum(-1)
        queries_BHcc = (q[:, :, :, None] * k[:, :, None] * decay_BHccd).sum(-1)
        from_start = since_start.exp()
        u_BHcd = torch.linalg.solve_triangular(
            beta * keys_BHcc.tril(-1), beta * (v - (k * from_start) @ state_BHdd), upper=False, unitriangular=True
        )
        outs.append((q * from_start) @ state_BHdd + queries_BHcc @ u_BHcd)
        added_BHdd = (k * decay_BHccd[:, :, -1]).transpose(2, 3) @ u_BHcd
        state_BHdd = from_start[:, :, -1, :, None] * state_BHdd + added_BHdd
    return torch.cat(outs, 2), state_BHdd


class Delta(Linear):
    """Base of the kinds with the delta rule."""

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.q_conv = ShortConvolution(self.heads * self.width)
        self.k_conv, self.v_conv = (ShortConvolution(config.num_key_value_heads * self.width) for _ in range(2))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.beta = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.norm = nn.RMSNorm(self.width, config.rms_norm_eps)

    def decays(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Rates of decay before the softplus, [B, T, H, d or 1], and their bias [H, d or 1]."""
        raise NotImplementedError

    def gated(self, x_BTD: Tensor) -> Tensor:
        """The output gate [B, T, H d]."""
        raise NotImplementedError

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        dtype = wide(call.new.q.dtype)
        q_BHTd = self.q_conv(call.new.q, "q", call).to(dtype)
        k_BHTd = self.of_query_heads(self.k_conv(call.new.k, "k", call))
        v_BHTd = self.of_query_heads(self.v_conv(call.new.v, "v", call))
        q_BHTd, k_BHTd = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q_BHTd, k_BHTd))
        rate, bias = (x.to(dtype) for x in self.decays(call.new.x))
        log_alpha_BTHd = -self.A_log.to(dtype).exp()[:, None] * F.softplus(rate + bias)
        log_alpha_BHTd = log_alpha_BTHd.transpose(1, 2).expand_as(q_BHTd)
        beta_BHT1 = self.beta(call.new.x).to(dtype).sigmoid().transpose(1, 2)[..., None]
        arguments = q_BHTd * self.width**-0.5, k_BHTd, v_BHTd, log_alpha_BHTd, beta_BHT1
        out_BHTd, state_BHdd = delta_rule(*arguments, self.state(call))
        call.store.set_state("state", call.text, state_BHdd)
        out_BTHd = self.norm(out_BHTd.to(call.new.v.dtype)).transpose(1, 2)
        return (out_BTHd * self.gated(call.new.x).view_as(out_BTHd)).transpose(1, 2)


class Kda(Delta):
    """Kind `kda`: each channel decays at its own rate."""

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.decay_down, self.gate_down = (nn.Linear(config.hidden_size, self.width, bias=False) for _ in range(2))
        self.decay_up, self.gate_up = (nn.Linear(self.width, self.heads * self.width, bias=False) for _ in range(2))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads * self.width))

    def decays(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        rate_BTHd = self.decay_up(self.decay_down(x_BTD)).unflatten(-1, (self.heads, -1))
        return rate_BTHd, self.dt_bias.view(self.heads, -1)

    def gated(self, x_BTD: Tensor) -> Tensor:
        return self.gate_up(self.gate_down(x_BTD)).sigmoid()


class Gdn(Delta):
    """Kind `gdn`: all channels of a head decay alike."""

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.decay = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.gate = nn.Linear(config.hidden_size, self.heads * self.width, bias=False)

    def decays(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self.decay(x_BTD)[..., None], self.dt_bias[:, None]

    def gated(self, x_BTD: Tensor) -> Tensor:
        return F.silu(self.gate(x_BTD))


KINDS.update(lightning=Lightning, gdn=Gdn, kda=Kda)
