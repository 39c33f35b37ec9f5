"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with weight decay on matrices only."""

import torch
from torch.optim import AdamW, Optimizer

from moba_train.config.optim import OptimConfig
from moba_train.optim.spec import NamedParameters, OptimizerSpec


def _build(parameters: NamedParameters, config: OptimConfig, device: torch.device) -> Optimizer:
    matrices = [parameter for _, parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for _, parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "lr_factor": 1.0},
        {"params": vectors, "weight_decay": 0.0, "lr_factor": 1.0},
    ]
    fused = True if device.type == "cuda" else None
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


ADAMW = OptimizerSpec(_build, {"exp_avg": 4, "exp_avg_sq": 4, "step": 0})
