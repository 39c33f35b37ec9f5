"""The optimizers that a recipe can name.

To add one: a file with its OptimizerSpec, a line here, its name in `config.optim.OptimizerKind` and in the parameters
of tests/optim/test_optimizers.py.
"""

import torch
from torch import nn
from torch.optim import Optimizer

from moba_train.config.optim import OptimConfig, OptimizerKind
from moba_train.optim.adamw import ADAMW
from moba_train.optim.spec import OptimizerSpec

OPTIMIZERS: dict[OptimizerKind, OptimizerSpec] = {"adamw": ADAMW}


def build_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> Optimizer:
    """The optimizer `config.kind` over all parameters of `model`; its learning rates are set before each step."""
    return OPTIMIZERS[config.kind].build(list(model.named_parameters()), config, device)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Gives every parameter group the rate `lr` times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
