"""Objectives: what a stage minimises instead of the cross entropy of its labels.

Shape suffixes: n tokens that carry loss or a chunk of them, D hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from moba_train.config.base import Section


class Objective(ABC):
    """One stage's objective: a member of the group `moba_train.objectives`, made of its options.

    It sums over loss tokens with the weights that it is given, which are divided by the sum over all ranks.
    """

    Options: ClassVar[type[Section]]

    @classmethod
    @abstractmethod
    def problems(cls, options: Any, parallel: Any) -> list[str]:
        """Problems with the section `parallel`, each begun with a key's end: `.on: given ...; allowed: ...`."""

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
