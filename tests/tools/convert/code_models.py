"""Random models of all kinds of attention that exports with code know, and their checkpoints."""

from pathlib import Path
from typing import Any

import torch

from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import model_tensors
from moba_train.config.load import dump_config
from moba_train.config.schema import RunConfig
from moba_train.model.build import build_model
from moba_train.parallel.world import joined_world
from moba_train.resolve.run import resolve_unchecked
from moba_train.run.progress import Progress
from moba_train.tools.hf.config import read_model_config
from moba_train.tools.hf.weights import load_hf_weights
from tests.tools.convert.hf_models import VOCAB, make_hf_model, random_tokens

PROMPTS = [random_tokens(150), random_tokens(93)]
BLOCKS: dict[str, Any] = {"block_size": 16, "topk": 3}
LAYERS_OF: dict[str, list[dict[str, Any]]] = {
    "llama3": [
        {"kind": "moba", "block_size": 16, "topk": 3},
        {
            "kind": "infllm_v2",
            "block_size": 16,
            "topk": 4,
            "local_blocks": 2,
            "window": 8,
            "stride": 4,
            "dense_len": 32,
        },
        {"kind": "full"},
    ],
    "qwen2": [
        {"kind": "moba", "block_size": 16, "topk": 3, "always": ["current", "previous"]},
        {"kind": "window", "window": 32, "sinks": 3},
        {"kind": "msa", "block_size": 16, "topk": 3},
    ],
    "qwen3": [
        {"kind": "moba", "block_size": 8, "topk": 5, "select": "group", "key_conv": 5},
        {"kind": "msa", "block_size": 16, "topk": 4, "index_dim": 4, "index_keys": "group"},
        {"kind": "msa", "mode": "warmup", "block_size": 16},
    ],
    "entries": [
        {"kind": "moba", "block_size": 24, "topk": 4, "always": ["current", "first"], "key_conv": 3},
        {"kind": "qsa", "block_size": 4, "topk": 9},
        {"kind": "qsa", "mode": "warmup", "block_size": 4},
    ],
    "indexer": [
        {"kind": "indexer", "block_size": 4, "topk": 9, "local_blocks": 2, "index_dim": 8},
        {"kind": "indexer", "block_size": 4, "topk": 12, "first_blocks": 2, "local_blocks": 3, "index_dim": 8}
        | {"index_heads": 3, "coarse": {"block_size": 16, "blocks": 4}},
        {"kind": "indexer", "block_size": 1, "topk": 40, "local_blocks": 4, "index_dim": 4, "top_p": 0.7},
    ],
    "nsa": [
        {"kind": "nsa", **{"compressed_block": 8, "stride": 4, "block_size": 16, "topk": 4, "local": 2, "window": 20}},
        {"kind": "nsa", **{"compressed_block": 8, "stride": 8, "block_size": 8, "topk": 5, "window": 16}}
        | {"first": 0},
        {"kind": "full"},
    ],
    "groups": [
        {"kind": "by_group", "parts": [{"groups": [1], "kind": "moba", "options": BLOCKS | {"key_conv": 3}}]},
        {"kind": "by_group", "parts": [{"groups": [1, 2], "kind": "msa", "options": BLOCKS | {"index_dim": 4}}]}
        | {"mode": "sparse"},
        {
            "kind": "by_group",
            "parts": [
                {"groups": [2], "kind": "moba", "options": {"block_size": 8, "topk": 5, "select": "group"}},
                {
                    "groups": [0],
                    "kind": "infllm_v2",
                    "options": BLOCKS | {"topk": 4, "local_blocks": 2, "dense_len": 32} | {"window": 8, "stride": 4},
                },
                {"groups": [1], "kind": "window", "options": {"window": 32}},
            ],
        },
    ],
    "seer": [
        {"kind": "seer", "block_size": 16, "topk": 3},
        {"kind": "seer", "block_size": 16, "topk": 4, "threshold": 0.15},
        {"kind": "seer", "mode": "warmup", "block_size": 16},
    ],
    "states": [{"kind": "lightning"}, {"kind": "gdn"}, {"kind": "kda"}],
    "sinks": [
        {"kind": "moba", "block_size": 16, "topk": 3},
        {"kind": "window", "window": 32},
        {"kind": "full"},
    ],
    "experts": [
        {"kind": "moba", "block_size": 16, "topk": 3},
        {"kind": "indexer", "mode": "warmup", "block_size": 4},
        {"kind": "moba_window", "block_size": 8, "topk": 4, "always": ["current", "first"], "window": 24}
        | {"key_conv": 3},
    ],
}
"""Attention of each model, whose shape is that family's or in `SHAPES`."""
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "layers": 3, "heads": 6, "kv_heads": 2}
YARN = {"kind": "yarn", "factor": 4.0, "original_seq_len": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "entries": {
        "qk_norm": "all_heads",
        "norms": "post",
        "centered_norms": True,
        "rope": {"overrides": {1: {"theta": 500.0}, 2: YARN}},
    },
    "indexer": {"qk_norm": True, "moe": {"experts": 5, "active": 2, "intermediate_size": 16}},
    "seer": {"norms": "both", "centered_norms": True, "activation": "gelu_tanh", "qk_norm": True}
    | {"heads": 10, "head_dim": 16},  # heads that do not divide the width
    "nsa": {"qk_norm": True, "qkv_bias": True},
    "groups": {"kv_heads": 3, "qk_norm": True},
    "states": {"gate_layers": [0, 2], "output_gate": "head", "tie_embeddings": True},
    "sinks": {
        "sink_layers": "all",
        "activation": "clamped",
        "gate_layers": "last:2",
        "rope": {"fraction": 0.5, "overrides": {"every:2": {"kind": "nope"}}},
        **{"embedding_scale": 3.0, "attention_scale": 0.5, "residual_scale": 0.7, "logits_divisor": 2.0},
        **{"qkv_bias": True, "o_bias": True, "logits_cap": 4.0},
        "moe": {"experts": 6, "active": 3, "intermediate_size": 12, "bias": True, "clamp": 1.5},
    },
    "experts": {
        "moe": {
            **{"experts": 8, "active": 3, "intermediate_size": 12, "shared": 2, "shared_gate": True, "layers": [0, 2]},
            "router": {"score": "sigmoid", "scale": 2.5, "groups": 4, "active_groups": 2, "balance": "bias"},
        },
    },
}
PARAMETRIC = ("msa", "qsa", "indexer", "nsa", "seer", "lightning", "gdn", "kda", "by_group")
CUT = [name for name in LAYERS_OF if name != "states"]
"""Models whose cache can be cut."""
AS_TRAINED = [name for name in LAYERS_OF if name != "seer"]
"""Models that can attend to new tokens as trained."""


