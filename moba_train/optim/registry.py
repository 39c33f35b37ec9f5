"""The optimizers that a recipe can name: entry points of the group `moba_train.optimizers`."""

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from moba_train import registry
from moba_train.config.optim import OptimConfig
from moba_train.optim.spec import OptimizerSpec

OPTIMIZERS = cast(registry.Registry[OptimizerSpec], registry.OPTIMIZERS)
"""Optimizers by name."""


def build_optimizer(
    model: nn.Module, config: OptimConfig, device: torch.device, group: dist.ProcessGroup | None = None
) -> Optimizer:
    """The optimizer `config.kind` over all parameters of `model`; its learning rates are set before each step.

    group: all ranks that hold shards of the model; None: this process holds it whole.
    """
    return OPTIMIZERS[config.kind].build(model, config, device, group)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Gives every parameter group the rate `lr` times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
