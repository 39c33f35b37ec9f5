"""The router: scores of each token for each expert, and the operator that chooses.

The choice is one operator, which activation checkpointing keeps (`ALWAYS_SAVED`): a recomputed forward pass could
choose otherwise at near-ties, would count twice, and would repeat the sum over ranks.

Shape suffixes: T tokens, D hidden size, E experts, k experts of a token, n = T k choices, S sequences.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moba_train.attention.handles import by_handle
from moba_train.mechanisms.experts.balance import Balance
from moba_train.mechanisms.experts.options import RouterOptions
from moba_train.parallel.activations import ALWAYS_SAVED


class Router(nn.Module):
    """Logits of the experts, or of the gate of shared ones, in float32, of weights as FSDP gathers them with the
    block's. No `nn.Linear`: it stays out of FP8, and Muon leaves it to AdamW."""

    def __init__(self, hidden_size: int, experts: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(experts)) if has_bias else None

    def forward(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """Logits [T, E], at least float32. `weight` is this module's, in this rank's form of it."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        bias_E = None if self.bias is None else self.bias.to(dtype)
        if x_TD.dtype == weight_ED.dtype == torch.bfloat16:
            logits_TE: Tensor = _Bf16Product.apply(x_TD, weight_ED)
            return logits_TE if bias_E is None else logits_TE + bias_E
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype), bias_E)


class _Bf16Product(torch.autograd.Function):
    """Logits in float32 of inputs in bf16, whose products are exact in float32: tensor cores compute what a product of
    float32 copies would.

    By such copies the routers took 21 ms of a step of 1,034 (eight layers of Qwen3-30B-A3B, 64K tokens, H200;
    benchmarks/results/training-profile-experts-64k-h200.json).
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return _in_float32(x_TD, weight_ED.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TE: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, weight_ED = ctx.saved_tensors
        high_TE = gradient_TE.bfloat16()
        low_TE = (gradient_TE - high_TE).bfloat16()  # both together have 16 bits of the gradient
        dx_TD = _in_float32(high_TE, weight_ED) + _in_float32(low_TE, weight_ED)
        dweight_ED = _in_float32(high_TE.T, x_TD) + _in_float32(low_TE.T, x_TD)
        return dx_TD.bfloat16(), dweight_ED.bfloat16()


def _in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Product of two matrices in bf16, in float32."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def scores(logits_TE: Tensor, options: RouterOptions) -> Tensor:
    """Scores of the experts, [T, E]."""
    return logits_TE.softmax(1) if options.score == "softmax" else logits_TE.sigmoid()


def token_weights(scores_TE: Tensor, experts_Tk: Tensor, options: RouterOptions) -> Tensor:
    """Weights of each token's experts, [T, k]."""
    weights_Tk = scores_TE.gather(1, experts_Tk)
    if options.normalize:
        weights_Tk = weights_Tk / weights_Tk.sum(1, keepdim=True).clamp(min=1e-20)
    return weights_Tk * options.scale


def auxiliary_loss(
    logits_TE: Tensor, scores_TE: Tensor, load_SE: Tensor, sequence_T: Tensor, options: RouterOptions
) -> Tensor | None:
    """Auxiliary loss of each token, float32 [T]; None where the options have none. load: f_e of balance.py in each
    sequence; sequence: that of each token."""
    losses = []
    if options.has_loss:
        of_all_TS = normalized(scores_TE, options) @ load_SE.to(scores_TE.dtype).T
        own_T = of_all_TS.gather(1, sequence_T[:, None]).squeeze(1)
        losses.append(options.aux_loss * load_SE.shape[1] * own_T)
    if options.z_loss:
        losses.append(options.z_loss * logits_TE.logsumexp(1).square())
    return sum(losses[1:], start=losses[0]).float() if losses else None


def normalized(scores_TE: Tensor, options: RouterOptions) -> Tensor:
    """The scores of a token as shares of 1."""
    return scores_TE if options.score == "softmax" else scores_TE / scores_TE.sum(1, keepdim=True).clamp(min=1e-20)


def _choose(scores_TE: Tensor, bias_E: Tensor, balance: str) -> tuple[Tensor, ...]:
    """Experts of each token int64 [T, k], best first; the choices sorted by expert, int64 [n]; where those of each
    expert end, int32 [E]; f_e of balance.py, float32 [S, E]; and the sequence of each token, int64 [T]. `balance`:
    handle of a `Balance`."""
    found: Balance = by_handle(balance)
    options = found.options
    router = options.router
    preferred_TE = scores_TE + bias_E if router.has_bias else scores_TE
    if router.groups is not None and router.active_groups is not None:
        preferred_TE = _in_best_groups(preferred_TE, router.groups, router.active_groups, router.score)
    experts_Tk = preferred_TE.topk(options.active, dim=1).indices
    sorted_n, order_n = experts_Tk.flatten().sort(stable=True)
    ends_E = torch.searchsorted(sorted_n, torch.arange(options.experts, device=sorted_n.device), right=True)
    return (
        experts_Tk,
        order_n,
        ends_E.int(),
        *found.note(bias_E.data_ptr(), normalized(scores_TE, router), sorted_n, order_n),
    )


def _in_best_groups(preferred_TE: Tensor, groups: int, active: int, score: str) -> Tensor:
    """The preferences of the experts in each token's best groups, -inf for others. A group is as good as its best
    expert (softmax, DeepSeek-V2) or its best two together (sigmoid, DeepSeek-V3)."""
    by_group_TGe = preferred_TE.unflatten(1, (groups, -1))
    taken = min(2 if score == "sigmoid" else 1, by_group_TGe.shape[2])
    best_TG = by_group_TGe.topk(taken, dim=2).values.sum(2)
    is_left_out_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, best_TG.topk(active, dim=1).indices, False)
    return by_group_TGe.masked_fill(is_left_out_TG[:, :, None], -torch.inf).flatten(1)


choose = torch.library.custom_op(
    "moba_train::choose_experts",
    _choose,
    mutates_args=(),
    schema="(Tensor scores, Tensor bias, str balance) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""`_choose` as an operator; no result is differentiable."""


@choose.register_fake
def _(scores_TE: Tensor, bias_E: Tensor, balance: str) -> tuple[Tensor, ...]:
    found: Balance = by_handle(balance)
    tokens, experts = scores_TE.shape
    choices = scores_TE.new_empty(tokens, found.options.active, dtype=torch.int64)
    ends = scores_TE.new_empty(experts, dtype=torch.int32)
    load = scores_TE.new_empty(found.sequences, experts, dtype=torch.float32)
    return choices, choices.new_empty(choices.numel()), ends, load, choices.new_empty(tokens)


ALWAYS_SAVED.add(torch.ops.moba_train.choose_experts.default)
