"""A Hugging Face folder from elsewhere cannot name files outside of it, nor end a command without a message."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from typer.testing import CliRunner

from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.foreign_files import ROOTS
from moba_train.registry import MODEL_FAMILIES
from moba_train.tools.cli import app
from moba_train.tools.convert.hf_export import read_layers
from moba_train.tools.hf.config import read_model_config
from moba_train.tools.hf.family import Family, family_of
from moba_train.tools.hf.weights import parameter_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OWN: dict[str, Any] = {
    **{"rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": False},
    "moba": {"layers": [{"kind": "full"}], "model": {"norms": "both"}, "ropes": [{"kind": "none"}, {"kind": "nope"}]},
}
"""More keys, which our own models need."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Llama with a tokenizer, and a secret beside it."""
    monkeypatch.delenv(ROOTS, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("secret")
    model = tmp_path / "hf"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(BPE()).save(str(model / "tokenizer.json"))
    shapes = parameter_shapes(read_model_config(model))
    weights = {Family().name(name): torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, model / "model.safetensors")
    return model


def convert(*arguments: str | Path) -> str:
    """Output of `moba-train convert`, with its exit code in front."""
    done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return f"{done.exit_code} {done.output}"


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer.json", "config.json", "model.safetensors"])
def test_import_neither_copies_nor_reads_what_a_link_leads_to(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    said = convert("hf-to-moba", folder, folder.parent / "out")
    assert said.startswith("2 error: ")
    assert f"{name}: leads to {folder.parent / 'secret'}, outside of {folder}" in said
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_tokenizer_that_cannot_be_loaded_is_refused_at_once(folder: Path, name: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / name).write_text("{")
    said = convert("hf-to-moba", folder, folder.parent / "out")
    assert said.startswith(f"2 error: {folder / name} is not a readable ")
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("name", ["merges.txt", "config.json", "model.safetensors", "model.safetensors.index.json"])
def test_import_does_not_wait_for_a_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert "is a named pipe; allowed: a regular file" in convert("hf-to-moba", folder, folder.parent / "out")


def test_weights_may_be_links_inside_the_folder_and_below_allowed_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "store").mkdir()
    (folder / "model.safetensors").rename(folder.parent / "store/w")
    (folder / "model.safetensors").symlink_to("../store/w")
    assert f"{ROOTS}={folder.parent / 'store'}" in convert("hf-to-moba", folder, folder.parent / "out")
    monkeypatch.setenv(ROOTS, str(folder.parent / "store"))
    assert convert("hf-to-moba", folder, folder.parent / "out").startswith("0 ")


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer.json"])
def test_export_does_not_copy_what_a_link_leads_to(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's recipe names a tokenizer below the working folder."""
    out = folder.parent / "work"
    out.mkdir()
    assert convert("hf-to-moba", folder, out / "imported").startswith("0 ")
    monkeypatch.chdir(out)
    (out / "imported" / name).unlink(missing_ok=True)
    (out / "imported" / name).symlink_to(folder.parent / "secret")
    said = convert("moba-to-hf", out / "imported", out / "exported")
    assert said.startswith("2 error: ")
    assert f"{name}: leads to {folder.parent / 'secret'}, outside of {out}" in said
    assert not (out / "exported").exists()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers: given 1000000000; allowed: integer >= 1 and <= 10000"),
        ("vocab_size", 10**18, "vocab_size: given 1000000000000000000; allowed: integer >= 2 and <= 16777216"),
        ("num_attention_heads", 10**9, "num_attention_heads: given 1000000000; allowed: integer >= 1 and <= 65536"),
        ("num_attention_heads", 17, "num_attention_heads is 17, allowed: at most hidden_size"),
        ("head_dim", 10**9, "head_dim: given 1000000000; allowed: integer >= 2 and <= 16777216"),
        ("rope_theta", 10**400, "json: rope_theta: given 1"),
        ("tie_word_embeddings", "both", "tie_word_embeddings: given 'both'; allowed: true | false"),
        ("max_position_embeddings", 10**30, "max_position_embeddings is 1" + "0" * 30 + "; allowed: integer >= 1"),
        ("max_position_embeddings", "x", "max_position_embeddings is 'x'; allowed: integer >= 1"),
        ("moba", {"layers": [{"kind": "full"}] * 3}, "allowed: {'layers': a list of at most 2 entries}"),
        ("moba", [1], "allowed: {'layers': a list of at most 2 entries}"),
        ("layer_types", 3, "layer_types[0] is 3"),
        ("num_hidden_layers", 2.0, "num_hidden_layers is 2.0, allowed: integer"),
    ],
)
def test_numbers_of_a_config_are_bounded_by_key(folder: Path, key: str, value: object, said: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    found = convert("hf-to-moba", folder, folder.parent / "out")
    assert found.startswith("2 error: ")
    assert said in found


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_deep_json_is_an_error_with_a_message(folder: Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    said = convert("hf-to-moba", folder, folder.parent / "out")
    assert said.startswith("2 error: ")
    assert f"{name}: " in said
    assert "nested too deeply" in said


@pytest.mark.parametrize(
    ("moba", "said"),
    [
        (3, "moba.model is null, allowed: an object of activation"),
        (OWN["moba"] | {"model": {"width": 3}}, "moba.model is {'width': 3}, allowed: an object of activation"),
        (OWN["moba"] | {"model": {"norms": "none"}}, "norms: given 'none'; allowed: "),
        (OWN["moba"] | {"ropes": [{}]}, "moba.ropes is [{}], allowed: a list of 2 objects of beta_fast"),
        (OWN["moba"] | {"ropes": [{"theta": 0}] * 2}, "rope.theta: given 0; allowed: number > 1"),
        (OWN["moba"] | {"ropes": [{"turns": 3}, {}]}, "a list of 2 objects of beta_fast"),
    ],
)
def test_what_our_own_models_say_is_checked(folder: Path, moba: object, said: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | OWN | {"model_type": "moba_train", "moba": moba}))
    found = convert("hf-to-moba", folder, folder.parent / "out")
    assert found.startswith("2 error: ")
    assert said in found


TWO_LAYERS = OWN["moba"] | {"layers": [{"kind": "full"}] * 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"moba": {}}, "config.json: KeyError 'layers'; allowed: what `convert moba-to-hf --with-code` writes"),
        ({"vocab_size": None}, "config.json: TypeError "),
        ({"moba": TWO_LAYERS | {"ropes": []}}, "config.json: IndexError "),
        ({"moba": TWO_LAYERS | {"layers": [None, 1]}}, "config.json: AttributeError "),
        ({"moba": TWO_LAYERS | {"model": {"moe": {"layers": [0]}}}}, "config.json: KeyError 'router'"),
    ],
)
def test_the_code_of_an_export_says_which_file_was_edited(changes: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    from moba_train.tools.convert.remote_code.modeling import MobaConfig, MobaForCausalLM

    config = CONFIG | OWN | {"head_dim": 8, "moba": TWO_LAYERS} | changes
    config.pop("model_type")
    with torch.device("meta"), pytest.raises(ValueError, match=re.escape(said)) if said else contextlib.nullcontext():
        MobaForCausalLM(MobaConfig(**config))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = ("head_dim", "rope_theta", "rope_scaling", "rope_parameters", "moba", "layer_types", "sliding_window")


def changed_configs(model_type: str) -> st.SearchStrategy[dict[str, Any]]:
    """Configs of a family with other values of keys that it reads."""
    family = family_of(model_type)
    keys = sorted({*CONFIG, *KEYS, *family.defaults, *family.fixed, *family.others} - {"model_type"})
    if family.needs_code:
        keys.append("moba")
    changes = st.dictionaries(st.sampled_from(keys), json_values, max_size=3)
    return changes.map(lambda found: CONFIG | OWN | {"model_type": model_type} | found)


@given(config=st.sampled_from([*MODEL_FAMILIES]).flatmap(changed_configs))
def test_any_config_gives_a_model_or_an_error(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(CheckpointError):
        assert isinstance(read_model_config(folder), ModelConfig)
        read_layers(folder)
