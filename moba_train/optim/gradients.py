"""Gradient norms, over all ranks, and clipping by them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.model.transformer import Transformer


def gradient_norm(module: nn.Module) -> Tensor:
    """The L2 norm of all gradients of a module on all ranks, a float32 scalar; 0 without any. A collective."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not isinstance(norm, DTensor):
        return norm
    if "tp" not in (norm.device_mesh.mesh_dim_names or ()):
        return norm.full_tensor()
    # In one sum over all ranks: those that hold copies of a norm weight must clip its gradient by the same bits.
    square = _square_here(norm)
    dist.all_reduce(square)
    return square.sqrt()


def clip_gradients(model: nn.Module, max_norm: float | None, norm: Tensor) -> None:
    """Scale all gradients down to `max_norm` if `norm`, which is theirs, is larger.

    A norm that is not finite leaves the gradients useless: the caller must not step then.
    """
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), max_norm, norm)


def norms_by_kind(model: Transformer, kinds: Sequence[str]) -> dict[str, Tensor]:
    """L2 norm of the gradients of all layers with the same kind of attention, float32 scalars, by `grad_norm_KIND`.

    kinds  of attention, one for each layer, first to last

    A collective over all ranks, one whatever the number of layers and kinds.
    """
    names = sorted(set(kinds))
    squares = torch.zeros(len(names), device=next(model.parameters()).device)
    for block, kind in zip(model.blocks, kinds, strict=True):
        for parameter in block.parameters():
            if parameter.grad is not None:
                squares[names.index(kind)] += _square_here(parameter.grad)
    dist.all_reduce(squares)
    return {f"grad_norm_{name}": square.sqrt() for name, square in zip(names, squares, strict=True)}


def _square_here(gradient: Tensor) -> Tensor:
    """This rank's share of the squared norm: all ranks' shares add up to it."""
    if not isinstance(gradient, DTensor):
        return gradient.square().sum() / dist.get_world_size()
    mesh = gradient.device_mesh
    copies = 1
    for dimension, placement in enumerate(gradient.placements):
        if placement.is_replicate():
            copies *= mesh.size(dimension)
    return gradient.to_local().square().sum() / copies
