"""Model of a run: attention kinds layer by layer, initial weights that do not depend on the world size, observers."""

import copy
import functools
import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.kind import AttentionKind
from moba_train.attention.observer import Observer
from moba_train.attention.protocol import LocalAttention
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.model.adapters import base_parameters
from moba_train.model.block import CenteredRMSNorm
from moba_train.model.spec import ModelSpec, elements, kind_of_parameter, kind_parameters
from moba_train.model.transformer import Transformer
from moba_train.registry import ADAPTERS
from moba_train.torch_private import local_shape_and_offset


def build_model(spec: ModelSpec) -> Transformer:
    """The model on torch's current device, its weights undefined.

    It has the parameters of every attention kind that any stage uses; a stage only sets which kinds compute.
    """
    model = Transformer(spec.config, kind_parameters(spec.config, spec.kinds))
    if spec.adapters is not None:
        name, options = spec.adapters
        model.adapters = ADAPTERS[name](options, model)
    return model


def with_adapters(spec: ModelSpec, adapters: tuple[str, Section] | None) -> ModelSpec:
    """The model with adapters of this name and these options, counted; None: without."""
    if adapters is None:
        return spec
    spec = replace(spec, adapters=adapters)
    with torch.device("meta"):
        model = build_model(spec)
    blocks = []
    for counts, block in zip(spec.blocks, model.blocks, strict=True):
        trained = [weight for weight in block.parameters() if weight.requires_grad]
        matrices = elements(weight for weight in trained if weight.dim() > 1)
        size = elements(block.parameters())
        blocks.append(counts._replace(parameters=size, matrices=matrices, base=size - elements(trained)))
    frozen = elements(weight for weight in model.parameters() if not weight.requires_grad)
    parts = replace(spec.counts, adapters=elements(model.parameters()) - spec.counts.total, base=frozen)
    return replace(spec, counts=parts, blocks=tuple(blocks), base=base_parameters(model))


def build_attention(layers: Iterable[LayerAttention], head_dim: int) -> list[AttentionKind]:
    """The attention kind of every layer. Equal layers share one object: torch.compile compiles once for each object."""
    return [_kind(layer, head_dim) for layer in layers]


def attention_of_new_tokens(kind: AttentionKind) -> LocalAttention | None:
    """Attention that takes the place of the kind's engine calls for new tokens with `decode: full`; None: none does."""
    full = LayerAttention(kind.name, kind.options).full(keep_windows=True)
    if full is None:
        return None
    if full.kind == "full":  # by any backend: theirs are for sequences
        full = LayerAttention("full", KINDS["full"].Options())
    return next(iter(_kind(full, kind.head_dim).attentions), None)


@functools.cache
def _kind(layer: LayerAttention, head_dim: int) -> AttentionKind:
    return KINDS[layer.kind](layer.options, head_dim)


@torch.no_grad()
def initialize_weights(model: Transformer, seed: int, prefixes: Collection[str] = ("",)) -> None:
    """Fill every parameter in place: norms 1 (centred ones 0), biases, buffers and sinks 0, matrices normal with the
    config's `init_std`.

    prefixes: only the parameters whose names begin with one of them.

    The two matrices that write to the residual stream are scaled by 1 / sqrt(2 * layers) (GPT-2, Radford et al. 2019);
    an attention kind gives the standard deviation of its own matrices, or draws its own values. Each parameter has its
    own generator, seeded by its name, and is drawn in full before it is cut into shards: the same seed gives the same
    weights on any number of ranks. Parameters may be plain tensors or DTensors, never on "meta".
    """
    for name, buffer in model.named_buffers():
        if name.startswith(tuple(prefixes)):
            buffer.zero_()
    for name, parameter in model.named_parameters():
        if not name.startswith(tuple(prefixes)):
            continue
        own = _own_values(model, parameter, name, seed)
        if own is not None:
            copy_full(parameter, own)
        elif parameter.dim() == 1 or name.endswith(".bias"):
            nn.init.constant_(parameter, _initial_vector(model, name))
        else:
            copy_full(parameter, drawn_normal(parameter, _initial_std(model, name), name, seed))


def _initial_vector(model: Transformer, name: str) -> float:
    centered = isinstance(model.get_submodule(name.rpartition(".")[0]), CenteredRMSNorm)
    return 0.0 if centered or name.endswith((".bias", "attention.sink.weight")) else 1.0


def _initial_std(model: Transformer, name: str) -> float:
    if not kind_of_parameter(name) and name.endswith(("o_proj.weight", "down_proj.weight")):
        # Each layer adds two of these outputs to the residual stream, whose variance would grow with depth otherwise
        # (GPT-2).
        return model.config.init_std / math.sqrt(2 * model.config.layers)
    return model.config.init_std


def _own_values(model: Transformer, like: Tensor, name: str, seed: int) -> Tensor | None:
    """The values that an attention kind or adapters draw by themselves for their parameter `name`; None for all other
    parameters."""
    if kind := kind_of_parameter(name):
        inside = name.partition(f".{kind}.")[2]
        return KINDS[kind].initial_values(inside, like.shape, _generator(like, name, seed))
    if model.adapters is None or name in model.adapters.base:
        return None
    return model.adapters.initial_values(name, like.shape, _generator(like, name, seed))


def drawn_normal(like: Tensor, std: float, name: str, seed: int) -> Tensor:
    """First values of the parameter of this name, normal, shaped as `like`."""
    generator = _generator(like, name, seed)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_(0.0, std, generator=generator)


def _generator(like: Tensor, name: str, seed: int) -> torch.Generator:
    """A generator on the parameter's device that depends on the seed and the parameter's name alone."""
    # By name, not in turn: a layer or a kind more leaves all other weights as they are. 7 bytes fit into any seed.
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(like.device).manual_seed(int.from_bytes(digest[:7], "little"))


@torch.no_grad()
def copy_full(parameter: Tensor, full: Tensor) -> None:
    """Set a parameter, sharded or not, to values that every rank has in full."""
    if isinstance(parameter, DTensor):
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
