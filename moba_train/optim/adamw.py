"""AdamW with weight decay on matrices only, and global gradient-norm clipping."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.config.optim import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the model's parameters; the learning rate is set by the trainer before each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True if device.type == "cuda" else None
    )


def gradient_norm(module: nn.Module) -> Tensor:
    """The L2 norm of all gradients of a module on all ranks, a float32 scalar; 0 without any. A collective."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(model: nn.Module, max_norm: float | None, norm: Tensor) -> None:
    """Scale all gradients down to `max_norm` if `norm`, which is theirs, is larger.

    A norm that is not finite leaves the gradients useless: the caller must not step then.
    """
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), max_norm, norm)
