"""Norms of gradients over all ranks, and clipping; and this rank's part of a sharded tensor, as a plain tensor."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.model.part import copied_parameters, own_layers
from moba_train.model.transformer import Transformer
from moba_train.torch_private import foreach_mul_, foreach_norm, local_tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself. Detached, sharing the memory."""
    # Not `DTensor.to_local`, whose autograd function, or the context without, takes longer than all else here; and
    # without torchao's wrapper first, which detaches in Python, ten times as slowly.
    return unwrapped(local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside torchao's wrapper of a weight that FSDP gathers in FP8; other tensors as they are."""
    inner = getattr(tensor, "_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor


class Gradients:
    """The gradients that a module has when this is made: L2 norms over all ranks, for which each is read once, and
    clipping. Keeps them in memory.

    Every norm is a collective over all ranks, unless this process is alone and has no process group.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        parts = {id(weight): local_part(weight.grad) for weight in module.parameters() if weight.grad is not None}
        self._parts = [*parts.values()]
        """This rank's part of each. Found here, while a GPU computes: in `clip` it would wait for the host."""
        self._norms = dict(zip(parts, foreach_norm(self._parts) if parts else (), strict=True))
        """L2 norm of this rank's part of each gradient, a float32 scalar, by the id of its weight."""

    def norm(self) -> Tensor:
        """Norm of all gradients, a float32 scalar; 0 if all parameters are frozen."""
        module = self._module
        copied = copied_parameters(module)
        weights = [weight for name, weight in module.named_parameters() if name not in copied]
        # One all-reduce over all ranks. By one group after the other, ranks that hold copies of a weight might get
        # norms that differ in the last bit, though they must clip alike and judge the step alike.
        return self._of_groups([weights])[0]

    def norms_by_kind(self, kinds: Sequence[str]) -> dict[str, Tensor]:
        """Norm of the gradients of all layers of one attention kind, a float32 scalar for each `grad_norm_KIND`.

        kinds: attention kind of each layer of the whole model, first to last
        """
        model = self._transformer()
        weights: dict[str, list[nn.Parameter]] = {name: [] for name in sorted(set(kinds))}
        for layer, block in zip(own_layers(model), model.blocks, strict=True):
            weights[kinds[layer]] += block.parameters()
        norms = self._of_groups([*weights.values()])
        return {f"grad_norm_{name}": norm for name, norm in zip(weights, norms, strict=True)}

    def norms_by_module(self) -> tuple[list[float], dict[str, float]]:
        """Norms of the gradients of each layer of the whole model, and of each module outside of the layers, by its
        name; on the host."""
        model = self._transformer()
        by_layer: list[list[nn.Parameter]] = [[] for _ in range(model.config.layers)]
        for layer, block in zip(own_layers(model), model.blocks, strict=True):
            by_layer[layer] += block.parameters()
        ends = ["embedding", "norm"] + ([] if model.config.tie_embeddings else ["output"])
        copied = {name.partition(".")[0] for name in copied_parameters(model)}
        modules = {name: module for name, module in model.named_children() if name not in copied}
        here = [[*modules[name].parameters()] if name in modules else [] for name in ends]
        norms = self._of_groups([*by_layer, *here]).tolist()
        layers = model.config.layers
        return norms[:layers], dict(zip(ends, norms[layers:], strict=True))

    @torch.no_grad()
    def clip(self, max_norm: float | None, norm: float) -> None:
        """Scale all gradients down so that their norm is `max_norm`, if `norm`, their present norm in float32, is
        larger.

        A `norm` that is not finite leaves the gradients useless: the caller must not step then. Nothing waits for the
        GPU.
        """
        if max_norm is None or not self._parts:
            return
        # In float32, as torch.nn.utils.clip_grads_with_norm_ divides on the GPU.
        scale = float(np.float32(max_norm) * (np.float32(1) / (np.float32(norm) + np.float32(1e-6))))
        # Multiplying by 1 took 10.0 of 491 ms of a step of 16 layers at 8K on one H200
        # (benchmarks/results/training-profile-8b-16-layers-h200.json).
        if scale >= 1:
            return
        # Each rank scales what it holds. torch's function leaves it to DTensor, which spends seconds of the first step
        # on how the product of a list is sharded over a mesh of three dimensions.
        foreach_mul_(self._parts, scale)

    def _transformer(self) -> Transformer:
        assert isinstance(self._module, Transformer)
        return self._module

    def _of_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
        """Norm of the gradients of each group of weights, of which a rank may have none, by one all-reduce; float32."""
        # All groups in one all-reduce: norms by kind had taken a quarter of a second of the 8B's step in 1,152 launches
        # (benchmarks/LOG.md, "What a save costs the training thread").
        squares = torch.stack([self._square_here(weights) for weights in groups])
        if dist.is_initialized():  # else this process has the whole model
            dist.all_reduce(squares)
        return squares.sqrt()

    def _square_here(self, weights: Sequence[nn.Parameter]) -> Tensor:
        """This rank's contribution to the squared norm of the weights' gradients: those of all ranks add up to it."""
        by_copies: dict[int, list[Tensor]] = {}
        for weight in weights:
            if weight.grad is not None:
                by_copies.setdefault(_copies(weight.grad), []).append(self._norms[id(weight)])
        if not by_copies:
            return torch.zeros((), device=next(self._module.parameters()).device)
        # A weight that several ranks hold would count as often in the sum over ranks; divided in float32, exactly for
        # powers of two.
        squares = [
            torch.linalg.vector_norm(torch.stack(norms)).square() / copies for copies, norms in by_copies.items()
        ]
        return torch.stack(squares).sum()


def _copies(gradient: Tensor) -> int:
    """Number of ranks that hold a copy of each number of `gradient`."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
