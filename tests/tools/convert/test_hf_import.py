"""Import of Hugging Face models: equal logits, shards read in parts, unsupported models refused by name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moba_train.errors import CheckpointError
from moba_train.model.transformer import Transformer
from moba_train.registry import MODEL_FAMILIES
from moba_train.tools.hf.config import read_family, read_model_config
from moba_train.tools.hf.files import INDEX, SINGLE
from moba_train.tools.hf.mxfp4 import open_weights
from moba_train.tools.hf.weights import HuggingFace, load_hf_weights, places
from tests.tools.convert.hf_models import FAMILIES, PUBLISHED, logits, make_hf_model, our_model, random_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """To 2e-6 of the largest, in float32: past the trained length too, where the kinds of RoPE differ. Linear layers
    are sums of many terms, where transformers' two implementations differ by 7e-6 from one another."""
    theirs = make_hf_model(family, tmp_path)
    assert (tmp_path / INDEX).is_file()
    tokens = random_tokens(200)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    difference = (logits(our_model(tmp_path), tokens) - expected).abs().max() / expected.abs().max()
    assert difference < (2e-5 if family == "qwen3_next" else 2e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 model."""
    path = tmp_path_factory.mktemp("hf")
    make_hf_model("qwen3", path)
    return path


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "gpt_oss"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without experts, one with, and one whose experts are the rows of larger tensors by turns."""
    path = tmp_path_factory.mktemp("hf")
    make_hf_model(request.param, path)
    return path


@pytest.fixture
def second_of_three_ranks() -> Iterator[None]:
    """A process group in which no other rank answers."""
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("second_of_three_ranks")
def test_a_rank_reads_its_own_shards_without_the_others(either: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 over three ranks, of which only one runs. Sizes that three does not divide are cut unevenly."""
    full = our_model(either).state_dict()
    with torch.device("meta"):
        model = Transformer(read_model_config(either))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (3,)))
    model.to_empty(device="cpu")
    read = 0
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal read
        read += source.numel() * (not target.is_meta)  # names and shapes come from a model on meta
        return copy(target, source, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    load_hf_weights(model, either)
    for name, parameter in model.named_parameters():
        rows = full[name].chunk(3)
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.to_local(), rows[1]), name
    assert read < 0.4 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name_of_family", ["phi3", "gpt_oss", "qwen3_next"])
def test_any_part_of_a_parameter_is_read_from_its_tensor(name_of_family: str, tmp_path: Path) -> None:
    """As ranks read them that divide heads, columns or experts."""
    make_hf_model(name_of_family, tmp_path)
    full = our_model(tmp_path).state_dict()
    shapes = {name: tuple(value.shape) for name, value in full.items()}
    files = open_weights(tmp_path)
    family, contents = read_family(tmp_path)
    for name, place in places(contents, family, shapes).items():
        for part in ([slice(1, 3)], [slice(0, 2), slice(3, 8)], [slice(2, 4), slice(1, 6), slice(5, 7)]):
            own = part[: len(place.shape)]
            assert torch.equal(place.read(files, own), full[name][tuple(own)]), name


def test_weights_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """And parts of them, which begin anywhere."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 134, (3, 10, 2), dtype=torch.uint8, generator=generator)
    plain = torch.randn(4)
    save_file({"experts_blocks": blocks, "experts_scales": scales, "bias": plain}, tmp_path / SINGLE)
    files = open_weights(tmp_path)
    want = convert_moe_packed_tensors(blocks, scales)
    assert (files.names, files.shape("experts")) == ({"experts", "bias"}, tuple(want.shape))
    got = files.read("experts")
    assert (got.dtype, torch.equal(got, want)) == (torch.bfloat16, True)
    part = (slice(1, 3), slice(5, 40), slice(2, 9))
    assert torch.equal(files.read("experts", part), want[part])
    assert torch.equal(files.read("bias", [slice(1, 3)]), plain[1:3])
    save_file({"experts_blocks": blocks[..., :8].contiguous(), "experts_scales": scales}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"experts_blocks has shape \[3, 10, 2, 8\]"):
        open_weights(tmp_path).shape("experts")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_type", "deepseek_v3", "deepseek_v3"),
        ("attention_bias", True, "attention_bias"),
        ("use_sliding_window", True, "use_sliding_window"),
        ("layer_types", ["full_attention", "sliding_attention"], "sliding_attention"),
        ("layer_types", [], "layer_types has 0 entries"),
        ("hidden_act", "gelu", "hidden_act"),
        ("quantization_config", {"quant_method": "gptq"}, "quantization_config"),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}, "longrope"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 0.7}, "mscale"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ("hidden_size", "wide", "hidden_size"),
        ("num_hidden_layers", None, "layers"),
    ],
)
def test_what_our_transformer_cannot_be_is_named(
    folder: Path, tmp_path: Path, key: str, value: object, named: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError, match=named):
        read_model_config(tmp_path)


def test_weights_of_another_model_are_listed(folder: Path) -> None:
    config = read_model_config(folder)
    wrong = config.model_copy(update={"layers": 2, "intermediate_size": 80})
    with pytest.raises(CheckpointError) as error:
        load_hf_weights(Transformer(wrong), folder)
    for problem in ("layers.2.self_attn.q_proj.weight: the model", "mlp.up_proj.weight: has shape [64, 48]"):
        assert problem in str(error.value)


def test_a_tied_model_may_come_with_a_copy_of_its_embedding_but_with_no_other_output(tmp_path: Path) -> None:
    """transformers 5 computes with the other one: our logits would differ without a word."""
    make_hf_model("smollm2", tmp_path / "parts")
    weights = {
        name: value for file in (tmp_path / "parts").glob("*.safetensors") for name, value in load_file(file).items()
    }
    (tmp_path / "parts" / "config.json").rename(tmp_path / "config.json")
    output = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": output}, tmp_path / SINGLE)
    our_model(tmp_path)
    output[-1, -1] += 1
    save_file(weights | {"lm_head.weight": output}, tmp_path / SINGLE)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight.*set it to false"
    ):
        our_model(tmp_path)


def test_layers_that_predict_further_tokens_are_left_aside_by_name(tmp_path: Path) -> None:
    make_hf_model("qwen3_next", tmp_path / "parts")
    files = (tmp_path / "parts").glob("*.safetensors")
    weights = {name: value for file in files for name, value in load_file(file).items()}
    (tmp_path / "parts" / "config.json").rename(tmp_path / "config.json")
    save_file(weights | {"mtp.fc.weight": torch.zeros(2), "mtp.norm.weight": torch.zeros(2)}, tmp_path / SINGLE)
    our_model(tmp_path)
    (warning,) = HuggingFace().warnings(tmp_path, ())
    assert "2 tensors of" in warning
    assert "left aside, mtp.fc.weight and so on" in warning


@pytest.mark.parametrize("name", ["../secret.safetensors", "/tmp/secret.safetensors", "weights.bin", 3])
def test_an_index_cannot_lead_out_of_its_folder(folder: Path, tmp_path: Path, name: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match=INDEX):
        load_hf_weights(Transformer(read_model_config(folder)), tmp_path)


def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load_hf_weights(Transformer(read_model_config(folder)), tmp_path)


def test_the_page_of_models_has_a_row_for_every_architecture_that_these_tests_try() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "models.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(\w+)`[^|]*\| both \|", page, flags=re.MULTILINE)
    assert {*rows} == {family.architecture for family in MODEL_FAMILIES.values()}
    assert {*PUBLISHED} == {changes["model_type"] for changes in FAMILIES.values()}
