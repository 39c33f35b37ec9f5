"""A run that begins with weights: from a checkpoint of ours, and from its Hugging Face export, which is the same."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from moba_train.config.attention import AttentionConfig
from moba_train.config.load import load_config
from moba_train.errors import CheckpointError, ConfigError
from moba_train.model.build import build_model
from moba_train.resolve.initial_weights import left_out_kinds, load_initial_weights
from moba_train.resolve.run import resolve_unchecked
from moba_train.resolve.warnings import recipe_warnings
from moba_train.tools.convert.adapters import export_adapters
from moba_train.tools.convert.hf import export_to_hf, import_from_hf, imported_recipe
from moba_train.tools.saved_recipe import load_trained, open_checkpoint
from tests.resolved import check
from tests.run.test_init_from import _on_the_cpu, begun_from, damaged, source
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks
from tests.tools.convert.code_models import LAYERS_OF, save_run
from tests.tools.convert.hf_models import logits, make_hf_model, our_model, random_tokens

__all__ = ["_on_the_cpu", "source"]


@pytest.fixture(scope="module")
def exported(source: Path) -> Path:
    """The core's folder with a finished run, its export `hf`, and `imported`, a checkpoint made of that."""
    export_to_hf(open_checkpoint(source / "run"), source / "hf", torch.float32, shard_bytes=20_000)
    import_from_hf(source / "hf", source / "imported")
    return source


def test_all_three_folders_begin_alike(exported: Path, tmp_path: Path, corpora: Path) -> None:
    losses = {}
    for name in ("run", "hf", "imported"):
        run = begun_from(Run(tmp_path / name, corpora), exported / name)
        run.folder.mkdir()
        assert run.train_here() == 0
        losses[name] = run.losses()
    assert losses["run"] == losses["hf"] == losses["imported"]
    # The data begin again, but the weights know them already.
    fresh, last = Run(exported, corpora).losses()[0], Run(exported, corpora).losses()[-1]
    assert abs(losses["hf"][0] - last) < 0.3 * (fresh - last)


def test_a_run_goes_on_without_the_export_it_began_from(exported: Path, run: Run) -> None:
    weights = run.folder / "weights"
    shutil.copytree(exported / "hf", weights)
    assert begun_from(run, weights).train_here() == 0
    shutil.rmtree(weights)
    assert run.train_here(f"stages.0.tokens={3 * 512}") == 0
    assert len(run.losses()) == 3


def test_a_run_says_what_it_was_given_and_names_a_folder_that_is_not_there(exported: Path, run: Run) -> None:
    assert begun_from(run, exported / "hf").train_here("--stop-at-step", "1") == 0
    (event,) = run.records("init_from")
    assert re.match(r"\d+ tensors \([\d,]+ parameters\) loaded from the Hugging Face model ", event["message"])
    assert event["message"].endswith(str(exported / "hf"))
    fresh = [f"run_dir={run.folder / 'fresh'}"]
    with pytest.raises(ConfigError, match=r"init_from: given 'nope'; there is no such folder \(from "):
        check(load_config(run.write_recipe(), [*fresh, "init_from=nope"]), 1, check_files=True)
    with pytest.raises(ConfigError, match=r"nor is there a config\.json, which a Hugging Face model has"):
        check(load_config(run.write_recipe(), [*fresh, f"init_from={run.folder}"]), 1, check_files=True)


def test_weights_with_a_damaged_byte_are_not_exported(exported: Path, run: Run) -> None:
    weights = damaged(exported / "imported", run.folder / "weights")
    with pytest.raises(CheckpointError, match=r"rank_0_0\.safetensors: its SHA-256"):
        export_to_hf(open_checkpoint(weights), run.folder / "hf", torch.float32, shard_bytes=20_000)
    assert begun_from(run, weights).train_here() == 2


def test_the_recipe_must_describe_the_weights(exported: Path, run: Run) -> None:
    """Every key that differs is named before any process group exists; so is a folder that is none."""
    begun_from(run, exported / "hf").recipe["model"] |= {"kv_heads": 4, "norm_eps": 1e-6, "rope": {"theta": 10000}}
    with pytest.raises(ConfigError) as error:
        check(load_config(run.write_recipe()), 1, check_files=True)
    for key in ("model.kv_heads: given 4", "model.norm_eps", "model.rope"):
        assert key in str(error.value)
    with pytest.raises(ConfigError, match="init_from"):
        check(load_config(run.write_recipe(), [f"init_from={run.folder}"]), 1, check_files=True)


def test_a_run_is_warned_of_windows_that_it_leaves_out_and_of_keys_that_nothing_reads(run: Run, tmp_path: Path) -> None:
    make_hf_model("ministral", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"attention_chunks": 3}))
    imported = imported_recipe(tmp_path / "hf", tmp_path / "hf")
    run.recipe["init_from"] = str(tmp_path / "hf")
    run.recipe["model"] = imported.model.model_dump()
    run.recipe["stages"][0]["attention"] = {"default": "full"}

    def said() -> list[str]:
        return recipe_warnings(resolve_unchecked(load_config(run.write_recipe())))

    unread, windows = said()[-2:]
    assert unread.startswith("init_from: nothing reads attention_chunks of ")
    assert "windows of 24 tokens in layers 0, 2, where the first stage attends otherwise" in windows
    run.recipe["stages"][0]["attention"] = {"default": "window", "full_layers": "none", "window": {"window": 24}}
    assert said()[-1] == unread


