"""Objectives: what a stage minimises instead of the cross entropy of its labels.

Shape suffixes: n tokens that carry loss or a chunk of them, D hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.stages import Stage
from moba_train.registry import OBJECTIVES


class ObjectiveCosts(NamedTuple):
    """Costs of an objective for plans, in addition to those of the cross entropy."""

    share: float = 0.0
    """Share of the steps that have these costs."""
    attention: tuple[LayerAttention | None, ...] = ()
    """Attention that each layer computes once more, forward and without gradient; None: none."""
    kept_bytes: int = 0
    """Bytes that stay until the backward pass, of each element of these attentions' outputs."""
    logit_peak: int = 0
    """Bytes of each logit of a chunk at the loss's peak; 0: that of the cross entropy. Else there is a teacher, which
    computes a whole forward pass with the attention above, and logits of its own."""
    logit_traffic: int = 0
    """Bytes read and written of each logit, forward and backward."""


class Objective(ABC):
    """One stage's objective: a member of the group `moba_train.objectives`, made of its options.

    It sums over loss tokens with the weights that it is given, which are divided by the sum over all ranks.
    """

    Options: ClassVar[type[Section]]

    @classmethod
    @abstractmethod
    def problems(cls, options: Any, config: Any, attention: tuple[LayerAttention, ...]) -> list[str]:
        """Problems with the recipe, a `RunConfig`, and the `attention` of the stage's layers, each begun with
        a key's end: `.on: given ...; allowed: ...`."""

    @classmethod
    def costs(cls, options: Any, attention: Sequence[LayerAttention]) -> ObjectiveCosts:
        """Costs in a stage with the attention of these layers. The default is none."""
        return ObjectiveCosts()

    @abstractmethod
    def begin_step(self, step: int) -> None:
        """Called before the forward passes of a step, counted over the run from 1; again if the step runs again."""

    @abstractmethod
    def prepare(self, model: Any, loss_tokens: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Tensors [n, ...] for the rows in `loss_tokens`, before the forward pass of `model`, a Transformer, on
        `inputs`, which it must leave as it was. Empty: the cross entropy is summed. Called on all ranks together."""

    @abstractmethod
    def of_chunk(
        self, hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor, weights_n: Tensor, *prepared: Tensor
    ) -> Tensor:
        """Weighted sum of a chunk of rows, a float32 scalar, with these rows of what `prepare` gave."""

    @abstractmethod
    def measured(self) -> dict[str, Tensor]:
        """Further metrics of the step, scalars over all ranks. Called once a step on all ranks together."""


def objective_costs(stage: Stage) -> ObjectiveCosts:
    """Costs of a stage's objective; none without one."""
    if stage.objective is None:
        return ObjectiveCosts()
    name, options = stage.objective
    found: ObjectiveCosts = OBJECTIVES[name].costs(options, stage.attention)
    return found
