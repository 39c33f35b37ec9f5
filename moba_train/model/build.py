"""A recipe's model: its attention kinds layer by layer, and initial weights that do not depend on the world size.

Watching the attention of a model's layers.
"""

import copy
import functools
import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.kind import AttentionKind
from moba_train.attention.observer import Observer
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.schema import RunConfig
from moba_train.config.stages import kinds_by_layer
from moba_train.model.transformer import Transformer
from moba_train.torch_private import local_shape_and_offset

Shapes = Mapping[str, torch.Size]
"""Shapes of parameters by name."""


def build_model(config: RunConfig) -> Transformer:
    """The recipe's model on torch's current device, its weights undefined.

    It has the parameters of every attention kind that any stage uses; a stage only sets which kinds compute.
    """
    return Transformer(config.model, kind_parameters(config))


def kind_parameters(config: RunConfig) -> list[dict[str, nn.Module]]:
    """For each layer, the parameter modules of the attention kinds that have any, by the kind's name."""
    return [
        {name: module for name, options in kinds.items() if (module := _parameters(name, options, config, layer))}
        for layer, kinds in enumerate(kinds_by_layer(config))
    ]


def _parameters(kind: str, options: Section, config: RunConfig, layer: int) -> nn.Module | None:
    return KINDS[kind].parameters(options, config.model, layer)


def kind_shapes(config: RunConfig) -> dict[tuple[int, str], Shapes]:
    """Shapes of the parameters that attention kinds add to the model, by layer and kind and by their name there."""
    with torch.device("meta"):
        layers = kind_parameters(config)
    return {
        (layer, kind): {name: parameter.shape for name, parameter in module.named_parameters()}
        for layer, kinds in enumerate(layers)
        for kind, module in kinds.items()
    }


def different_shapes(one: Shapes, other: Shapes) -> tuple[Shapes, Shapes]:
    """Those shapes of each that the other one has not."""
    return (
        {name: shape for name, shape in one.items() if other.get(name) != shape},
        {name: shape for name, shape in other.items() if one.get(name) != shape},
    )


def describe_shapes(shapes: Shapes) -> str:
    """Names and shapes of parameters, for messages."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """How many parameters of which attention kinds, for messages: `1,024 parameters of 'nsa' and 96 of 'seer'`."""
    (first, number), *others = sorted(sizes.items())
    return " and ".join([f"{number:,} parameters of {first!r}", *(f"{more:,} of {kind!r}" for kind, more in others)])


def kind_prefix(layer: int, kind: str) -> str:
    """What the names of the parameters begin with that an attention kind has in a layer."""
    return f"blocks.{layer}.attention.{kind}."


def kind_elements(config: RunConfig) -> list[tuple[int, int]]:
    """Elements of the parameters that attention kinds add to each layer, and of those the weights of linear layers."""
    with torch.device("meta"):
        layers = [nn.ModuleList(kinds.values()) for kinds in kind_parameters(config)]
    return [
        (
            sum(parameter.numel() for parameter in layer.parameters()),
            sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear)),
        )
        for layer in layers
    ]


def build_attention(layers: Iterable[LayerAttention], head_dim: int) -> list[AttentionKind]:
    """The attention kind of every layer. Equal layers share one object: torch.compile compiles once for each object."""
    return [_kind(layer, head_dim) for layer in layers]


@functools.cache
def _kind(layer: LayerAttention, head_dim: int) -> AttentionKind:
    return KINDS[layer.kind](layer.options, head_dim)


@torch.no_grad()
def initialize_weights(model: Transformer, seed: int, prefixes: Collection[str] = ("",)) -> None:
    """Fill every parameter in place: norms 1, biases 0, matrices normal with the config's `init_std`.

    prefixes: only the parameters whose names begin with one of them.

    The two matrices that write to the residual stream are scaled by 1 / sqrt(2 * layers) (GPT-2, Radford et al. 2019);
    an attention kind gives the standard deviation of its own matrices, or draws its own values. Each parameter has its
    own generator, seeded by its name, and is drawn in full before it is cut into shards: the same seed gives the same
    weights on any number of ranks. Parameters may be plain tensors or DTensors, never on "meta".
    """
    for name, parameter in model.named_parameters():
        if not name.startswith(tuple(prefixes)):
            continue
        own = _kind_values(parameter, name, seed)
        if own is not None:
            _copy_full(parameter, own)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            _copy_full(parameter, _draw_normal(parameter, _initial_std(model, name), name, seed))


def _initial_std(model: Transformer, name: str) -> float:
    std = model.config.init_std
    if not kind_of_parameter(name) and name.endswith(("o_proj.weight", "down_proj.weight")):
        return std / math.sqrt(2 * model.config.layers)
    return std


def _kind_values(like: Tensor, name: str, seed: int) -> Tensor | None:
    """The values that an attention kind draws by itself for its parameter `name`; None for all other parameters."""
    if kind := kind_of_parameter(name):
        inside = name.partition(f".{kind}.")[2]
        return KINDS[kind].initial_values(inside, like.shape, _generator(like, name, seed))
    return None


def kind_of_parameter(name: str) -> str:
    """The attention kind that the parameter `blocks.LAYER.attention.KIND.*` belongs to; empty for all others."""
    parts = name.split(".")
    inside = parts[0] == "blocks" and len(parts) > 4 and parts[2] == "attention"
    return parts[3] if inside and parts[3] in KINDS else ""


def _draw_normal(like: Tensor, std: float, name: str, seed: int) -> Tensor:
    generator = _generator(like, name, seed)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_(0.0, std, generator=generator)


def _generator(like: Tensor, name: str, seed: int) -> torch.Generator:
    """A generator on the parameter's device that depends on the seed and the parameter's name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(like.device).manual_seed(int.from_bytes(digest[:7], "little"))


def _copy_full(parameter: Tensor, full: Tensor) -> None:
    if isinstance(parameter, DTensor):
        # Every rank drew the same numbers, so each keeps its shard without communication.
        shape, offset = local_shape_and_offset(full.shape, parameter.device_mesh, parameter.placements)
        full = full[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
        parameter = parameter.to_local()
    parameter.copy_(full)


@contextmanager
def observed_layers(model: Transformer, engine: OperatorEngine, observers: Sequence[Observer]) -> Iterator[None]:
    """Inside, each observer sees the attention of one layer of the whole model, first to last, which `engine` runs.

    Compiled blocks run uncompiled there: they would be compiled again for other engines.
    """
    engines = []
    for observer in observers:
        own = copy.copy(engine)
        own.observers = (*engine.observers, observer)
        engines.append(own)
    model.set_engines(engines)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.set_engines([engine] * len(engines))
