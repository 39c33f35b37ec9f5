"""Qwen3-MoE and Mixtral out of Hugging Face folders and back, bit by bit; what is refused; upcycling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.checkpoint.state import load_model
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.model.build import build_attention, build_model
from moba_train.tools.convert.hf import export_to_hf, import_from_hf
from moba_train.tools.convert.hf_export import hf_config
from moba_train.tools.hf.config import read_model_config
from moba_train.tools.saved_recipe import open_checkpoint
from tests.tools.convert.hf_models import logits, make_hf_model, our_model, random_tokens


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3-moe with a dense layer", "mixtral"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers."""
    folder = tmp_path_factory.mktemp("hf")
    make_hf_model(request.param, folder)
    return folder


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_import_and_export_give_back_every_bit(path: Path, tmp_path: Path) -> None:
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
    ("changes", "further"),
    [
        ({"shared": 1}, {"qk_norm": True}),
        ({"router": {"score": "sigmoid"}}, {}),
        ({"layers": "last:1"}, {}),
        ({"router": {"normalize": False}}, {}),
        ({}, {"qkv_bias": True}),
    ],
)
def test_what_no_architecture_has_is_refused_by_key(changes: dict[str, Any], further: dict[str, Any]) -> None:
    model = ModelConfig.model_validate(SHAPE | {"moe": SMALL | changes} | further)
    with pytest.raises(CheckpointError, match=r"model\.(moe|qkv_bias|qk_norm)\b.*: no Hugging Face"):
        hf_config(model, model.rope, 64, "float32")


def test_a_sliding_window_is_refused(path: Path, tmp_path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "mixtral":
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
        with pytest.raises(CheckpointError, match="sliding_window is 64, allowed: None"):
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
