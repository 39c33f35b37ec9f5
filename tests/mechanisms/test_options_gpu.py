"""What a recipe may add to layers and stages, trained by the trainer, compiled and in bf16, on one GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.tiny_run import Run

DEEPER = {"layers": 4, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "sinks and gates": {"sink_layers": "every:2", "gate_layers": "all", "output_gate": "head"},
    "norms of Gemma": {"norms": "both", "centered_norms": True, "activation": "gelu_tanh"},
    "norms of OLMo": {"norms": "post", "qk_norm": "all_heads"},
    "layers without positions": {"rope": {"fraction": 0.5, "overrides": {"every:4": {"kind": "nope"}}}},
}
ATTENTION: dict[str, dict[str, Any]] = {
    "windows": {"default": "window", "window": {"window": 32, "sinks": 4}, "full_layers": "last:1"},
    "an indexer": {"default": "qsa", "qsa": {"topk": 8}, "full_layers": "last:1"},
    "an indexer that warms up": {"default": "qsa", "qsa": {"topk": 8, "mode": "warmup"}, "full_layers": "none"},
    "a narrow indexer in two stages": {
        "default": "indexer",
        "indexer": {
            "block_size": 8,
            "topk": 8,
            "local_blocks": 2,
            "top_p": 0.9,
            "coarse": {"block_size": 32, "blocks": 3},
        },
        "full_layers": "last:1",
    },
    "the ideal selection": {"default": "oracle", "oracle": {"block_size": 16, "topk": 2}},
    "groups of heads": {
        "default": "by_group",
        "by_group": {"parts": [{"groups": [0], "kind": "msa", "options": {"block_size": 64, "topk": 1}}]},
    },
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*MODELS, *ATTENTION, "distillation"])
def test_it_trains(run: Run, corpora: Path, name: str) -> None:
    assert corpora.is_dir()
    run.recipe["model"] |= DEEPER | MODELS.get(name, {})
    run.recipe |= {"compile": True, "activation_checkpointing": "selective"}
    short, long = run.recipe["stages"]
    if name in ATTENTION:
        del run.recipe["attention"]
        short["attention"] = long["attention"] = ATTENTION[name]
    if name == "distillation":
        long["distill"] = {"weight": 0.5}
    long.pop("rope")
    status, output = run.train_on_gpu()
    assert status == 0, output
    losses = run.losses()
    assert losses[-1] < losses[0]
