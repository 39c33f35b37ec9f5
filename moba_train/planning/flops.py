"""Floating-point operations per training token, forward and backward.

A multiply-add counts as two operations and the backward pass as twice the forward pass, so a weight costs 6 per token
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Recomputation is not counted, as in model FLOPs utilisation
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B), nor are norms, activations and softmax.

Symbols: T tokens of a sequence, taken as one document; H query heads, d head width, B block size, k = topk.
"""

from collections.abc import Sequence

from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.planning.parameters import attention_matrices, feed_forward_matrices


def matmul_flops(model: ModelConfig) -> float:
    """6 per weight of every matrix product, the output projection (6 * V * D) included, the embedding lookup not."""
    weights = model.layers * (attention_matrices(model) + feed_forward_matrices(model))
    return 6.0 * (weights + model.vocab_size * model.hidden_size)


def dense_flops(model: ModelConfig, seq_len: int) -> float:
    """FLOPs per token as if every layer had dense causal attention, 6 * H * d * T a layer.

    The formula behind published MFU numbers of causal models, e.g. in FlashAttention's benchmarks (Dao 2023,
    arXiv:2307.08691, section 4.1: half the operations of full attention).
    """
    return matmul_flops(model) + model.layers * _attention_flops(model, dense_keys(seq_len))


def real_flops(model: ModelConfig, layers: Sequence[LayerAttention], seq_len: int) -> float:
    """FLOPs per token with the keys each layer really attends to, and MoBA's gate.

    Layers of a kind other than `moba` count as dense causal attention.
    """
    return matmul_flops(model) + sum(layer_flops(model, layer, seq_len) for layer in layers)


def layer_flops(model: ModelConfig, layer: LayerAttention, seq_len: int) -> float:
    """FLOPs per token of one layer's attention without its projections, as `real_flops` counts them."""
    if layer.kind != "moba":
        return _attention_flops(model, dense_keys(seq_len))
    options = layer.options.model_dump()
    keys = moba_keys(seq_len, options["block_size"], options["topk"])
    return _attention_flops(model, keys) + gate_flops(model, seq_len, options["block_size"])


def gate_flops(model: ModelConfig, seq_len: int, block_size: int) -> float:
    """FLOPs per token of one layer's gate, 2 * H * d * n / 2 with n blocks of which half lie behind the query.

    Forward only: no gradient passes the gate (Lu et al. 2025, arXiv:2502.13189, section 2.2).
    """
    blocks = -(-seq_len // block_size)
    return model.heads * model.head_width * blocks


def dense_keys(seq_len: int) -> float:
    """Keys per query of dense causal attention, averaged over the sequence: T / 2 (its own key counts half)."""
    return seq_len / 2


def moba_keys(seq_len: int, block_size: int, topk: int) -> float:
    """Keys per query of MoBA, averaged over the sequence: its own block up to itself (its own key counts half, as in
    `dense_keys`) and at most k - 1 whole blocks before it. Equal to `dense_keys` when k * B >= T."""
    blocks, rest = divmod(seq_len, block_size)
    own = (blocks * block_size**2 + rest**2) / 2
    # Whole block b has min(b, k - 1) blocks of history: 0, 1, ..., then always k - 1.
    growing = min(topk, blocks)
    history = growing * (growing - 1) // 2 + (blocks - growing) * (topk - 1)
    keys = own + history * block_size**2 + min(topk - 1, blocks) * block_size * rest
    return keys / seq_len


def _attention_flops(model: ModelConfig, keys: float) -> float:
    """12 * H * d * keys: two matrix products (scores and values), three passes' worth."""
    return 12.0 * model.heads * model.head_width * keys
