"""What a kind of attention owns: options, checks, parameters, the layer's mixing, costs, decoding and export.

A kind is one subclass of `AttentionKind` and one line in registry.py. Nothing else in the package asks which kind a
layer has: it asks the kind. An instance holds the options of one or more layers and no parameters, so that equal layers
share it (torch.compile compiles once for each instance); a layer's parameters live in the model, under the kind's name.

Shape suffixes: T packed tokens of this rank, D hidden size, H query heads, K key/value heads, d head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moba_train.attention.protocol import Layout, LocalAttention
from moba_train.attention.shard import Shard
from moba_train.attention.statistics import SOFTMAX
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig

EngineCall = Callable[[Tensor, Tensor, Tensor, LocalAttention, Layout], tuple[Tensor, Tensor]]


class Engine(Protocol):
    """Runs the attention of layers: on one device, over all ranks of context parallelism, or against a cache."""

    def __call__(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, attention: LocalAttention, layout: Layout, /
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, d], lse [H, T]) of q [T, H, d] over k and v [T, K, d]."""
        ...

    def shard(self, layout: Layout, /) -> Shard:
        """What this engine gives a layer of a packed sequence."""
        ...


class WrappedEngine:
    """An engine whose calls go through a function, which sees them; its shards are those of the engine itself."""

    def __init__(self, engine: Engine, call: EngineCall) -> None:
        self._engine = engine
        self._call = call

    def __call__(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, attention: LocalAttention, layout: Layout, /
    ) -> tuple[Tensor, Tensor]:
        """The function's result."""
        return self._call(q_THd, k_TKd, v_TKd, attention, layout)

    def shard(self, layout: Layout, /) -> Shard:
        """The engine's shard."""
        return self._engine.shard(layout)


class LayerInput(NamedTuple):
    """What a layer hands to its kind."""

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

    @property
    def shard(self) -> Shard:
        """This layer's part of the sequence, for kinds that need more than engine calls (shard.py)."""
        return self.engine.shard(self.layout)


class SublayerInput(NamedTuple):
    """What a block hands to the second sublayer of a kind."""

    x_TD: Tensor
    """The residual stream after the attention, not normalised."""
    rotate: Callable[[Tensor], Tensor]
    """Applies the rotary embedding to [T, heads, d]."""
    layout: Layout
    """The layout of the complete packed sequence."""
    engine: Engine
    """Runs local attentions, on one device or over all ranks of context parallelism."""


@dataclass(frozen=True)
class StageContext:
    """The stage that a kind is checked for."""

    model: ModelConfig
    seq_len: int
    cp: int
    tp: int
    deterministic: bool
    device: str | None
    """"cuda" or "cpu"; None where the run's machine is not known."""
    layers: str
    """The layers with these options, for messages: `in layers 0-3, 7`."""
    training: bool = True
    """Whether the stage is trained; False where a trained model is only evaluated or generates."""


