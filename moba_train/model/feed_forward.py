"""The feed-forward of a layer: SwiGLU, or a registered one, such as experts (`mechanisms/experts`).

A registered feed-forward is one subclass of `RegisteredFeedForward` and one entry point of the group
`moba_train.feed_forwards`. Its section of the recipe is `model.NAME`, whose `layers` says which layers have it.

Shape suffixes: T packed tokens of this rank, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.model.loss import LossTokens
from moba_train.registry import FEED_FORWARDS


class FeedForward(nn.Module):
    """Gated linear unit, SwiGLU or GeGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str = "silu") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self._hidden = _GATED[activation]

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self._hidden(self.gate_proj(x_TD), self.up_proj(x_TD)))


def clamped(gate: Tensor, up: Tensor, limit: float = 7.0) -> Tensor:
    """Hidden values of MiniMax-M3, and of experts in gpt-oss (OpenAI 2025, arXiv:2508.10925, and its code)."""
    gate = gate.clamp(max=limit)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-limit, limit) + 1)


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": _silu, "gelu_tanh": _gelu_tanh, "clamped": clamped}
"""Functions of the two projections, by `model.activation`."""


class FeedForwardCosts(NamedTuple):
    """Numbers of a layer's feed-forward that memory and operations follow from."""

    parameters: int
    matrices: int
    """Parameters that a matrix optimizer such as Muon trains."""
    active: int
    """Weights that a token is multiplied with."""
    width: int
    """Columns of a token's gate projections, over all that it passes through."""
    widths: frozenset[int]
    """Columns of each gate projection."""
    copies: int = 0
    """Copies of a token's hidden state that are made on the way, each as an input and as a result."""
    separate: int = 0
    """Parameters of the layer that expert parallelism divides."""
    parts: int = 0
    """Experts, equal numbers of which it gives each rank; 0: none."""


class MatrixStack(nn.Module):
    """Weights [n, columns out, columns in] of n linear layers, each a matrix of its own to an optimizer."""

    def __init__(self, number: int, columns_in: int, columns_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, columns_out, columns_in))


class RegisteredFeedForward(nn.Module, ABC):
    """A feed-forward that is found by name, in one layer; constructed with its section and the model's."""

    Options: ClassVar[type[Section]]
    """Its section of the recipe; `layers` in it is a pattern as `attention.full_layers`."""
    steps: ClassVar[Any]
    """Its part in training, an object as the module `mechanisms/experts/step.py`, whose functions are called on all
    ranks together: `enter` a stage, `begin` a step, `measure` it, `update` what gradients do not, `details` of it."""
    parallel: ClassVar[Any]
    """Its form on ranks, an object as the module `mechanisms/experts/parallel.py`: `problems` of a recipe, `style` of
    tensor parallelism, and `shard`, which makes the units of FSDP that differ from the block's."""

    @classmethod
    @abstractmethod
    def costs(cls, options: Any, model: ModelConfig) -> FeedForwardCosts:
        """Costs of a layer."""

    @classmethod
    @abstractmethod
    def function(cls, options: Any) -> dict[str, Any]:
        """The options by path that shape the layer's function and its parameters, without `layers`, and without those
        that only train it."""

    @classmethod
    def adding_buffers(cls, options: Any) -> dict[str, Any]:
        """The options by path that give the layer buffers. A run may add these, as zeros, to the model that it begins
        with (`init_from`), but may not drop them."""
        return {}

    @abstractmethod
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """The update of the residual stream [T, D], and the auxiliary loss of each token, float32 [T], or None; it is
        weighted and normalised as that of an attention kind (`AttentionKind.mix`)."""

    @abstractmethod
    def count_tokens(self, loss_tokens: LossTokens | None) -> None:
        """Set this rank's rows with loss in the next forward pass, which trains; None: it does not, and nothing is
        counted."""


def build_feed_forward(model: ModelConfig, layer: int) -> nn.Module:
    """The feed-forward of a layer, on torch's current device."""
    if found := model.feed_forward(layer):
        name, options = found
        module: RegisteredFeedForward = FEED_FORWARDS[name](options, model)
        return module
    return FeedForward(model.hidden_size, model.intermediate_size, model.activation)


def feed_forward_costs(model: ModelConfig, layer: int) -> FeedForwardCosts:
    """Costs of the feed-forward of a layer."""
    if found := model.feed_forward(layer):
        name, options = found
        costs: FeedForwardCosts = FEED_FORWARDS[name].costs(options, model)
        return costs
    matrices = 3 * model.hidden_size * (width := model.intermediate_size)
    return FeedForwardCosts(matrices, matrices, matrices, width, frozenset({width}))


def registered_modules(model: nn.Module) -> dict[int, RegisteredFeedForward]:
    """The registered feed-forwards of the blocks here, by layer of the whole model."""
    found = {int(name): block.feed_forward for name, block in cast(nn.ModuleList, model.blocks).named_children()}
    return {layer: module for layer, module in found.items() if isinstance(module, RegisteredFeedForward)}


def each_kind(model: nn.Module) -> Iterator[tuple[Any, Section, dict[int, RegisteredFeedForward]]]:
    """For each registered feed-forward of a `Transformer`'s recipe: its `steps`, its section, and its modules here by
    layer, if any; the same on all ranks of a pipeline."""
    found = registered_modules(model)
    for name, options in cast(ModelConfig, model.config).given_members.items():
        kind = FEED_FORWARDS[name]
        yield kind.steps, options, {layer: module for layer, module in found.items() if type(module) is kind}


def count_tokens(model: nn.Module, loss_tokens: LossTokens | None) -> None:
    """Set what counts in the next forward pass of a `Transformer` (`RegisteredFeedForward.count_tokens`)."""
    for module in registered_modules(model).values():
        module.count_tokens(loss_tokens)
