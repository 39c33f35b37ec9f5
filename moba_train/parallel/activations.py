"""Activation checkpointing: tensors that a block keeps for its backward pass, in the GPU's memory or in the host's.

A block that does not keep everything is recomputed by torch's selective activation checkpointing, whose policy names
the operators that are not: attention (with its selection, and without its communication) and matrix products. Under
torch.compile the policy is part of the compiled block, so that its backward pass recomputes only what it needs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moba_train.attention.layout import Layout
from moba_train.attention.operators import SAVED_OPERATORS
from moba_train.config.model import ModelConfig
from moba_train.model.block import Block
from moba_train.model.feed_forward import feed_forward_costs
from moba_train.model.part import of_own_layers
from moba_train.model.transformer import Transformer
from moba_train.parallel.offload import HostMemory
from moba_train.torch_private import grouped_mm, reduce_scatter, scaled_mm

BlockResult = tuple[Tensor, Tensor | None]

# 512K tokens on two GPUs of 80 GB take 18 GiB less by the estimate, for 16 layers of the 8B shape with offload
# (benchmarks/measured/memory.md, "Parts of the feed-forward").
FEED_FORWARD_ROWS = 32_768
"""Rows that the feed-forward takes at once where the results of its products are not kept: with more rows, its widest
tensors are what a step needs most memory for. This number of rows fills a GPU; whether products of more are faster has
not been measured."""


class Kept(IntEnum):
    """Tensors that a block keeps for its backward pass. Each value adds to the one before; the rest is recomputed."""

    INPUT = 0
    """The block's input alone."""
    ATTENTION = 1
    """Attention's result, with its log-sum-exp and its selection."""
    PROJECTIONS = 2
    """Results of the query, key, value and output projections."""
    PRODUCTS = 3
    """Results of the feed-forward's gate and up projections: no matrix product is recomputed."""
    ALL = 4
    """Everything: norms, rotated queries and keys, and the SwiGLU's product as well."""


class LayerActivations(NamedTuple):
    """Tensors that one layer keeps from its forward to its backward pass, and the memory that holds them."""

    kept: Kept
    on_host: bool = False
    """True if the kept tensors wait in page-locked host memory until the backward pass."""
    weights: bool = False
    """True if the weights that FSDP has gathered also stay."""


def sent_to_host(layers: Sequence[LayerActivations]) -> tuple[LayerActivations, ...]:
    """The layers, all but the last with their kept tensors on the host: the last one's backward pass begins at once."""
    return (*(layer._replace(on_host=True) for layer in layers[:-1]), layers[-1])


def describe_activations(layers: Sequence[LayerActivations]) -> str:
    """`layers 0-28: attention's result kept in host memory; layers 29-31: nothing recomputed`."""
    parts = []
    first = 0
    for layer, group in groupby(layers):
        last = first + len(list(group)) - 1
        where = f"layers {first}-{last}" if last > first else f"layer {first}"
        where += f": {_DESCRIPTIONS[layer.kept]}{' (in host memory)' if layer.on_host else ''}"
        parts.append(f"{where}, with gathered weights" if layer.weights else where)
        first = last + 1
    return "; ".join(parts)


_DESCRIPTIONS = {
    Kept.INPUT: "recomputed from the block's input",
    Kept.ATTENTION: "attention's result kept",
    Kept.PROJECTIONS: "results of attention and its projections kept",
    Kept.PRODUCTS: "results of attention and of all matrix products kept",
    Kept.ALL: "nothing recomputed",
}