class AttentionKind(ABC):
    """One kind of attention with the options of one layer.

    The methods below have defaults for a parameter-free kind that makes one engine call: such a kind gives `Options`,
    `attentions` and `attended_pairs`. Instances are shared by equal layers and must not change.
    """

    name: ClassVar[str]
    """How recipes call the kind."""
    Options: ClassVar[type[Section]]
    """The kind's section in YAML; its defaults are usable."""
    IMPLEMENTATION_OPTIONS: ClassVar[frozenset[str]] = frozenset({"backend"})
    """Options that say how the layer is computed, not what: an exported model does not carry them."""

    statistics: ClassVar[Mapping[str, str]] = SOFTMAX
    """What an observer sees of a layer, by name, with its meaning (statistics.py). The default is what an engine call
    shows; what a kind computes by itself, it reports (`Shard.observer`)."""

    attentions: tuple[LocalAttention, ...]
    """The local attentions that `mix` runs through the engine."""

    def __init__(self, options: Section, head_dim: int) -> None:
        """Raises ValueError, naming the option, for options that contradict each other."""
        self.options = options
        self.head_dim = head_dim

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """What the kind cannot do in a stage, each text beginning with the option: `topk: given 1 in layer 3, ...`."""
        return iter(())

    @classmethod
    def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module | None:
        """The layer's own parameters, a new module, or None. Made on torch's current device.

        The module lives in the layer under the kind's name if any stage uses it, and trains in those stages only.
        """
        return None

    @classmethod
    def initial_std(cls, parameter: str, std: float) -> float:
        """Standard deviation of a matrix's initial weights, given its name in `parameters` and the model's own `std`;
        0 for zeros. Vectors begin as ones, biases as zeros."""
        return std

    @classmethod
    def initial_values(cls, parameter: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """Initial values that are neither ones, zeros nor normal, drawn with `generator` on its device; None: as
        `initial_std` says. `shape` is that of the whole parameter, on any number of ranks."""
        return None

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """The layer's output before its output projection, [T, H, d], and the auxiliary loss of each token or None.

        The auxiliary loss, float32 [T] in nats, is weighted and normalised like the loss: by the weights of the tokens
        that carry loss, over their sum. The default is one engine call on rotated queries and keys.
        """
        (attention,) = self.attentions
        q_THd = layer.rotate(layer.q_THd)
        k_TKd = layer.rotate(layer.k_TKd)
        out_THd, _ = layer.engine(q_THd, k_TKd, layer.v_TKd, attention, layer.layout)
        return out_THd, None

    def second_sublayer(self, layer: SublayerInput, parameters: nn.Module | None) -> Tensor | None:
        """The update of the residual stream, [T, D], by a second sublayer between the attention and the feed-forward.

        The default, None, is none.
        """
        return None

    @property
    def learns(self) -> bool:
        """Whether the kind's own parameters, if it has any, get gradients."""
        return True

    @abstractmethod
    def attended_pairs(self, lengths: Sequence[int]) -> float:
        """Pairs of a query and a key that one query head attends to in packed documents of these lengths (tokens).

        A query's own key counts half, as in the T^2 / 2 of dense causal attention.
        """

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Floating-point operations of one layer, forward and backward, without its four projections.

        The default counts two matrix products over the attended pairs, three passes' worth (12 H d a pair), and 6 per
        token for each weight of the kind's own matrices.
        """
        matrices = sum(self._parameter_sizes(model, least_dimensions=2))
        return 12.0 * model.heads * model.head_width * self.attended_pairs(lengths) + 6.0 * matrices * sum(lengths)

    def saved_bytes(self, model: ModelConfig, seq_len: int) -> int:
        """Bytes for each token that the forward pass keeps besides queries, keys, values, output and its LSE."""
        return 0

    def activation_bytes(self, model: ModelConfig, width: int, tokens: int, cp: int) -> int:
        """Bytes for each token, `width` an element, that the forward pass keeps besides queries, keys, values, output
        and its LSE, unless activation checkpointing recomputes them; `saved_bytes` are kept in any case.

        tokens: of a micro-batch on each of the `cp` ranks that share it.
        """
        return 0

    def gathered_bytes(self, model: ModelConfig, width: int) -> int | None:
        """Bytes, `width` an element, that a layer under context parallelism gathers of each token of the sequence by
        its shard, to attend to all of them; None where an engine's transport exchanges keys and values instead.

        By default None for kinds that make engine calls, and 0 for others, which exchange no more than a few states.
        """
        return None if self.attentions else 0

    def workspace_bytes(self, model: ModelConfig, width: int) -> int:
        """Bytes for each token, `width` an element, that the kernels of the backward pass take while they run, besides
        their inputs and results.

        The default, for kinds that make engine calls, is the bound of the block kernels: packed queries, packed
        gradients of the output and partial gradients of queries, each as large as the queries. Of few tokens they
        take more, up to 384 MiB in all, which is not counted.
        """
        return 3 * width * model.heads * model.head_width if self.attentions else 0

    @property
    def prefill_unit(self) -> int:
        """Tokens of a unit that no two parts of a long prompt share: each part but the last is a multiple of it."""
        return 1

    def generation_problem(self) -> str:
        """Why tokens cannot be generated one by one through a key/value cache; empty when they can."""
        return ""

    def own_decode_problem(self) -> str:
        """Why new tokens cannot attend as the kind does (`decode: own`), where they could with full attention; empty
        when they can."""
        return ""

    def export_entry(self) -> dict[str, Any]:
        """The layer's entry in an exported config.json, as JSON values: what decides which keys it attends to."""
        return {"kind": self.name, **self.options.model_dump(mode="json", exclude=set(self.IMPLEMENTATION_OPTIONS))}

    def export_problem(self, model: ModelConfig) -> str:
        """What an exported model would lose; empty when it loses nothing. The default refuses parameters."""
        count = sum(self._parameter_sizes(model, least_dimensions=0))
        if not count:
            return ""
        return f"kind {self.name!r} has {count} parameters in a layer, which no Hugging Face architecture can hold"

    def _parameter_sizes(self, model: ModelConfig, least_dimensions: int) -> Iterator[int]:
        with torch.device("meta"):
            module = self.parameters(self.options, model, layer=0)
        return (p.numel() for p in module.parameters() if p.dim() >= least_dimensions) if module else iter(())
