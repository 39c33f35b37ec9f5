"""Qwen3-MoE and Mixtral in and out of Hugging Face folders: logits of transformers, every bit back, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moba_train.hf.config import read_model_config
from safetensors.torch import load_file

from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.checkpoint.state import load_model
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.model.build import build_attention, build_model
from moba_train.tools.convert.hf import export_to_hf, import_from_hf
from moba_train.tools.convert.hf_export import hf_config
from moba_train.tools.saved_recipe import open_checkpoint
from tests.tools.convert.hf_models import logits, make_hf_model, our_model, random_tokens

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "Qwen3-MoE with a dense layer": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "Mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "head_dim": None,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model of transformers, in a folder and in memory."""
    path = tmp_path_factory.mktemp("hf")
    return path, make_hf_model("llama2", path, num_key_value_heads=2, **FAMILIES[request.param])


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_logits_are_those_of_transformers(folder: tuple[Path, Any]) -> None:
    path, theirs = folder
    tokens = random_tokens(100)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    difference = (logits(our_model(path), tokens) - expected).abs().max() / expected.abs().max()
    assert difference < 2e-6


def test_import_and_export_give_back_every_bit(folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = folder
    import_from_hf(path, tmp_path / "ours")
    checkpoint = latest_checkpoint(tmp_path / "ours" / "checkpoints")
    assert checkpoint is not None
    export_to_hf(open_checkpoint(checkpoint), tmp_path / "back", torch.float32, 1 << 30)
    before, after = tensors(path), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert any(".experts.3." in name for name in before)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    config = read_model_config(path)
    assert read_model_config(tmp_path / "back") == config.model_copy(update={"head_dim": config.head_width})
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = random_tokens(50)
    with torch.no_grad():
        got = model(tokens[None]).logits[0]
    torch.testing.assert_close(got, logits(our_model(path), tokens), rtol=1e-4, atol=1e-5)


SHAPE = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "layers": 2, "heads": 2, "kv_heads": 2}
SMALL = {"experts": 4, "active": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "further", "problem"),
    [
        ({"shared": 1}, {"qk_norm": True}, "model.moe.shared: given 1; allowed in an export as qwen3_moe: 0"),
        ({"router": {"score": "sigmoid"}}, {}, "model.moe.router.score: given 'sigmoid'"),
        ({"layers": "last:1"}, {}, "model.moe.layers: given 'last:1'; allowed in an export as mixtral: 'all'"),
        ({"router": {"normalize": False}}, {}, "model.moe.router.normalize: given False"),
        ({}, {"qkv_bias": True}, "model.moe: given in a model like qwen2"),
    ],
)
def test_what_no_architecture_has_is_refused_by_key(
    changes: dict[str, Any], further: dict[str, Any], problem: str
) -> None:
    model = ModelConfig.model_validate(SHAPE | {"moe": SMALL | changes} | further)
    with pytest.raises(CheckpointError, match=problem):
        hf_config(model, model.rope, 64, "float32")


def test_a_sliding_window_is_refused(folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = folder
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "mixtral":
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
        with pytest.raises(CheckpointError, match="sliding_window is 64, allowed: null"):
            read_model_config(tmp_path)


def test_an_upcycled_model_computes_what_the_dense_one_does(tmp_path: Path) -> None:
    make_hf_model("qwen3", tmp_path / "hf")
    import_from_hf(tmp_path / "hf", tmp_path / "ours", experts=4, active=3)
    checkpoint = latest_checkpoint(tmp_path / "ours" / "checkpoints")
    assert checkpoint is not None
    saved = open_checkpoint(checkpoint)
    model = build_model(saved.spec)
    load_model(model, checkpoint)
    model.set_attention(build_attention(saved.stage.attention, saved.config.model.head_width))
    stack = model.state_dict()["blocks.1.feed_forward.experts.up_proj.weight"]
    assert all(torch.equal(expert, stack[0]) for expert in stack)
    assert model.state_dict()["blocks.1.feed_forward.router.weight"].std() == pytest.approx(0.02, rel=0.2)
    tokens = random_tokens(100)
    torch.testing.assert_close(logits(model, tokens), logits(our_model(tmp_path / "hf"), tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="--experts, --active: moe: active: given 5"):
        import_from_hf(tmp_path / "hf", tmp_path / "other", experts=4, active=5)
