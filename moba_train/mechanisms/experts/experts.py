"""A mixture of experts as the feed-forward of a layer (Shazeer et al. 2017; Mixtral, Qwen3-MoE, DeepSeek-V3).

Shape suffixes: T tokens of this rank (with tensor parallelism of its group), D hidden size, E experts, k experts of a
token, n = T k choices.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from moba_train.config.model import ModelConfig
from moba_train.mechanisms.experts import parallel, step
from moba_train.mechanisms.experts.balance import Balance
from moba_train.mechanisms.experts.exchange import at_their_experts
from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.mechanisms.experts.products import Experts, gather_rows, inverse, local_weight, sum_rows
from moba_train.mechanisms.experts.router import Router, auxiliary_loss, choose, scores, token_weights
from moba_train.model.feed_forward import FeedForward, FeedForwardCosts, RegisteredFeedForward
from moba_train.model.loss import LossTokens


class MixtureOfExperts(RegisteredFeedForward):
    """Experts that a router chooses from for each token, and shared ones that every token passes through."""

    Options = MoeOptions
    steps: ClassVar[Any] = step
    parallel: ClassVar[Any] = parallel
    bias: Tensor
    """Bias of the choice of each expert, float32 [E]. It also names the layer to its `Balance`, by its address."""

    def __init__(self, options: MoeOptions, model: ModelConfig) -> None:
        super().__init__()
        self.options = options
        self.router = Router(model.hidden_size, options.experts, options.bias)
        self.experts = Experts(options, model.hidden_size)
        width = options.shared * options.intermediate_size
        self.shared = FeedForward(model.hidden_size, width) if width else None
        self.shared_gate = Router(model.hidden_size, 1, False) if options.shared_gate else None
        self.register_buffer("bias", torch.zeros(options.experts), persistent=options.router.has_bias)
        self.balance = Balance(options)
        self.ep_group: str | None = None
        """Name of the ranks that the experts are divided over (exchange.py); None: each has all."""
        self.tp = 1
        self.tp_rank = 0
        self.load_E = torch.zeros(0)
        """Choices of each expert in the step, over all ranks, float64 [E]."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """The update of the residual stream [T, D], and the auxiliary loss of each token, float32 [T], or None; with
        tensor parallelism this rank's summand of the update, and the loss of its own rows."""
        router = self.options.router
        logits_TE = self.router(x_TD, _summed(self.router.weight))
        scores_TE = scores(logits_TE, router)
        experts_Tk, order_n, ends_E, load_SE, sequence_T = choose(scores_TE.detach(), self.bias, self.balance.handle)
        places_n = inverse(order_n)
        places_Tk = places_n.view_as(experts_Tk)
        tokens_n = order_n // self.options.active
        rows_nD = gather_rows(x_TD, tokens_n, places_Tk)
        weights_Tk = token_weights(scores_TE, experts_Tk, router)
        weights_n1 = gather_rows(weights_Tk.view(-1, 1), order_n, places_n[:, None])
        shared = None if self.shared is None else self._shared
        given = rows_nD, weights_n1, ends_E
        if self.ep_group is None:
            y_nD = self.experts(*given)
            found = None if shared is None else shared(x_TD)
        else:
            y_nD, found = at_their_experts(*given, self.experts, self.ep_group, x_TD, shared)
        update_TD = sum_rows(y_nD, tokens_n, places_Tk)
        auxiliary_T = auxiliary_loss(logits_TE, scores_TE, load_SE, sequence_T, router)
        if auxiliary_T is not None and self.tp > 1:
            auxiliary_T = auxiliary_T.chunk(self.tp)[self.tp_rank]
        return update_TD if found is None else update_TD + found, auxiliary_T

    def _shared(self, x_TD: Tensor) -> Tensor:
        shared = self.shared
        assert shared is not None
        if self.tp == 1:
            out_TD: Tensor = shared(x_TD)
        else:
            gate, up, down = (
                local_weight(part.weight) for part in (shared.gate_proj, shared.up_proj, shared.down_proj)
            )
            out_TD = F.linear(F.silu(F.linear(x_TD, gate)) * F.linear(x_TD, up), down)  # summands, as of other experts
        if self.shared_gate is None:
            return out_TD
        logits_T1 = self.shared_gate(x_TD, _summed(self.shared_gate.weight))
        return out_TD * logits_T1.sigmoid().to(out_TD.dtype)

    @classmethod
    def costs(cls, options: MoeOptions, model: ModelConfig) -> FeedForwardCosts:
        """Costs of a layer."""
        expert = 3 * model.hidden_size * options.intermediate_size
        biases = options.bias * (2 * options.intermediate_size + model.hidden_size)
        router = model.hidden_size * options.experts
        gate = options.shared_gate * model.hidden_size
        always = options.active + options.shared
        return FeedForwardCosts(
            parameters=(options.experts + options.shared) * expert
            + options.experts * (biases + options.bias)
            + router
            + gate,
            matrices=(options.experts + options.shared) * expert,
            active=always * expert + router + gate,
            width=always * options.intermediate_size,
            widths=frozenset(
                {width for width in (options.intermediate_size, options.shared * options.intermediate_size) if width}
            ),
            copies=options.active,
            separate=options.experts * (expert + biases),
            parts=options.experts,
        )

    @classmethod
    def function(cls, options: MoeOptions) -> dict[str, Any]:
        """The options by path, without `layers` and those of the balance."""
        training = {"balance", "aux_loss", "aux_loss_over", "bias_update", "z_loss"}
        router = options.router.model_dump(exclude=training)
        found = options.model_dump(exclude={"layers", "router"})
        return found | {f"router.{key}": value for key, value in router.items()}

    @classmethod
    def adding_buffers(cls, options: MoeOptions) -> dict[str, Any]:
        """The balance if it has biases."""
        return {"router.balance": options.router.balance} if options.router.has_bias else {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MixtureOfExperts":
        # 16 bits would round the bias by more than its differences, and `to_empty` would leave it undefined.
        before = self.bias
        super()._apply(fn, recurse)
        device = self.bias.device
        self.bias = torch.zeros_like(before, device=device) if before.is_meta else before.to(device)
        return self

    def count_tokens(self, loss_tokens: LossTokens | None) -> None:
        """Set this rank's rows with loss in the next forward pass, which trains; None: it does not."""
        self.balance.loss_tokens = loss_tokens


def _summed(weight: Tensor) -> Tensor:
    """A weight that all ranks of a tp group have, which have summands of its gradient, as a plain tensor."""
    return weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight
