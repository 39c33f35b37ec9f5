"""Floating-point operations of training, forward and backward.

A multiply-add counts as two operations and the backward pass as twice the forward pass, so a weight costs 6 per token
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Recomputation is not counted, as in model FLOPs utilisation
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B), nor are norms, activations and softmax. Each
attention kind counts its own operations, document by document: a packed sequence is not one long document.

Symbols: T tokens of a sequence, H query heads, d head width.
"""

from collections import Counter
from collections.abc import Sequence

from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.model.build import build_attention
from moba_train.parallel.activations import Kept, LayerActivations
from moba_train.planning.parameters import attention_matrices, feed_forward_matrices


def matmul_flops(model: ModelConfig) -> float:
    """FLOPs per token of all matrix products with weights, 6 per weight. Includes the output projection (6 V D) and
    excludes the embedding lookup."""
    weights = model.layers * (attention_matrices(model) + feed_forward_matrices(model))
    return 6.0 * (weights + model.vocab_size * model.hidden_size)


def kept_flops(model: ModelConfig, stage: Stage, layer: int, kept: Kept) -> float:
    """FLOPs per token of one layer's forward pass whose results are kept: attention's, and 2 for each weight of the
    products. The down projection's result is neither kept nor recomputed."""
    attention = layer_flops(model, stage.attention[layer], [stage.seq_len]) / stage.seq_len / 3
    found = {
        Kept.ATTENTION: attention,
        Kept.PROJECTIONS: 2.0 * attention_matrices(model),
        Kept.PRODUCTS: 2.0 * feed_forward_matrices(model) * 2 / 3,
    }
    return sum(flops for level, flops in found.items() if level <= kept)


def recomputed_flops(model: ModelConfig, stage: Stage, layers: Sequence[LayerActivations]) -> float:
    """FLOPs per token that the backward pass repeats because the layers do not keep their results."""
    return sum(repeated_flops(model, stage, index, layer.kept) for index, layer in enumerate(layers))


def repeated_flops(model: ModelConfig, stage: Stage, layer: int, kept: Kept) -> float:
    """FLOPs per token that the backward pass of one layer repeats."""
    return kept_flops(model, stage, layer, Kept.ALL) - kept_flops(model, stage, layer, kept)


def dense_flops(model: ModelConfig, seq_len: int) -> float:
    """FLOPs per token as if every layer had dense causal attention over the full sequence, 6 H d T a layer.

    The formula behind published MFU numbers of causal models, e.g. in FlashAttention's benchmarks (Dao 2023,
    arXiv:2307.08691, section 4.1: half the operations of full attention).
    """
    return matmul_flops(model) + 6.0 * model.layers * model.heads * model.head_width * seq_len


def real_flops(model: ModelConfig, layers: Sequence[LayerAttention], lengths: Sequence[int]) -> float:
    """FLOPs of a batch whose documents have these `lengths` (tokens), counted by each layer's attention kind."""
    attention = sum(count * layer_flops(model, layer, lengths) for layer, count in Counter(layers).items())
    return matmul_flops(model) * sum(lengths) + attention


def layer_flops(model: ModelConfig, layer: LayerAttention, lengths: Sequence[int]) -> float:
    """FLOPs of one layer's attention in documents of these lengths, without its four projections."""
    (kind,) = build_attention([layer], model.head_width)
    return kind.flops(model, lengths)
