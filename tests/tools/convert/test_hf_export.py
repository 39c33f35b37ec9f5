"""A checkpoint as a Hugging Face folder: its files, layers and shapes, and what is refused. Bits and logits of every
family: test_hf_families.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.checkpoint.index import Part
from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import make_temporary_folder, publish
from moba_train.checkpoint.writer import ShardFile, write_checkpoint
from moba_train.config.attention import resolve_layers
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.model.build import build_attention
from moba_train.tools.convert.hf import export_to_hf, imported_recipe
from moba_train.tools.convert.hf_export import hf_config, layer_entry, layer_problem
from moba_train.tools.hf.files import INDEX
from moba_train.tools.hf.gemma import Gemma3
from moba_train.tools.saved_recipe import open_checkpoint
from tests.tools.convert.hf_models import make_hf_model, save_as_checkpoint

SPARSE = {"block_size": 16, "topk": 3}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder, and what our checkpoint of it was exported to, in float32 and several files."""
    folder = tmp_path_factory.mktemp("qwen2")
    make_hf_model("qwen2", folder / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "hf" / name).write_text(name)
    save_as_checkpoint(folder / "hf", folder / "run", SPARSE, folder / "hf" / "tokenizer.json")
    export_to_hf(open_checkpoint(folder / "run"), folder / "out", torch.float32, shard_bytes=40_000)
    return folder / "hf", folder / "out"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of all files."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_files_are_of_the_size_that_is_asked_for_and_have_an_index(exported: tuple[Path, Path]) -> None:
    after = tensors(exported[1])
    index = json.loads((exported[1] / INDEX).read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in after.values())
    assert all(file.stat().st_size < 45_000 for file in exported[1].glob("*.safetensors"))


def test_the_tokenizer_survives_the_round_trip(exported: tuple[Path, Path]) -> None:
    before, after = exported
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (after / name).read_text() == (before / name).read_text()


def test_parameters_of_a_kind_are_what_an_export_would_lose() -> None:
    model = ModelConfig(vocab_size=50, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, head_dim=8)
    off, on = (MobaKind(MobaKind.Options(block_size=8, topk=2, key_conv=width), 8) for width in (0, 3))
    assert layer_problem(off, model) == ""
    assert f"{2 * 8 * 3} parameters" in layer_problem(on, model)
    assert "key_conv" not in layer_entry(off)


def test_what_most_layers_have_is_the_default_of_an_imported_recipe(exported: tuple[Path, Path]) -> None:
    """So that a recipe that extends it changes the attention by a line; layers without an entry are full."""
    folder = exported[1]
    config = imported_recipe(folder, folder)
    entries = json.loads((folder / "config.json").read_text())["moba"]["layers"]
    attention = build_attention(resolve_layers(config.attention, config.model.layers), config.model.head_width)
    assert [layer_entry(kind) for kind in attention] == entries
    assert config.attention.default == "moba"
    assert config.attention.options_of("moba").model_dump()["topk"] == SPARSE["topk"]
    others = {layer: entry for layer, entry in enumerate(entries) if entry["kind"] != "moba"}
    assert config.attention.overrides == others
    assert imported_recipe(exported[0], folder).attention.overrides == {}


def test_a_shape_that_transformers_cannot_load_is_refused_or_goes_out_as_another_architecture() -> None:
    """Its Llama and Gemma want heads that divide the width, even where config.json gives the width of a head."""
    from transformers import AutoConfig

    shape = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "layers": 1, "heads": 5, "kv_heads": 5}
    model = ModelConfig.model_validate(shape | {"head_dim": 8})
    gemma = Gemma3.model | {"embedding_scale": 48**0.5}
    with pytest.raises(
        CheckpointError, match=r"model\.heads: given 5; allowed .*Gemma3.* a divisor of model\.hidden_size \(48\)"
    ):
        hf_config(model.model_copy(update=gemma), model.rope, 256, "float32")
    assert hf_config(model, model.rope, 256, "float32")["model_type"] == "mistral"
    for change in ({}, {"qk_norm": True}, {"qkv_bias": True}, {"heads": 6, "kv_heads": 6}):
        AutoConfig.for_model(**hf_config(model.model_copy(update=change), model.rope, 256, "float32"))


@pytest.mark.parametrize(
    ("output", "message"), [("out", "not empty"), ("out/config.json", "is a file"), ("out/config.json/new", "written")]
)
def test_a_place_that_cannot_be_a_new_folder_is_refused(exported: tuple[Path, Path], output: str, message: str) -> None:
    folder = exported[1].parent
    with pytest.raises(CheckpointError, match=f"{output}: .*{message}"):
        export_to_hf(open_checkpoint(folder / "run"), folder / output, torch.float32, shard_bytes=40_000)


def test_an_interrupted_export_leaves_nothing(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(folder: Path, *_: object) -> None:
        (folder / "part-00000.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("moba_train.tools.convert.hf.write_safetensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_to_hf(open_checkpoint(exported[1].parent / "run"), tmp_path / "new", torch.float32, shard_bytes=40_000)
    assert not (tmp_path / "new").exists()


def test_a_tensor_that_the_index_lacks_is_named_and_nothing_is_exported(
    exported: tuple[Path, Path], tmp_path: Path
) -> None:
    """Memory that no one has written would be exported in its place."""
    shutil.copytree(exported[1].parent / "run", tmp_path / "run")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    reader = CheckpointReader(checkpoint)
    lacking = "model.blocks.1.attention.o_proj.weight"
    others = {name if name != lacking else "model.other": reader.read(name) for name in reader.tensors}
    file = ShardFile.from_parts("rank_0_0.safetensors", [Part.from_whole(*item) for item in others.items()])
    temporary = make_temporary_folder(checkpoint.parent, 1)
    written = write_checkpoint(temporary, [file], lambda part: others[part.name], read_meta(checkpoint))
    assert publish(temporary, 1, written) == checkpoint
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attention\.o_proj\.weight is not in its index"):
        export_to_hf(open_checkpoint(tmp_path / "run"), tmp_path / "out", torch.float32, shard_bytes=40_000)
    assert not (tmp_path / "out").exists()


def test_weights_that_a_dtype_cannot_hold_are_refused_by_name(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 would make infinity of them without a word."""
    read = CheckpointReader.read
    monkeypatch.setattr(CheckpointReader, "read", lambda reader, name: read(reader, name) + 70_000 * ("embed" in name))
    saved = open_checkpoint(exported[1].parent / "run")
    said = r"--dtype float16: embedding\.weight has values up to 7000\d(\.\d+)?; allowed: at most 65504; take bfloat16"
    with pytest.raises(CheckpointError, match=said):
        export_to_hf(saved, tmp_path / "half", torch.float16, shard_bytes=2**30)
    assert not (tmp_path / "half").exists()
    export_to_hf(saved, tmp_path / "bfloat16", torch.bfloat16, shard_bytes=2**30)
