"""What an optimizer must say about itself to be registered (`optim.registry`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from moba_train.config.optim import OptimConfig

NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: how it is built, and the state that it keeps."""

    build: Callable[[NamedParameters, OptimConfig, torch.device], Optimizer]
    """From all parameters of the model (under FSDP2 shards, as DTensors) to a torch optimizer. Each of its parameter
    groups has an `lr_factor`: its learning rate is that of the run times this factor. A parameter without gradient is
    not stepped and its state stays as it is."""
    state: Mapping[str, int]
    """The state tensors of each parameter, by the names that checkpoints give them, with their bytes for each number of
    the parameter; 0: a single number whatever the parameter's size."""

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state for each number of a parameter."""
        return sum(self.state.values())
