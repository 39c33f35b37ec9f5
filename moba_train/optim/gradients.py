"""Gradient norms over all ranks, and clipping."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.model.transformer import Transformer
from moba_train.optim.local import local_part


def gradient_norm(module: nn.Module) -> Tensor:
    """L2 norm of all gradients of a module over all ranks, a float32 scalar; 0 if all its parameters are frozen. A
    collective."""
    copied = module.copied_parameters if isinstance(module, Transformer) else ()
    gradients = [p.grad for name, p in module.named_parameters() if p.grad is not None and name not in copied]
    shared = [g for g in gradients if isinstance(g, DTensor) and "tp" in (g.device_mesh.mesh_dim_names or ())]
    is_part = isinstance(module, Transformer) and not module.is_whole
    if shared or is_part:
        # On a mesh with tp, torch sums over one dimension after the other, and the result may differ in the last bit
        # between ranks that hold copies of a norm weight. They must clip alike, so the sum is one all-reduce. So it is
        # where a rank has a part of the layers, which no mesh knows.
        square = _square_here(gradients, module)
        dist.all_reduce(square)
        return square.sqrt()
    if not gradients:
        return torch.zeros((), device=next(module.parameters()).device)
    # What `torch.nn.utils.get_total_norm` computes of DTensors, whose dispatch takes the host three times as long.
    norms = torch.stack(torch._foreach_norm([local_part(gradient) for gradient in gradients]))
    for group in _shard_groups(gradients[0]):
        squares = norms.square()
        dist.all_reduce(squares, group=group)
        norms = squares.sqrt()
    return torch.linalg.vector_norm(norms)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float | None, norm: float) -> None:
    """Scale all gradients down so that their norm is `max_norm`, if `norm`, their present norm in float32, is larger.

    A `norm` that is not finite leaves the gradients useless: the caller must not step then. Nothing waits for the GPU.
    """
    if max_norm is None:
        return
    # In float32, as torch.nn.utils.clip_grads_with_norm_ divides on the GPU.
    scale = float(np.float32(max_norm) * (np.float32(1) / (np.float32(norm) + np.float32(1e-6))))
    if scale >= 1:
        return
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    if not gradients:
        return
    # Each rank scales what it holds. torch's function leaves it to DTensor, which spends seconds of the first step on
    # how the product of a list is sharded over a mesh of three dimensions.
    torch._foreach_mul_(gradients, scale)


def norms_by_kind(model: Transformer, kinds: Sequence[str]) -> dict[str, Tensor]:
    """L2 norm of the gradients of all layers of one attention kind, a float32 scalar for each `grad_norm_KIND`.

    kinds: attention kind of each layer of the whole model, first to last

    One collective over all ranks, whatever the number of layers and kinds.
    """
    modules: dict[str, list[nn.Module]] = {name: [] for name in sorted(set(kinds))}
    for layer, block in zip(model.part.layers, model.blocks, strict=True):
        modules[kinds[layer]].append(block)
    norms = _norms_of(list(modules.values()), model)
    return {f"grad_norm_{name}": norm for name, norm in zip(modules, norms, strict=True)}


def norms_by_module(model: Transformer) -> tuple[list[float], dict[str, float]]:
    """L2 norms of the gradients of each layer of the whole model, and of each module besides the layers, by its name.

    A collective over all ranks.
    """
    by_layer: list[list[nn.Module]] = [[] for _ in range(model.config.layers)]
    for layer, block in zip(model.part.layers, model.blocks, strict=True):
        by_layer[layer].append(block)
    ends = ["embedding", "norm"] + ([] if model.config.tie_embeddings else ["output"])
    copied = {name.partition(".")[0] for name in model.copied_parameters}
    modules = {name: module for name, module in model.named_children() if name not in copied}
    here = [[modules[name]] if name in modules else [] for name in ends]
    norms = _norms_of([*by_layer, *here], model).tolist()
    layers = model.config.layers
    return norms[:layers], dict(zip(ends, norms[layers:], strict=True))


def _norms_of(groups: Sequence[Sequence[nn.Module]], model: Transformer) -> Tensor:
    """L2 norm of the gradients of each group of modules over all ranks, which may have none of a group, float32."""
    squares = [
        _square_here([p.grad for module in group for p in module.parameters() if p.grad is not None], model)
        for group in groups
    ]
    total = torch.stack(squares)
    dist.all_reduce(total)
    return total.sqrt()


def _square_here(gradients: Sequence[Tensor], module: nn.Module) -> Tensor:
    """This rank's contribution to the squared norm of `gradients`: those of all ranks add up to it."""
    if not gradients:
        return torch.zeros((), device=next(module.parameters()).device)
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(_copies(gradient), []).append(local_part(gradient))
    squares = [torch.nn.utils.get_total_norm(parts).square() / copies for copies, parts in by_copies.items()]
    return torch.stack(squares).sum()


def _shard_groups(gradient: Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks that hold the other parts of `gradient`, if any."""
    if not isinstance(gradient, DTensor):
        return []
    mesh = gradient.device_mesh
    sharded = [dim for dim, placement in enumerate(gradient.placements) if placement.is_shard()]
    return [mesh.get_group(dim) for dim in sharded if mesh.size(dim) > 1]


def _copies(gradient: Tensor) -> int:
    """How many ranks hold a copy of each number of `gradient`."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
