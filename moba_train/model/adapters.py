"""Adapters: what a run trains instead of its model, whose own weights, the base, stay those of `init_from`.

The base is neither saved nor in the optimizer. Each start reads it from `init_from` again, and a checkpoint knows from
which weights its adapters were trained.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moba_train.config.base import Section


class Adapters(ABC):
    """The adapters of a model, its attribute `adapters`: a member of the group `moba_train.adapters`, made of its
    section of the recipe, `adapters.NAME`, and of the model, to which it adds modules on torch's current device."""

    Options: ClassVar[type[Section]]
    base: frozenset[str]
    """Names of the model's own parameters that are not trained, and need no gradient."""
    added: frozenset[str]
    """Names of the parameters and buffers that the model has by the adapters."""
    dtype: torch.dtype = torch.float32
    """Dtype in which the base is kept from `begin` on: that in which FSDP gathers it."""

    @classmethod
    @abstractmethod
    def problems(cls, options: Section, config: Any) -> Iterator[str]:
        """Problems of a recipe, a `RunConfig`, with these adapters, each named by its key."""

    @abstractmethod
    def initial_values(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """First values of the parameter of this name; None: as those of a model are drawn."""

    @abstractmethod
    def begin(self) -> None:
        """Called on all ranks together when the model has the base's weights, before it computes."""

    @abstractmethod
    def check(self) -> None:
        """Called on all ranks together when adapters were loaded. Raises CheckpointError for another base."""

    @abstractmethod
    def off(self) -> AbstractContextManager[None]:
        """Inside, the model computes as its base does."""


def base_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are neither trained nor saved; none without adapters."""
    adapters = getattr(model, "adapters", None)
    return adapters.base if isinstance(adapters, Adapters) else frozenset()
