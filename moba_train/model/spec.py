"""Model of a run as far as its recipe determines it: its shape, the parameters of attention kinds, exact counts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.model.feed_forward import feed_forward_costs

Shapes = Mapping[str, torch.Size]
"""Shapes of parameters by name."""


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by part; those of the blocks are summed over all layers."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    output: int
    """Output projection; 0 when it is tied to the embedding."""
    attention_kinds: int = 0
    """Parameters that attention kinds add to the layers."""
    adapters: int = 0
    """Parameters that adapters add, in all parts of the model."""
    base: int = 0
    """Those of all parts that are not trained, with adapters."""
    idle: int = 0
    """Those of `feed_forward` that a token does not pass through: of experts that it does not choose."""

    @property
    def active(self) -> int:
        """All parameters that a token passes through."""
        return self.total - self.idle

    @property
    def total(self) -> int:
        """All parameters, a tied embedding counted once."""
        return self.without_embeddings + self.embedding + self.output

    @property
    def without_embeddings(self) -> int:
        """All parameters but the embedding and the output projection."""
        return self.attention + self.feed_forward + self.norms + self.attention_kinds + self.adapters


class BlockCounts(NamedTuple):
    """Numbers of parameters of one block, those of its attention kinds included."""

    parameters: int
    matrices: int
    """Parameters in the weights of linear layers (`optim.spec.block_matrices`); with adapters, those that train."""
    separate: int = 0
    """Parameters that expert parallelism divides."""
    base: int = 0
    """Parameters that are not trained, with adapters."""


@dataclass(frozen=True)
class ModelSpec:
    """A Transformer with the parameters of every attention kind that any stage uses. `model_spec` makes it."""

    config: ModelConfig
    kinds: tuple[Mapping[str, Section], ...]
    """Attention kinds that any stage uses in each layer, with the options of the first that does."""
    kind_shapes: Mapping[tuple[int, str], Shapes]
    """Shapes of the parameters of attention kinds, by layer and kind and by their name there; only kinds that have
    parameters."""
    counts: ParameterCounts
    blocks: tuple[BlockCounts, ...]
    """Counts of each block."""
    adapters: tuple[str, Section] | None = None
    """Name and options of what is trained instead of the model; None: the model is."""
    base: frozenset[str] = frozenset()
    """Names of the parameters that are then not trained."""

    @property
    def matrices(self) -> int:
        """Parameters of the blocks that are weights of linear layers."""
        return sum(block.matrices for block in self.blocks)


def model_spec(config: ModelConfig, stages: Iterable[Sequence[LayerAttention]]) -> ModelSpec:
    """The model of a run whose `stages` have these attentions in each layer, first to last."""
    kinds: tuple[dict[str, Section], ...] = tuple({} for _ in range(config.layers))
    for attention in stages:
        for of_layer, layer in zip(kinds, attention, strict=True):
            of_layer.setdefault(layer.kind, layer.options)
    with torch.device("meta"):
        modules = kind_parameters(config, kinds)
    shapes = {
        (layer, kind): {name: parameter.shape for name, parameter in module.named_parameters()}
        for layer, of_layer in enumerate(modules)
        for kind, module in of_layer.items()
    }
    added = [nn.ModuleList(of_layer.values()) for of_layer in modules]
    counts = count_parameters(config, sum(elements(of_layer.parameters()) for of_layer in added))
    blocks = tuple(
        BlockCounts(
            sum(_block_parameters(config, layer)) + elements(of_layer.parameters()),
            attention_matrices(config, layer)
            + costs.matrices
            + sum(inner.weight.numel() for inner in of_layer.modules() if isinstance(inner, nn.Linear)),
            costs.separate,
        )
        for layer, of_layer in enumerate(added)
        for costs in [feed_forward_costs(config, layer)]
    )
    return ModelSpec(config, kinds, shapes, counts, blocks)


def kind_parameters(config: ModelConfig, kinds: Sequence[Mapping[str, Section]]) -> list[dict[str, nn.Module]]:
    """New parameter modules of the attention kinds that have any: for each layer, by the kind's name.

    kinds: for each layer, the options of its attention kinds. The modules are made on torch's current device.
    """
    made = [
        {name: KINDS[name].parameters(options, config, layer) for name, options in of_layer.items()}
        for layer, of_layer in enumerate(kinds)
    ]
    return [{name: module for name, module in of_layer.items() if module} for of_layer in made]


def elements(tensors: Iterable[Tensor]) -> int:
    """Elements of all tensors together."""
    return sum(tensor.numel() for tensor in tensors)


def count_parameters(model: ModelConfig, attention_kinds: int = 0) -> ParameterCounts:
    """Parameters of the model, exact also with tied embeddings, `qkv_bias` and `qk_norm`.

    attention_kinds: parameters that attention kinds add, over all layers.
    """
    vocabulary = model.vocab_size * model.hidden_size
    attention, feed_forward, norms = (
        sum(part) for part in zip(*(_block_parameters(model, layer) for layer in range(model.layers)), strict=True)
    )
    fed = [feed_forward_costs(model, layer) for layer in range(model.layers)]
    return ParameterCounts(
        embedding=vocabulary,
        attention=attention,
        feed_forward=feed_forward,
        norms=norms + model.hidden_size,
        output=0 if model.tie_embeddings else vocabulary,
        attention_kinds=attention_kinds,
        idle=sum(costs.parameters - costs.active for costs in fed),
    )


def _block_parameters(model: ModelConfig, layer: int) -> tuple[int, int, int]:
    """Parameters of a layer's attention, feed-forward and norms, without those of attention kinds."""
    biases = model.qkv_bias * (model.heads + 2 * model.kv_heads) * model.head_width + model.o_bias * model.hidden_size
    normed_heads = {False: 0, True: 2, "all_heads": model.heads + model.kv_heads}[model.qk_norm]
    has = not model.is_bare(layer)
    return (
        attention_matrices(model, layer) + has * biases + model.heads * model.has_sink(layer),
        feed_forward_costs(model, layer).parameters,
        (4 if model.norms == "both" else 2) * model.hidden_size + has * normed_heads * model.head_width,
    )