class BlockForward:
    """A block's forward pass, which a stage can set to keep more or less; replaces the block's own `forward`."""

    def __init__(self, block: Block, plain: Callable[..., BlockResult], recomputed: Callable[..., BlockResult]) -> None:
        self._block = block
        self._plain = plain
        self._recomputed = recomputed
        self.kept = Kept.ALL
        self.host_memory: HostMemory | None = None
        """Memory in which the kept tensors wait for the backward pass; None: the device's."""
        self.weights = False
        """True if gathered weights stay until the backward pass (forward.py)."""

    def __call__(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> BlockResult:
        inputs = (x_TD, cos, sin, layout)
        if not torch.is_grad_enabled():
            return self._plain(self._block, *inputs)
        with self._holding(x_TD, cos, sin):
            if self.kept is Kept.ALL:
                return self._plain(self._block, *inputs)
            return self._recomputed(self._block, self.kept, *inputs)

    def _holding(self, x_TD: Tensor, *shared: Tensor) -> AbstractContextManager[None]:
        if self.host_memory is None:
            return nullcontext()
        return self.host_memory.holding_rows(len(x_TD), (*self._block.parameters(), *shared))


_OF_DOCUMENTS = "L['layout'].cu_seqlens,L['layout'].cu_seqlens_cpu,L['layout'].max_seqlen"
"""Fields of a `Layout` whose sizes and values differ from batch to batch: symbols in compiled code."""


def wrap_blocks(model: Transformer, compiled: bool) -> None:
    """Let `set_activations` decide what the blocks of `model` keep; with `compiled`, compile them as well."""
    contexts = {kept: partial(_contexts, kept, model.config) for kept in Kept}

    def recomputed(block: Block, kept: Kept, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> BlockResult:
        # torch.compile asks for `kept`, an argument, before it takes what it compiled for another block; it would not
        # ask which function `context_fn` is.
        inputs = (block, x_TD, cos, sin, layout)
        found = checkpoint(Block.forward, *inputs, use_reentrant=False, context_fn=contexts[kept])
        return cast(BlockResult, found)

    forms: tuple[Callable[..., BlockResult], ...] = (Block.forward, recomputed)
    if compiled:
        # Else code is made for the first documents' lengths, and again, up to twice, for others: a resumed run would
        # have other code than one that never stopped. Behind what the user's own code has asked for.
        asked = torch.compiler.config.dynamic_sources.removesuffix(_OF_DOCUMENTS).rstrip(",")
        torch.compiler.config.dynamic_sources = ",".join(filter(None, (asked, _OF_DOCUMENTS)))
        forms = (torch.compile(Block.forward), torch.compile(recomputed))
    for block in _blocks(model):
        block.forward = BlockForward(block, *forms)  # type: ignore[method-assign]  # as torch's wrappers do


def set_activations(model: Transformer, layers: Sequence[LayerActivations], device: torch.device) -> None:
    """Set what every block of the whole model keeps, first to last; may change between steps."""
    host_memory = HostMemory(device) if any(layer.on_host for layer in layers) else None
    for block, layer in zip(_blocks(model), of_own_layers(model, layers), strict=True):
        forward = block.forward
        assert isinstance(forward, BlockForward)
        forward.kept = layer.kept
        block.feed_forward_rows = FEED_FORWARD_ROWS if layer.kept < Kept.PRODUCTS else None
        forward.host_memory = host_memory if layer.on_host else None
        forward.weights = layer.weights


def keeps_weights(block: nn.Module) -> bool:
    """True if the block's gathered weights stay until its backward pass."""
    return isinstance(block.forward, BlockForward) and block.forward.weights


def _blocks(model: Transformer) -> Iterable[Block]:
    return (cast(Block, block) for block in model.blocks)


def _contexts(kept: Kept, model: ModelConfig) -> Any:
    return create_selective_checkpoint_contexts(_policy(kept, model))


ALWAYS_SAVED: set[Any] = set()
"""Operators whose results are kept whatever a block keeps, because they must not be computed twice."""

_WEIGHT_ARGUMENT = {
    torch.ops.aten.mm.default: 1,
    torch.ops.aten.addmm.default: 2,
    scaled_mm: 1,
    grouped_mm: 1,
}
"""Matrix products with weights, bf16, FP8 and grouped, and where in their arguments the transposed weight is."""


def _policy(kept: Kept, model: ModelConfig) -> Callable[..., CheckpointPolicy]:
    """torch's policy for one forward pass of a block.

    The down projection's result is never kept, as no gradient needs it. Of the output projection, tensor parallelism
    keeps the sum over its ranks, of which each has a part of the rows, instead of the rank's own summand of all rows.

    The policy distinguishes products by the shapes of their weights: under torch.compile it does not see which weight
    it is. An `intermediate_size` equal to `hidden_size` or to the width of all (key/value) heads confuses them, of
    which resolve/warnings.py warns.
    """
    sums: Counter[bool] = Counter()
    inner = {width for layer in range(model.layers) for width in feed_forward_costs(model, layer).widths}

    def is_kept(operator: Any, arguments: Sequence[Any], is_recompute: bool) -> bool:
        if operator in ALWAYS_SAVED:
            return True
        if operator in SAVED_OPERATORS:
            return kept >= Kept.ATTENTION
        # Tensor parallelism keeps what a projection returns, the sum over its ranks; the order in which they come tells
        # which it is.
        if operator is reduce_scatter:
            sums[is_recompute] += 1
            return kept >= Kept.PROJECTIONS and sums[is_recompute] == 1  # the second is the down projection's
        if operator not in _WEIGHT_ARGUMENT:
            return False
        weight = arguments[_WEIGHT_ARGUMENT[operator]]
        rows, columns = weight.shape[-2:]
        if rows == model.hidden_size and columns in inner:
            return kept >= Kept.PRODUCTS
        # From few columns, as adapters' second factors: cheap to repeat, and where the base's product is kept, a second
        # tensor of its size. Kept as well, LoRA of an 8B model at 128K ran out of 140 GiB, of which plan predicts 119.
        is_split = isinstance(weight, DTensor) and Shard(0) in weight.placements
        if rows in inner or rows * 8 <= columns or is_split:
            return False
        return kept >= Kept.PROJECTIONS

    def policy(context: Any, operator: Any, *arguments: Any, **_options: Any) -> CheckpointPolicy:
        found = is_kept(operator, arguments, context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
