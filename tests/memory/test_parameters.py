"""Parameter counts are exact: against published totals and against the model itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.model.build import build_model
from moba_train.model.spec import count_parameters
from moba_train.model.transformer import Transformer
from moba_train.optim.spec import block_matrices
from tests.resolved import spec_of
from tests.small_recipe import Load

MODELS = Path(__file__).parents[2] / "configs/models"


def shape(name: str) -> ModelConfig:
    return ModelConfig.model_validate(yaml.safe_load((MODELS / f"{name}.yaml").read_text())["model"])


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama-1b", 1_235_814_400),
        ("qwen2-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_published_totals(name: str, total: int) -> None:
    counts = count_parameters(shape(name))
    assert counts.total == total
    assert counts.without_embeddings == total - counts.embedding - counts.output


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True},
        {"qkv_bias": True, "qk_norm": True},
        {"head_dim": 48, "qkv_bias": True, "kv_heads": 1},
        {"layers": 1, "qk_norm": True, "tie_embeddings": True},
        {"norms": "both", "o_bias": True, "sink_layers": "last:1", "gate_layers": "every:2"},
        {"norms": "post", "qk_norm": "all_heads", "gate_layers": "all", "output_gate": "head"},
    ],
)
def test_counts_are_those_of_the_model(changes: dict[str, Any]) -> None:
    config = shape("tiny").model_copy(update=changes)
    with torch.device("meta"):
        model = Transformer(config)
    counts = count_parameters(config)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    named = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert counts.norms == sum(size for name, size in named.items() if "norm" in name)
    assert counts.attention == sum(n for name, n in named.items() if ".attention." in name and "norm" not in name)
    assert counts.feed_forward == sum(size for name, size in named.items() if ".feed_forward." in name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_counts_what_its_attention_kinds_add(load: Load, kind: str) -> None:
    spec = spec_of(load("attention.overrides={}", f"stages.1.attention.default={kind}"))
    with torch.device("meta"):
        model = build_model(spec)
    assert spec.counts.total == sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(matrix.numel() for matrix in block_matrices(model).values())
    assert spec.matrices == matrices
