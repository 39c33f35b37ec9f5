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


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """The global L2 norm of all gradients, a float32 scalar; gradients are scaled down to `max_norm` if it is larger.

    A norm that is not finite leaves the gradients useless: the caller must not step then.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), max_norm, norm)
    return norm
