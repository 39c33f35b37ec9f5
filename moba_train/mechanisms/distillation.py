"""The objective `distill`: sparse attention learns from full attention on the same weights.

No second model is kept. One of two things is compared:

- `on: logits` (RTPurbo, arXiv:2605.16928). The teacher is the model itself, with full attention in every layer and
  without gradient, at the same step and on the same tokens. For each token that carries loss,

      (1 - weight) CE + weight tau^2 KL(softmax(z_full / tau) || softmax(z_sparse / tau))

  is minimised, by the weights of the cross entropy. Of the teacher only the last hidden state of these tokens is kept;
  logits of both exist for a chunk of tokens at a time.
- `on: attention` (as SSA aligns outputs, from sparse to full). In each sparse layer the output is compared with that of
  full attention on the same input, without gradient: CE + weight * mean over layers of |sparse - full|^2 / |full|^2.

With `full_every` a share of the steps trains with full attention, as in SSA: keys that no query selects get gradients.

Shape suffixes: n tokens that carry loss or a chunk of them, T tokens of this rank, D hidden size, V vocabulary, H query
heads, d head width.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.full.full_kind import KindAround
from moba_train.attention.kind import AttentionKind, LayerInput
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.schema import RunConfig
from moba_train.evals.evaluation import Layers, without_full
from moba_train.mechanisms.by_group import ByGroupKind
from moba_train.mechanisms.gates.distilled_gate import DistilledGate
from moba_train.model.build import build_attention
from moba_train.model.feed_forward import count_tokens
from moba_train.model.loss import LossTokens, capped
from moba_train.model.objective import Objective, ObjectiveCosts
from moba_train.model.transformer import Transformer


class DistillOptions(Section):
    """Self-distillation: the stage's attention learns from full attention on the same weights, in addition to the
    labels. Costs the teacher's forward pass, and on logits a second product with the output weight: plans count them,
    MFU does not. Plans take steps of `full_every` for steps with the stage's own attention."""

    not_here = {"loss": "gone: always kl", "temperature": "gone: always 1"}

    teacher: Literal["full", "full_and_windows", "base"] = Field(
        "full",
        description="the same step's weights, with full attention in all layers that have a softmax; full_and_windows: "
        "windows stay, as in models that have both; base: full attention on the weights without adapters",
    )
    on: Literal["logits", "attention"] = Field(
        "logits",
        description="what is compared: logits: the distributions over the vocabulary, by KL divergence; attention: "
        "each sparse layer's output with full attention's on the same input, by its relative squared error, which "
        "needs parallel.tp 1",
    )
    weight: float = Field(
        0.5,
        gt=0,
        le=1,
        description="on logits: weight of the divergence, where the cross entropy has the rest; on attention: factor "
        "on the error, which is added",
    )
    every: int = Field(1, ge=1, description="distil in every N-th step of the run; the other steps learn labels")
    full_every: int | None = Field(
        None,
        ge=2,
        description="every N-th step trains with full attention in all layers and learns labels, so that keys that "
        "no query selects get gradients; gates with a warm-up learn in it as there; null: none",
    )

    def teacher_of(self, layer: LayerAttention) -> LayerAttention:
        """The teacher's attention in a layer with this one."""
        full = layer.full(keep_windows=self.teacher == "full_and_windows")
        return full or LayerAttention("full", KINDS["full"].Options())  # a base's; else `problems` refuses None


