"""Kinds of attention with their options, rotary embeddings and shapes of models that config.json of an export may name.

The exporter goes by these lists as well, so that a model with anything new is refused until the code has learnt it.
"""

from typing import Any

_GATE = {"mode", "block_size", "topk", "train_gate", "kl_weight", "kl_every"}
LAYERS: dict[str, set[str]] = {
    "full": set(),
    "window": {"window", "sinks"},
    "moba": {"block_size", "topk", "select", "always", "key_conv"},
    "moba_window": {"block_size", "topk", "select", "always", "key_conv", "window"},
    "msa": _GATE | {"index_dim", "index_keys"},
    "qsa": _GATE | {"index_dim"},
    "indexer": _GATE | {"index_dim", "index_heads", "first_blocks", "local_blocks", "top_p", "coarse"},
    "seer": _GATE | {"threshold"},
    "infllm_v2": {"block_size", "topk", "first_blocks", "local_blocks", "window", "stride", "dense_len"},
    "nsa": {"compressed_block", "stride", "block_size", "topk", "first", "local", "window"},
    "by_group": {"parts", "mode"},
    "lightning": {"decay"},
    "gdn": set(),
    "kda": set(),
}
"""Options of each kind of attention in an entry of `moba.layers`."""
ROPES = ("none", "abf", "pi", "yarn", "llama3", "nope")
"""Kinds of rotary embedding."""
ROPE = {"kind", "theta", "factor", "original_seq_len", "beta_fast", "beta_slow", "truncate", "fraction"}
"""Keys of an entry of `moba.ropes`."""
SHAPE: dict[str, Any] = {
    "qkv_bias": False,
    "o_bias": False,
    "qk_norm": False,
    "norms": "pre",
    "centered_norms": False,
    "activation": "silu",
    "embedding_scale": 1.0,
    "attention_scale": None,
    "residual_scale": 1.0,
    "logits_divisor": 1.0,
    "logits_cap": None,
    "sink_layers": [],
    "gate_layers": [],
    "output_gate": "channel",
    "moe": None,
}
"""Keys that `moba.model` may have, with the values of Llama, where it has none."""