def save_run(folder: Path, name: str, layers: list[dict[str, Any]]) -> None:
    """A checkpoint in `folder`/run of a random model with this attention, the family's or one of `SHAPES`."""
    if name in SHAPES:
        save_model(folder, SIZES | SHAPES[name], layers)
    else:
        make_hf_model(name, folder / "hf")
        save_model(folder, read_model_config(folder / "hf").model_dump(), layers)


def save_model(folder: Path, shape: dict[str, Any], layers: list[dict[str, Any]]) -> None:
    """A checkpoint in `folder`/run with this `model` section, whose weights are those in `folder`/hf if there are
    any, and random ones."""
    recipe = {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "model": shape,
        "attention": {"default": "full", "overrides": dict(enumerate(layers))},
        "data": {"train": [{"path": "books", "weight": 3}, {"path": "web"}]},
        "batch_tokens": 256,
        "stages": [{"name": "long", "seq_len": 256, "tokens": 1024}],
    }
    config = RunConfig.model_validate(recipe)
    model = build_model(resolve_unchecked(config).setup.spec)
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("feed_forward.bias"):
            buffer.normal_(std=0.2)
    if (folder / "hf").exists():
        load_hf_weights(model, folder / "hf")
    with joined_world():
        checkpointer = Checkpointer(folder / "run" / "checkpoints", Retention(1))
        meta = {"progress": Progress(step=2).to_meta(), "config": dump_config(config)}
        checkpointer.save(2, model_tensors(model), meta)
        checkpointer.close()
        assert checkpointer.last_error is None