def test_a_run_is_warned_of_sequences_that_its_rotary_embedding_is_too_short_for(run: Run, tmp_path: Path) -> None:
    make_hf_model("qwen2", tmp_path / "hf", max_position_embeddings=64)
    run.recipe["init_from"] = str(tmp_path / "hf")
    run.recipe["model"] = imported_recipe(tmp_path / "hf", tmp_path / "hf").model.model_dump()
    short, long = run.recipe["stages"]
    short.pop("rope", None)
    rope = long.pop("rope")

    def said() -> list[str]:
        warnings = recipe_warnings(resolve_unchecked(load_config(run.write_recipe())))
        return [warning for warning in warnings if "rotary embedding" in warning]

    (warning,) = said()
    assert warning.startswith("stages[1].rope: 'long' has sequences of 128 tokens, and the rotary embedding")
    assert "which was made for 64; set one" in warning
    long["rope"] = rope
    assert said() == []
    long.pop("rope")
    # As Qwen publishes it: YaRN for longer sequences, beside the length of the training before it.
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rope_parameters": yarn}))
    run.recipe["model"] = imported_recipe(tmp_path / "hf", tmp_path / "hf").model.model_dump()
    assert said() == []


def test_a_run_is_warned_of_a_cap_that_it_leaves_out(run: Run, tmp_path: Path) -> None:
    make_hf_model("gemma2", tmp_path / "hf")
    run.recipe["init_from"] = str(tmp_path / "hf")
    run.recipe["model"] = imported_recipe(tmp_path / "hf", tmp_path / "hf").model.model_dump()
    run.recipe["stages"][0]["attention"] = {"default": "full"}
    warning = recipe_warnings(resolve_unchecked(load_config(run.write_recipe())))[-1]
    assert "scores below 2 in layers 0-2, where the first stage attends otherwise; set kind: capped" in warning


def test_layers_of_an_architecture_that_are_a_kind_with_weights_begin_with_them(
    run: Run, tmp_path: Path, ranks: Ranks
) -> None:
    make_hf_model("qwen3_next", tmp_path / "hf", moe_intermediate_size=16, shared_expert_intermediate_size=16)
    imported = imported_recipe(tmp_path / "hf", tmp_path / "hf")
    assert (imported.attention.default, imported.attention.overrides) == ("gdn", {3: {"kind": "full"}})
    run.recipe |= {"init_from": str(tmp_path / "hf"), "model": imported.model.model_dump()}
    del run.recipe["stages"][1:]
    heads = {"keys": 2, "values": 6, "width": 8}
    run.recipe["attention"] |= {"gdn": {"heads": heads}}
    run.recipe["stages"][0]["attention"] = {"default": "gdn", "full_layers": "last:1"}
    assert run.train_here("--stop-at-step", "1") == 0
    (event,) = run.records("init_from")
    assert event["message"].endswith(str(tmp_path / "hf"))  # nothing begins again
    alone = run.losses()
    run.recipe |= {"run_dir": str(tmp_path / "shared"), "parallel": {"tp": 2}}
    ranks.train(run, 2, "--stop-at-step", "1")
    assert run.losses() == pytest.approx(alone, rel=1e-4)
    run.recipe["parallel"] = {}
    heads["values"] = 4
    with pytest.raises(ConfigError, match=r"attention\.gdn: gives layer 0 parameters"):
        check(load_config(run.write_recipe(), [f"run_dir={tmp_path / 'other'}"]), 1, check_files=True)


def test_adapters_of_a_model_with_linear_layers_are_exported(run: Run, tmp_path: Path) -> None:
    """Into a model of its architecture; peft has no place for linear layers, which are trained in full."""
    make_hf_model("qwen3_next", tmp_path / "hf")
    imported = imported_recipe(tmp_path / "hf", tmp_path)
    run.recipe |= {"init_from": str(tmp_path / "hf"), "model": imported.model.model_dump(), "adapters": {"lora": {}}}
    run.recipe["attention"] = imported.attention.model_dump(exclude_unset=True)
    del run.recipe["stages"][1:], run.recipe["stages"][0]["attention"]
    assert run.train_here("--stop-at-step", "2") == 0
    saved = open_checkpoint(run.run_dir)
    with pytest.raises(CheckpointError, match=r"peft has no place for blocks\.0\.attention\.gdn"):
        export_adapters(saved, tmp_path / "peft")
    export_to_hf(saved, tmp_path / "out", torch.float32, 1 << 30)
    tokens = random_tokens(90)
    ours = load_trained(saved, torch.device("cpu"))
    found = logits(our_model(tmp_path / "out"), tokens)
    assert (logits(our_model(tmp_path / "hf"), tokens) - found).abs().max() > 1e-3, "training does something"
    torch.testing.assert_close(found, logits(ours, tokens), rtol=1e-4, atol=1e-4)


def test_an_export_with_code_brings_the_weights_of_its_attention_kinds(tmp_path: Path) -> None:
    """Those that no stage of the run has are left out."""
    save_run(tmp_path, "qwen3", LAYERS_OF["qwen3"])
    saved = open_checkpoint(tmp_path / "run")
    export_to_hf(saved, tmp_path / "out", torch.float32, 2**30, with_code=True)
    model = build_model(saved.spec)
    assert "begin again" not in load_initial_weights(model, tmp_path / "out")
    expected = load_trained(saved, torch.device("cpu")).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    bare = resolve_unchecked(saved.config.model_copy(update={"attention": AttentionConfig(default="full")})).setup.spec
    assert {*left_out_kinds(bare, tmp_path / "out")} == {(0, "moba"), (1, "msa"), (2, "msa")}
    load_initial_weights(build_model(bare), tmp_path / "out")