class Distillation(Objective):
    """Self-distillation of one stage. On logits logs `cross_entropy` and `distillation`, the divergence, in nats per
    token; on attention the error is part of the layers' auxiliary losses. The loss of a step is what is minimised."""

    Options = DistillOptions

    def __init__(self, options: DistillOptions) -> None:
        self._options = options
        self._due = False
        self._cap: float | None = None
        self._full = False
        self._sums: Tensor | None = None
        """Cross entropy and divergence of this rank's loss tokens in the step so far, [2]."""
        self._own: tuple[Transformer, list[AttentionKind]] | None = None
        """The model and its own attention while a step runs with another one."""
        self._made: list[AttentionKind] = []
        """The other attention, the same objects in all steps: torch.compile compiles once for each."""
        self._made_full: list[AttentionKind] = []
        """That of steps with full attention."""

    @classmethod
    def problems(cls, options: DistillOptions, config: RunConfig, attention: Layers) -> list[str]:
        """Layers without a teacher, a pipeline, outputs of attention whose heads are on several ranks, and a base
        without adapters."""
        if options.teacher != "base" and (lacking := without_full(attention)):
            return [f": given, but {lacking}, from which it would learn; allowed: other kinds"]
        parallel = config.parallel
        if parallel.pp > 1:
            return [f": given with parallel.pp {parallel.pp}; allowed: with pp 1"]
        if options.on == "attention" and parallel.tp > 1:
            return [f".on: given 'attention' with parallel.tp {parallel.tp}; allowed: with tp 1"]
        if options.teacher == "base" and (config.adapters.given is None or options.on == "attention"):
            return [".teacher: given 'base'; allowed with adapters, and on: logits, else full"]
        return []

    @classmethod
    def costs(cls, options: DistillOptions, attention: Sequence[LayerAttention]) -> ObjectiveCosts:
        """The teacher's forward pass and logits or, on attention, its attention in the layers that learn."""
        share = 1 / options.every
        share -= 1 / math.lcm(options.every, options.full_every) if options.full_every else 0
        teachers = [options.teacher_of(layer) for layer in attention]
        if options.on == "logits":
            return ObjectiveCosts(share, tuple(teachers), logit_peak=16, logit_traffic=130)
        learning = tuple(
            None if teacher == layer else teacher for layer, teacher in zip(attention, teachers, strict=True)
        )
        return ObjectiveCosts(share, learning, kept_bytes=4)

    def begin_step(self, step: int) -> None:
        """Forget the step before."""
        self._restore()
        full_every = self._options.full_every
        self._full = full_every is not None and step % full_every == 0
        self._due = not self._full and step % self._options.every == 0
        self._sums = None

    def prepare(self, model: Transformer, loss_tokens: LossTokens, *inputs: Any) -> tuple[Tensor, ...]:
        """The teacher's last hidden states [n, D]; nothing in evaluations, in steps that do not distil, and where
        outputs of attention are compared."""
        if not torch.is_grad_enabled() or not (self._due or self._full):
            return ()
        if self._own is not None:  # not the step's first micro-batch
            return ()
        self._cap = model.config.logits_cap
        own = model.attention_kinds()
        if self._full:
            self._made_full = self._made_full or _each(own, self._full_step)
            self._own = model, own
            model.set_attention(self._made_full)
            return ()
        self._made = self._made or self._others(own)
        model.set_attention(self._made)
        if self._options.on == "attention":
            self._own = model, own
            return ()
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
        # Passes over all logits are what it costs at small widths: both losses share the student's logarithms, and the
        # teacher's entropy is a number without gradient (1,024 tokens of 49,152 logits on a CPU: 0.68 of the time).
        with torch.no_grad():
            logs_nV = self._logits(teacher_nD, weight_VD).log_softmax(-1)
            target_nV = logs_nV.exp()
            negentropy_n = logs_nV.mul_(target_nV).sum(-1)
            del logs_nV
        student_nV = self._logits(hidden_nD, weight_VD).log_softmax(-1)
        entropy = -(student_nV.gather(1, labels_n[:, None])[:, 0] * weights_n).sum()
        divergence = ((negentropy_n - (target_nV * student_nV).sum(-1)) * weights_n).sum()
        found = torch.stack([entropy.detach(), divergence.detach()])
        self._sums = found if self._sums is None else self._sums + found
        return (1 - share) * entropy + share * divergence

    def _logits(self, hidden_nD: Tensor, weight_VD: Tensor) -> Tensor:
        return capped(F.linear(hidden_nD, weight_VD).float(), self._cap)

    def measured(self) -> dict[str, Tensor]:
        """Cross entropy and divergence of a step that compares logits; nothing of others."""
        self._restore()  # not before: the backward pass may compute blocks again
        if not self._due:
            return {}
        self._due = False  # until the next step begins: evaluations between steps have no teacher
        if self._options.on == "attention":
            return {}
        assert self._sums is not None
        dist.all_reduce(self._sums)
        return dict(zip(("cross_entropy", "distillation"), self._sums, strict=True))

    def _teacher(self, kind: AttentionKind) -> AttentionKind:
        """The teacher's attention in a layer of this kind."""
        own = LayerAttention(kind.name, kind.options)
        teacher = self._options.teacher_of(own)
        return kind if teacher == own else build_attention([teacher], kind.head_dim)[0]

    def _full_step(self, kind: AttentionKind) -> AttentionKind:
        """The teacher's attention; a gate with a warm-up learns from it."""
        if isinstance(kind, DistilledGate):
            return type(kind)(kind.options.model_copy(update={"mode": "warmup"}), kind.head_dim)
        if isinstance(kind, ByGroupKind) and (warm := kind.options.warming_up()):
            return ByGroupKind(warm, kind.head_dim)
        return self._teacher(kind)

    def _others(self, own: Sequence[AttentionKind]) -> list[AttentionKind]:
        """Kinds of a step that distils: the teacher's or, on attention, the own ones, of which those that differ from
        the teacher's learn its output."""
        teacher = _each(own, self._teacher)
        if self._options.on == "logits":
            return teacher
        learning = {kind for kind, other in zip(own, teacher, strict=True) if kind is not other}
        factor = self._options.weight / max(1, sum(kind in learning for kind in own))
        return _each(own, lambda kind: ComparedKind(kind, self._teacher(kind), factor) if kind in learning else kind)

    def _restore(self) -> None:
        """Give the model its own attention again."""
        if self._own is not None:
            model, kinds = self._own
            model.set_attention(kinds)
            self._own = None
        self._full = False


def _each(kinds: Sequence[AttentionKind], make: Callable[[AttentionKind], AttentionKind]) -> list[AttentionKind]:
    """Other kinds for these; layers that share one share the other."""
    made = {kind: make(kind) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


class ComparedKind(KindAround):
    """A layer's kind, whose output also learns full attention's on the same input."""

    def __init__(self, own: AttentionKind, teacher: AttentionKind, factor: float) -> None:
        super().__init__(own)
        self._teacher = teacher
        self._factor = factor

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """The own output, and the own auxiliary loss with the error, of each token."""
        out_THd, auxiliary_T = self.own.mix(layer, parameters)
        with torch.no_grad():
            target_THd = self._teacher.mix(layer, parameters)[0].float()
        error_T = (out_THd.float() - target_THd).square().sum((1, 2))
        # A padding token's values may be 0.
        error_T = self._factor * error_T / target_THd.square().sum((1, 2)).clamp(min=1e-12)
        return out_THd, error_T if auxiliary_T is None else auxiliary_T + error_T
