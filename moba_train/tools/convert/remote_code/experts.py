"""Mixtures of experts as the feed-forward of a layer (Mixtral, Qwen3-MoE, gpt-oss, DeepSeek-V3).

A router in float32 chooses some experts for each token, whose results are added with weights; shared experts serve all
tokens. Losses that balance the load while a model is trained are not computed.

Shape suffixes: B texts, T tokens, D hidden size, E experts, k experts of a token, n = T k choices, r rows of an expert,
I its width, G groups of experts, e experts of a group, A and B columns in and out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import wide

KEYS = frozenset(
    {"experts", "active", "intermediate_size", "shared", "shared_gate", "bias", "clamp", "layers", "router"}
)
"""Keys of `moba.model.moe` in config.json."""
ROUTER = frozenset(
    {
        *("score", "normalize", "scale", "groups", "active_groups", "balance"),
        *("aux_loss", "aux_loss_over", "bias_update", "z_loss"),  # of training alone
    }
)
"""Keys of `router` there."""


class Weights(nn.Module):
    """A linear layer, or a stack of some, [..., columns out, columns in]."""

    def __init__(self, *shape: int, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape[:-1])) if has_bias else None

    def product(self, x_nA: Tensor, index: int) -> Tensor:
        """The result of one layer of the stack."""
        return F.linear(x_nA, self.weight[index], None if self.bias is None else self.bias[index])

    def logits(self, x_TD: Tensor) -> Tensor:
        """The result in float32 at least."""
        dtype = wide(x_TD.dtype)
        return F.linear(x_TD.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class MixtureOfExperts(nn.Module):
    """Experts, each a SwiGLU or the clamped unit of gpt-oss, their router and the shared ones."""

    bias: Tensor | None
    """Added to the scores for the choice alone, [E] (DeepSeek-V3)."""

    def __init__(self, config: Any, options: dict[str, Any]) -> None:
        super().__init__()
        unknown = sorted((options.keys() - KEYS) | (options["router"].keys() - ROUTER))
        if unknown:
            raise ValueError(f"moba.model.moe: {unknown[0]!r} given, allowed: {', '.join(sorted(KEYS | ROUTER))}")
        hidden, width, number = config.hidden_size, options["intermediate_size"], options["experts"]
        self.active: int = options["active"]
        self.clamp: float | None = options["clamp"]
        self.choice: dict[str, Any] = options["router"]
        has_bias: bool = options["bias"]
        self.router = Weights(number, hidden, has_bias=has_bias)
        self.experts: Any = nn.ModuleDict(
            {
                "gate_proj": Weights(number, width, hidden, has_bias=has_bias),
                "up_proj": Weights(number, width, hidden, has_bias=has_bias),
                "down_proj": Weights(number, hidden, width, has_bias=has_bias),
            }
        )
        if together := options["shared"] * width:
            self.shared = nn.ModuleDict(
                {name: nn.Linear(hidden, together, bias=False) for name in ("gate_proj", "up_proj")}
            )
            self.shared["down_proj"] = nn.Linear(together, hidden, bias=False)
        if options["shared_gate"]:
            self.shared_gate = Weights(1, hidden)
        self.register_buffer("bias", torch.zeros(number) if self.choice["balance"] in ("bias", "both") else None)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The results of a batch's tokens."""
        x_TD = x_BTD.flatten(0, 1)
        scores_TE = self.router.logits(x_TD)
        scores_TE = scores_TE.softmax(1) if self.choice["score"] == "softmax" else scores_TE.sigmoid()
        experts_Tk = self.best(scores_TE.detach())
        weights_Tk = scores_TE.gather(1, experts_Tk)
        if self.choice["normalize"]:
            weights_Tk = weights_Tk / weights_Tk.sum(1, keepdim=True).clamp(min=1e-20)
        sorted_n, order_n = experts_Tk.flatten().sort(stable=True)
        rows = x_TD[order_n // self.active].split(sorted_n.bincount(minlength=scores_TE.shape[1]).tolist())
        y_nD = torch.cat([self.expert(index, x_rD) for index, x_rD in enumerate(rows)])
        y_TkD = y_nD[order_n.argsort()].unflatten(0, experts_Tk.shape)
        out_TD = (y_TkD * (weights_Tk * self.choice["scale"])[..., None]).sum(1).to(x_TD.dtype)
        if "shared" in self._modules:
            shared_TD = F.silu(self.shared["gate_proj"](x_TD)) * self.shared["up_proj"](x_TD)
            shared_TD = self.shared["down_proj"](shared_TD)
            if "shared_gate" in self._modules:
                shared_TD = shared_TD * self.shared_gate.logits(x_TD).sigmoid().to(x_TD.dtype)
            out_TD = out_TD + shared_TD
        return out_TD.view_as(x_BTD)

    def best(self, scores_TE: Tensor) -> Tensor:
        """Experts of each token, int64 [T, k]. Of groups the best ones alone count: by their best expert (softmax,
        DeepSeek-V2) or the sum of their best two (sigmoid, DeepSeek-V3)."""
        preferred_TE = scores_TE if self.bias is None else scores_TE + self.bias
        if self.choice["groups"] is not None:
            by_group_TGe = preferred_TE.unflatten(1, (self.choice["groups"], -1))
            taken = min(2 if self.choice["score"] == "sigmoid" else 1, by_group_TGe.shape[2])
            best_TG = by_group_TGe.topk(taken).values.sum(2).topk(self.choice["active_groups"]).indices
            is_left_out_TG = torch.ones_like(by_group_TGe[..., 0], dtype=torch.bool).scatter(1, best_TG, False)
            preferred_TE = by_group_TGe.masked_fill(is_left_out_TG[..., None], -torch.inf).flatten(1)
        return preferred_TE.topk(self.active).indices

    def expert(self, index: int, x_rD: Tensor) -> Tensor:
        """Results of one expert."""
        gate_rI, up_rI = (self.experts[name].product(x_rD, index) for name in ("gate_proj", "up_proj"))
        if self.clamp is None:
            hidden_rI = F.silu(gate_rI) * up_rI
        else:
            gate_rI = gate_rI.clamp(max=self.clamp)
            hidden_rI = gate_rI * (1.702 * gate_rI).sigmoid() * (up_rI.clamp(-self.clamp, self.clamp) + 1)
        return self.experts["down_proj"].product(hidden_rI, index)
