"""Attention kinds: each owns its options, checks, parameters, the layer's mixing, and its costs.

A kind is one subclass of `AttentionKind` and one entry point. Nothing else in the package asks which kind a layer has:
it asks the kind. An instance holds the options of one or more layers and no parameters, so that equal layers share it
(torch.compile compiles once for each instance); a layer's parameters live in the model, under the kind's name.

Shape suffixes: T packed tokens of this rank, D hidden size, H query heads, K key/value heads, d head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from moba_train.attention.engine import Engine
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import LocalAttention
from moba_train.attention.statistics import SOFTMAX
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.registry import ATTENTION_KINDS


class LayerInput(NamedTuple):
    """Arguments of `AttentionKind.mix`: the layer's tensors, its rotary embedding, the layout and the engine."""

    x_TD: Tensor
    """The layer's normalised input."""
    q_THd: Tensor
    """Queries before the rotary embedding, after q_norm."""
    k_TKd: Tensor
    v_TKd: Tensor
    rotate: Callable[[Tensor], Tensor]
    """Applies the rotary embedding to [T, heads, d]."""
    layout: Layout
    """The layout of the complete packed sequence."""
    engine: Engine
    """Runs local attentions, on one device or over all ranks of context parallelism."""
    rotate_at: Callable[[Tensor, Tensor], Tensor]
    """Applies the rotary embedding of given positions, int64 [n], to [n, heads, any even width]."""
    sink: tuple[Tensor, ...] = ()
    """Logits [H] of the layer's learned sink, if it has one, for kinds that take it (`KindFacts.takes_sink`)."""


class SublayerInput(NamedTuple):
    """Arguments of a kind's second sublayer; fields with the names of `LayerInput`'s mean what they mean there."""

    x_TD: Tensor
    """The residual stream after the attention, not normalised."""
    rotate: Callable[[Tensor], Tensor]
    layout: Layout
    engine: Engine


@dataclass(frozen=True)
class StageContext:
    """The stage that a kind is checked for."""

    model: ModelConfig
    seq_len: int
    cp: int
    tp: int
    deterministic: bool
    device: str | None
    """"cuda" or "cpu"; None if the run's machine is not known."""
    layers: str
    """The layers with these options, for messages: `in layers 0-3, 7`."""
    training: bool = True
    """False if a trained model is only evaluated or generates."""


class MicroBatch(NamedTuple):
    """Sizes on which the bytes of a layer depend; `tp`: ranks that divide its heads."""

    width: int
    """Bytes of an element in the compute dtype."""
    seq_len: int
    tokens: int
    """Tokens of the micro-batch on each of the `cp` ranks that share it."""
    cp: int
    tp: int = 1


class TokenBytes(NamedTuple):
    """Bytes of a layer for each token of a micro-batch on a rank, in addition to queries, keys, values, output and its
    LSE."""

    saved: int = 0
    """Kept from the forward pass to the backward pass in any case."""
    activations: int = 0
    """Kept also, unless activation checkpointing recomputes them."""
    gathered: int | None = None
    """Gathered of each token of the sequence by the layer's shard; None: an engine's transport exchanges keys and
    values instead."""
    workspace: int = 0
    """Taken by the kernels of the backward pass while they run, without their inputs and results."""


class KindFacts(NamedTuple):
    """Properties of a kind with its options, for exports, generation and the checks of a recipe."""

    not_exported: frozenset[str] = frozenset({"backend"})
    """Options that an exported model does not carry: they say how the layer is computed, not what."""
    learns: bool = True
    """True if the kind's own parameters, if it has any, get gradients."""
    prefill_unit: int = 1
    """Tokens of a unit that no two parts of a long prompt share: each part but the last is a multiple of it."""
    own_kernels: bool = False
    """True if the kind attends to selected blocks by kernels that the table does not choose."""
    takes_sink: bool = False
    """True if the kind's output is one engine call, which a layer's learned sink joins."""
    own_decode_problem: str = ""
    """Reason why new tokens cannot attend as the kind does (`decode: own`); empty if they can."""


