"""Bytes of one Transformer block's activations, for each token."""

from dataclasses import dataclass

from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.parallel.activations import Kept


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block's activations for each token of a tp group, without those that only some attention kinds have;
    a rank of the group has its part of them."""

    attention: int
    """All tensors that attention and its projections keep for their backward pass."""
    feed_forward: int
    """All tensors that the SwiGLU and its norm keep."""
    kept: dict[Kept, int]
    """What stays while other blocks work."""
    attention_gradients: int
    """Gradients of queries, keys, values and the attention's output."""
    feed_forward_gradients: int
    """Gradients inside the SwiGLU beyond the activations that they replace."""


def input_bytes(config: RunConfig, width: int) -> int:
    """Bytes of each element of what a projection keeps of its input.

    Compiled, a layer in FP8 keeps the input in FP8 where forward and backward pass round it alike: with tensorwise
    scaling. With a scale for each row the backward pass rounds the input anew, and a compiled block computes that again
    from what it keeps anyway. Uncompiled, a layer keeps the input itself.
    """
    precision = config.precision
    if not config.compile or precision.linear != "fp8" or precision.implementation != "torchao":
        return width
    return 1 if precision.gathers_fp8 else 0


def block_bytes(model: ModelConfig, width: int, tp: int, compiled: bool, input_width: int) -> BlockBytes:
    """Activations of a block, `width` bytes an element.

    A block that is not recomputed keeps the inputs of both norms and of the projections behind them (4 D; every rank of
    a tp group holds the gathered inputs of the projections), rotated queries and keys, values and the attention's
    output (and the queries and keys before qk_norm), the fp32 LSE, and four tensors of the SwiGLU. A compiled block
    recomputes one of these four: 4.00 GiB less were measured on 16 layers (benchmarks/results/training-1b-h200.json).
    Inputs of projections take `input_width` bytes an element; that of the output projection, which attention keeps for
    itself, `width`. In FP8 5.5 GiB less are predicted on 32 layers, 5.8 were measured; with a scale for each row 11.0
    and 10.9 (benchmarks/results/training-8b-h200-x2.json).
    """
    queries = model.heads * model.head_width
    keys = model.kv_heads * model.head_width
    hidden = model.hidden_size
    lse = 4 * model.heads
    heads = 2 * queries + 2 * keys + (queries + keys if model.qk_norm else 0)
    attention = width * (hidden + heads) + input_width * tp * hidden + lse
    feed_forward = width * (hidden + (2 if compiled else 3) * model.intermediate_size)
    feed_forward += input_width * (tp * hidden + model.intermediate_size)
    added = {
        Kept.INPUT: width * hidden,
        Kept.ATTENTION: width * queries + lse,
        Kept.PROJECTIONS: width * (queries + 2 * keys + hidden),
        Kept.PRODUCTS: width * 2 * model.intermediate_size,
    }
    kept = {level: sum(added[below] for below in added if below <= level) for level in added}
    return BlockBytes(
        attention=attention,
        feed_forward=feed_forward,
        kept=kept | {Kept.ALL: attention + feed_forward},
        attention_gradients=width * 2 * (queries + keys),
        feed_forward_gradients=width * (1 if compiled else 2) * model.intermediate_size,
    )
