"""Gradient norms over all ranks, and clipping."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.model.transformer import Transformer


def gradient_norm(module: nn.Module) -> Tensor:
    """L2 norm of all gradients of a module over all ranks, a float32 scalar; 0 if all its parameters are frozen. A
    collective."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    shared = [g for g in gradients if isinstance(g, DTensor) and "tp" in (g.device_mesh.mesh_dim_names or ())]
    if shared:
        # On a mesh with tp, torch sums over one dimension after the other, and the result may differ in the last bit
        # between ranks that hold copies of a norm weight. They must clip alike, so the sum is one all-reduce.
        square = _square_here(shared)
        dist.all_reduce(square)
        return square.sqrt()
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(model: nn.Module, max_norm: float | None, norm: Tensor) -> None:
    """Scale all gradients down so that their norm is `max_norm`, if `norm`, their present norm, is larger.

    A `norm` that is not finite leaves the gradients useless: the caller must not step then.
    """
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), max_norm, norm)


def norms_by_kind(model: Transformer, kinds: Sequence[str]) -> dict[str, Tensor]:
    """L2 norm of the gradients of all layers of one attention kind, a float32 scalar for each `grad_norm_KIND`.

    kinds: attention kind of each layer, first to last

    One collective over all ranks, whatever the number of layers and kinds.
    """
    gradients: dict[str, list[Tensor]] = {name: [] for name in sorted(set(kinds))}
    for block, kind in zip(model.blocks, kinds, strict=True):
        gradients[kind] += [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
    none = torch.zeros((), device=next(model.parameters()).device)
    squares = torch.stack([_square_here(own) if own else none for own in gradients.values()])
    dist.all_reduce(squares)
    return {f"grad_norm_{name}": square.sqrt() for name, square in zip(gradients, squares, strict=True)}


def _square_here(gradients: Sequence[Tensor]) -> Tensor:
    """This rank's contribution to the squared norm of `gradients`: those of all ranks add up to it."""
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_copies.setdefault(_copies(gradient), []).append(part)
    squares = [torch.nn.utils.get_total_norm(parts).square() / copies for copies, parts in by_copies.items()]
    return torch.stack(squares).sum()


def _copies(gradient: Tensor) -> int:
    """How many ranks hold a copy of each number of `gradient`."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