class AttentionKind(ABC):
    """One kind of attention with the options of one layer, which are of its own class `Options`.

    The defaults below are for a parameter-free kind that makes one engine call: such a kind gives `name`, `Options`,
    `attentions` and `pairs`. Instances are shared by equal layers and must not change.
    """

    name: ClassVar[str]
    """The kind's name in recipes."""
    Options: ClassVar[type[Section]]
    """The kind's section in YAML; its defaults are usable."""
    statistics: ClassVar[Mapping[str, str]] = SOFTMAX
    """Statistics that `StatisticsObserver` collects, by name, with their meaning. Default: those of an engine call."""
    facts: KindFacts = KindFacts()
    attentions: tuple[LocalAttention, ...] = ()
    """The local attentions that `mix` runs through the engine."""

    def __init__(self, options: Any, head_dim: int) -> None:
        """Raises ValueError, naming the option, for options that contradict each other."""
        self.options = options
        self.head_dim = head_dim

    @classmethod
    def problems(cls, options: Any, context: StageContext) -> Iterator[str]:
        """Reasons why the kind cannot run in a stage. Each begins with the option: `topk: given 1 in layer 3, ...`."""
        return iter(())

    @classmethod
    def parameters(cls, options: Any, model: ModelConfig, layer: int) -> nn.Module | None:
        """The layer's own parameters, a new module made on torch's current device, or None. It lives in the layer under
        the kind's name if any stage uses it, and trains in those stages only. `parallel.tp` is refused unless the
        module's `tensor_style`, a `ParallelStyle` of torch, divides it by heads."""
        return None

    @classmethod
    def projects(cls, options: Any) -> bool:
        """True if the kind's parameters project the layer's input and its output, which then is [T, D]: it is a kind
        for bare layers (`ModelConfig.bare_layers`), and alone there, also where others get full attention."""
        return False

    @classmethod
    def initial_values(cls, parameter: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """Initial values of this parameter of `parameters`, of the whole one's `shape`, drawn with `generator` on its
        device. None, the default: matrices normal with the model's standard deviation, vectors ones, biases zeros."""
        return None

    @classmethod
    def derived_values(cls, parameter: str, shape: torch.Size, model: ModelConfig, layer: nn.Module) -> Tensor | None:
        """Values of a parameter that `init_from` lacks, from those of its `layer` of attention, which may be sharded
        (DTensors, of which all ranks ask for the whole). None, the default: the initial values stay."""
        return None

    @classmethod
    def full_attention(cls, options: Any, keep_windows: bool = False) -> LayerAttention | None:
        """Full attention on the same weights: the same softmax, with this kind's scale, cap and parameters, over every
        earlier key; with `keep_windows` those of a window. None: there is none. The default is kind `full`, and the
        kind itself if it has no softmax."""
        if cls.projects(options) or not SOFTMAX.keys() <= cls.statistics.keys():
            return LayerAttention(cls.name, options)
        return None if issubclass(cls, TwoSublayers) else LayerAttention("full", ATTENTION_KINDS["full"].Options())

    def mix(self, layer: LayerInput, parameters: Any) -> tuple[Tensor, Tensor | None]:
        """The layer's output before its output projection, [T, H, d], and the auxiliary loss of each token or None;
        `parameters`: the layer's own, which `parameters` made. The default is one engine call on rotated q and k.

        The auxiliary loss, float32 [T] in nats, is weighted and normalised like the loss: by the weights of the tokens
        that carry loss, over their sum."""
        (attention,) = self.attentions
        rotated = layer.rotate(layer.q_THd), layer.rotate(layer.k_TKd)
        return layer.engine(*rotated, layer.v_TKd, attention, layer.layout, *layer.sink)[0], None

    @abstractmethod
    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Pairs of a query and a key that one query head of a model of this shape attends to in packed documents of
        these lengths (tokens). A query's own key counts half, as in the T^2 / 2 of dense causal attention."""

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Floating-point operations of a layer, forward and backward, without its four projections. The default counts
        two matrix products over the attended pairs, three passes' worth (12 H d a pair), and 6 per token for each
        weight of the kind's own matrices."""
        matrices = parameter_count(self, model, least_dimensions=2)
        return 12.0 * model.heads * model.head_width * self.pairs(model, lengths) + 6.0 * matrices * sum(lengths)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Memory of a layer. The default is that of engine calls to the block kernels, whose workspace is bounded by
        packed queries, packed gradients of the output and partial gradients of queries, each as large as the queries;
        up to 768 MiB more, of few tokens, is not counted."""
        return TokenBytes(workspace=3 * batch.width * model.heads * model.head_width)


class TwoSublayers(ABC):
    """Facet of a kind: it has a second sublayer between the attention and the feed-forward."""

    @abstractmethod
    def second_sublayer(self, layer: SublayerInput, parameters: Any) -> Tensor:
        """The update of the residual stream, [T, D]."""


def parameter_count(kind: AttentionKind, model: ModelConfig, least_dimensions: int = 0) -> int:
    """Elements of the kind's own parameters in one layer, counting those of at least `least_dimensions` dimensions."""
    with torch.device("meta"):
        module = kind.parameters(kind.options, model, layer=0)
    parameters = () if module is None else module.parameters()
    return sum(parameter.numel() for parameter in parameters if parameter.dim() >= least_dimensions)
