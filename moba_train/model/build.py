"""Attention objects from a recipe's resolved layers, and initial weights that do not depend on the world size."""

import functools
import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moba_train.attention.protocol import LocalAttention
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.model.transformer import Transformer


def build_attention(layers: Iterable[LayerAttention], head_dim: int) -> list[LocalAttention]:
    """The LocalAttention of every layer. Equal layers share one object: torch.compile compiles once for each object."""
    return [_attention(layer, head_dim) for layer in layers]


@functools.cache
def _attention(layer: LayerAttention, head_dim: int) -> LocalAttention:
    return KINDS[layer.kind](layer.options, head_dim)


@torch.no_grad()
def initialize_weights(model: Transformer, seed: int) -> None:
    """Fill every parameter in place: norms 1, biases 0, matrices normal with the config's `init_std`.

    The two matrices that write to the residual stream are scaled by 1 / sqrt(2 * layers) (GPT-2, Radford et al. 2019).
    Each parameter has its own generator, seeded by its name, and is drawn whole before it is cut into shards: the same
    seed gives the same weights on any number of ranks. Parameters may be plain tensors or DTensors, never on "meta".
    """
    config = model.config
    residual_std = config.init_std / math.sqrt(2 * config.layers)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else config.init_std
            _copy_whole(parameter, _draw_normal(parameter, std, name, seed))


def _draw_normal(like: Tensor, std: float, name: str, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_(0.0, std, generator=generator)


def _copy_whole(parameter: Tensor, whole: Tensor) -> None:
    if isinstance(parameter, DTensor):
        # Every rank drew the same numbers, so each keeps its part without communication.
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
