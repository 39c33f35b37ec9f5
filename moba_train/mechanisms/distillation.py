"""The objective `distill`: sparse attention learns from full attention on the same weights.

The teacher is the model itself, with full attention in every layer and without gradient, at the same step and on the
same tokens (RTPurbo, arXiv:2605.16928; SSA): no second model is kept. For each token that carries loss,

    (1 - weight) CE + weight tau^2 KL(softmax(z_full / tau) || softmax(z_sparse / tau))

is minimised, by the weights of the cross entropy. Of the teacher only the last hidden state of these tokens is kept;
logits of both exist for a chunk of tokens at a time.

Shape suffixes: n tokens that carry loss or a chunk of them, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.schema import RunConfig
from moba_train.model.build import build_attention
from moba_train.model.feed_forward import count_tokens
from moba_train.model.loss import LossTokens
from moba_train.model.objective import Objective
from moba_train.model.transformer import Transformer


class DistillOptions(Section):
    """Self-distillation: the stage's attention learns from full attention on the same weights, in addition to the
    labels. Costs another forward pass, with full attention, which plans and MFU do not count."""

    teacher: Literal["full", "base"] = Field(
        "full",
        description="the same step's weights, with full attention in all layers; base: without adapters, those of "
        "init_from",
    )
    loss: Literal["kl"] = Field("kl", description="KL divergence of the teacher's distribution from the student's")
    on: Literal["logits"] = Field("logits", description="what is compared: the distributions over the vocabulary")
    weight: float = Field(0.5, gt=0, le=1, description="share of the divergence; the cross entropy has the rest")
    temperature: float = Field(1.0, gt=0, le=100, description="divides the logits of both")
    every: int = Field(1, ge=1, description="steps of which one distils, counted over the run; others learn labels")


class Distillation(Objective):
    """Self-distillation of one stage. Logs `cross_entropy` and `distillation`, the divergence, in nats per token; the
    loss of a step is what is minimised."""

    Options = DistillOptions

    def __init__(self, options: DistillOptions) -> None:
        self._options = options
        self._due = False
        self._sums: Tensor | None = None
        """Cross entropy and divergence of this rank's loss tokens in the step so far, [2]."""

    @classmethod
    def problems(cls, options: DistillOptions, config: RunConfig) -> Iterator[str]:
        """A base that no adapters leave as it is."""
        if options.teacher == "base" and config.adapters.given is None:
            yield "teacher: given 'base' without adapters, where it is the student; allowed: full, or adapters.lora"

    def begin_step(self, step: int) -> None:
        """Forget the step before."""
        self._due = step % self._options.every == 0
        self._sums = None

    def prepare(self, model: Transformer, loss_tokens: LossTokens, *inputs: Any) -> tuple[Tensor, ...]:
        """The teacher's last hidden states [n, D]; nothing in evaluations, and in steps that do not distil."""
        if not (self._due and torch.is_grad_enabled()):
            return ()
        own = model.attention_kinds()
        full = LayerAttention("full", FullAttention.Options())
        model.set_attention(build_attention([full] * model.config.layers, model.config.head_width))
        count_tokens(model, None)  # experts count the student's choices alone
        try:
            adapters = model.adapters if self._options.teacher == "base" else None
            with torch.no_grad(), adapters.off() if adapters is not None else nullcontext():
                hidden_TD, _ = model.hidden(*inputs)
        finally:
            model.set_attention(own)
            count_tokens(model, loss_tokens)
        return (hidden_TD.index_select(0, loss_tokens[1]),)

    def of_chunk(
        self, hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor, weights_n: Tensor, *prepared: Tensor
    ) -> Tensor:
        """Weighted sum of both losses."""
        (teacher_nD,) = prepared
        share = self._options.weight
        tau = self._options.temperature
        logits_nV = F.linear(hidden_nD, weight_VD).float()
        entropy = (F.cross_entropy(logits_nV, labels_n, reduction="none") * weights_n).sum()
        with torch.no_grad():
            target_nV = (F.linear(teacher_nD, weight_VD).float() / tau).log_softmax(-1)
        student_nV = (logits_nV / tau).log_softmax(-1)
        kl_n = F.kl_div(student_nV, target_nV, reduction="none", log_target=True).sum(-1)
        divergence = (kl_n * weights_n).sum()
        found = torch.stack([entropy.detach(), divergence.detach()])
        self._sums = found if self._sums is None else self._sums + found
        return (1 - share) * entropy + share * tau**2 * divergence

    def measured(self) -> dict[str, Tensor]:
        """Cross entropy and divergence of a step that distils; nothing of others."""
        if not self._due:
            return {}
        self._due = False  # until the next step begins: evaluations between steps have no teacher
        assert self._sums is not None
        dist.all_reduce(self._sums)
        return dict(zip(("cross_entropy", "distillation"), self._sums, strict=True))
