"""Mixtures of experts in and out of Hugging Face folders: what an export refuses and holds, and dense models upcycled.

Logits, every bit of a round trip, and what is refused of a config.json: test_hf_import.py, test_hf_families.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.checkpoint.state import load_model
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.model.build import build_attention, build_model
from moba_train.resolve.initial_weights import model_differences
from moba_train.tools.cli import app
from moba_train.tools.convert.hf import export_to_hf, import_from_hf
from moba_train.tools.convert.hf_export import hf_config
from moba_train.tools.hf.config import read_model_config
from moba_train.tools.saved_recipe import SavedRun, open_checkpoint
from tests.commands import run_app
from tests.tools.convert.hf_models import logits, make_hf_model, our_model, random_tokens

SHAPE = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "layers": 2, "heads": 2, "kv_heads": 2}
SMALL = {"experts": 4, "active": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "further", "problem"),
    [
        (
            {"shared": 1},
            {"qk_norm": True},
            r"model\.moe\.shared: .*qwen3_moe comes nearest, where .* is 0, not 1; --with-code exports",
        ),
        ({"router": {"score": "sigmoid"}}, {}, r"model\.moe\.router\.score: .* is 'softmax', not 'sigmoid'"),
        ({"router": {"groups": 2, "active_groups": 1}}, {}, r"model\.moe\.router\.groups: .* is null, not 2"),
        ({"router": {"scale": 2.5}}, {}, r"model\.moe\.router\.scale: .* is 1\.0, not 2\.5"),
        ({"router": {"normalize": False}}, {}, r"model\.moe\.router\.normalize: .*mixtral .* is true, not false"),
        ({"layers": "last:1"}, {}, r"model\.qk_norm: .*qwen3_moe comes nearest, where qk_norm is true, not false"),
        ({"layers": "last:1"}, {"residual_scale": 0.5, "qk_norm": True}, r"model\.residual_scale: .*qwen3_moe "),
        ({}, {"qkv_bias": True}, r"model\.qkv_bias: .*mixtral comes nearest, where qkv_bias is false, not true"),
    ],
)
def test_what_no_architecture_has_is_refused_by_key(
    changes: dict[str, Any], further: dict[str, Any], problem: str
) -> None:
    model = ModelConfig.model_validate(SHAPE | {"moe": SMALL | changes} | further)
    with pytest.raises(CheckpointError, match=problem):
        hf_config(model, model.rope, 64, "float32")


def test_experts_in_some_layers_by_a_pattern_are_those_of_the_export(tmp_path: Path) -> None:
    """And a run by such a recipe may begin with a folder that lists the layers."""
    model = ModelConfig.model_validate(SHAPE | {"qk_norm": True, "moe": SMALL | {"layers": "every:2"}})
    contents = hf_config(model, model.rope, 64, "float32")
    assert (contents["model_type"], contents["mlp_only_layers"]) == ("qwen3_moe", [0])
    make_hf_model("qwen3_moe_dense", tmp_path, mlp_only_layers=[0, 2])
    theirs = read_model_config(tmp_path)
    moe = theirs.model_dump()["moe"]
    assert moe["layers"] == [1]
    for pattern, said in (("every:2", []), ("all", ["model.moe.layers: given [0, 1, 2], but init_from"])):
        ours = ModelConfig.model_validate(theirs.model_dump() | {"moe": moe | {"layers": pattern}})
        found = [problem for problem in model_differences(ours, tmp_path) if "moe" in problem]
        assert [problem.partition(" (")[0] for problem in found] == said


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """A Qwen3-MoE model as a checkpoint."""
    path = tmp_path_factory.mktemp("imported")
    make_hf_model("qwen3_moe", path / "hf")
    import_from_hf(path / "hf", path / "ours")
    return checkpoint_of(path / "ours")


def checkpoint_of(folder: Path) -> SavedRun:
    """The checkpoint that an import wrote."""
    found = latest_checkpoint(folder / "checkpoints")
    assert found is not None
    return open_checkpoint(found)


def test_files_of_an_export_hold_single_experts(imported: SavedRun, tmp_path: Path) -> None:
    """A stack, here of 23 kB, goes into files that are smaller."""
    export_to_hf(imported, tmp_path / "out", torch.float32, shard_bytes=13_000)
    files = [*(tmp_path / "out").glob("*.safetensors")]
    assert max(file.stat().st_size for file in files) < 15_000
    first = "model.layers.0.mlp.experts.0.up_proj.weight"
    holding = [[name for name in load_file(file) if ".0.mlp.experts." in name and "up_proj" in name] for file in files]
    assert sorted(name for names in holding for name in names) == [first.replace("s.0.u", f"s.{n}.u") for n in range(6)]
    assert all(len(names) < 6 for names in holding)


def test_biases_of_the_choice_are_not_lost_without_a_word(
    imported: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are buffers, which no architecture has; zero they change nothing."""
    bias = torch.zeros(6)
    name = "model.blocks.1.feed_forward.bias"
    begin = CheckpointReader.__init__
    read = CheckpointReader.read

    def with_bias(reader: CheckpointReader, path: Path) -> None:
        begin(reader, path)
        reader.tensors = {**reader.tensors, name: reader.tensors["model.norm.weight"]}

    monkeypatch.setattr(CheckpointReader, "__init__", with_bias)
    monkeypatch.setattr(CheckpointReader, "read", lambda reader, key: bias if key == name else read(reader, key))
    export_to_hf(imported, tmp_path / "zero", torch.float32, 1 << 30)
    bias[3] = 0.1
    with pytest.raises(CheckpointError, match=r"blocks\.1\.feed_forward\.bias is not zero"):
        export_to_hf(imported, tmp_path / "other", torch.float32, 1 << 30)


def test_an_upcycled_model_computes_what_the_dense_one_does(tmp_path: Path) -> None:
    make_hf_model("qwen3", tmp_path / "hf")
    arguments = ["convert", "hf-to-moba", str(tmp_path / "hf")]
    run_app(app, *arguments, tmp_path / "ours", "--experts", "4", "--active", "3")
    saved = checkpoint_of(tmp_path / "ours")
    model = build_model(saved.spec)
    load_model(model, saved.path)
    model.set_attention(build_attention(saved.stage.attention, saved.config.model.head_width))
    stack = model.state_dict()["blocks.1.feed_forward.experts.up_proj.weight"]
    assert all(torch.equal(expert, stack[0]) for expert in stack)
    assert model.state_dict()["blocks.1.feed_forward.router.weight"].std() == pytest.approx(0.02, rel=0.2)
    tokens = random_tokens(100)
    torch.testing.assert_close(logits(model, tokens), logits(our_model(tmp_path / "hf"), tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="--experts, --active: moe: active: given 5"):
        import_from_hf(tmp_path / "hf", tmp_path / "other", experts=4, active=5)


def test_other_feed_forwards_than_swiglu_are_not_upcycled(tmp_path: Path) -> None:
    make_hf_model("gemma3", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="--experts: given 4, but the model's activation is 'gelu_tanh'"):
        import_from_hf(tmp_path / "hf", tmp_path / "ours", experts=4)
    with pytest.raises(CheckpointError, match="--active: given 3 without --experts"):
        import_from_hf(tmp_path / "hf", tmp_path / "ours", active=3)


def test_a_model_that_has_experts_is_not_upcycled(imported: SavedRun, tmp_path: Path) -> None:
    folder = imported.path.parents[2] / "hf"
    with pytest.raises(CheckpointError, match="--experts: given 4, but the model has experts; allowed: a dense model"):
        import_from_hf(folder, tmp_path / "ours", experts=4)