def attention_matrices(model: ModelConfig, layer: int | None = None) -> int:
    """Weights of a layer's query, key, value and output projections and of its output gate, without biases; None: mean
    of all layers."""
    layers = range(model.layers) if layer is None else (layer,)
    heads = 2 * (model.heads + model.kv_heads) * model.head_width
    return model.hidden_size * sum((not model.is_bare(n)) * heads + model.gates(n) for n in layers) // len(layers)


def kind_prefix(layer: int, kind: str) -> str:
    """Beginning of the names of the parameters that an attention kind has in a layer."""
    return f"blocks.{layer}.attention.{kind}."


def kind_of_parameter(name: str) -> str:
    """The attention kind that the parameter `blocks.LAYER.attention.KIND.*` belongs to; empty for all others."""
    parts = name.split(".")
    inside = parts[0] == "blocks" and len(parts) > 4 and parts[2] == "attention"
    return parts[3] if inside and parts[3] in KINDS else ""


def different_shapes(one: Shapes, other: Shapes) -> tuple[Shapes, Shapes]:
    """Shapes of `one` that `other` lacks or has otherwise, and the reverse."""
    return (
        {name: shape for name, shape in one.items() if other.get(name) != shape},
        {name: shape for name, shape in other.items() if one.get(name) != shape},
    )


def new_kind_sizes(before: ModelSpec, now: ModelSpec) -> dict[str, int]:
    """Numbers of parameters by attention kind that `now` has and `before` lacks, or has in another shape."""
    sizes: Counter[str] = Counter()
    for (layer, kind), shapes in now.kind_shapes.items():
        _, new = different_shapes(before.kind_shapes.get((layer, kind), {}), shapes)
        sizes[kind] += sum(shape.numel() for shape in new.values())
    return {kind: size for kind, size in sizes.items() if size}


def describe_shapes(shapes: Shapes) -> str:
    """Names and shapes of parameters, for messages."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Numbers of parameters by attention kind, for messages: `1,024 parameters of 'nsa' and 96 of 'seer'`."""
    (first, number), *others = sorted(sizes.items())
    return " and ".join([f"{number:,} parameters of {first!r}", *(f"{more:,} of {kind!r}" for kind, more in others)])
