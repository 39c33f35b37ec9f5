"""Keys that a config.json leaves out, or gives as null, have the value that transformers gives them."""

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.model.rope import rope_frequencies
from moba_train.tools.hf.config import read_family, read_length, read_model_config
from moba_train.tools.hf.family import family_of
from tests.attention.helpers import labelled
from tests.tools.convert.hf_models import PUBLISHED

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.01,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}


def assert_read_as_transformers_reads_it(folder: Path, config: dict[str, Any], refused: bool = False) -> None:
    """`refused`: transformers may refuse it; then we may, or read it in another way."""
    # Late: every process that collects tests would take a second for these.
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(config))
    try:
        theirs = AutoConfig.from_pretrained(folder)
    except StrictDataclassError:
        assert refused
        return
    ours = read_model_config(folder)
    family, read = read_family(folder)
    for key, name in family.same.items():
        assert getattr(ours, key) == getattr(theirs, name), key
    assert ours.head_width == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert read["max_position_embeddings"] == theirs.max_position_embeddings
    if getattr(theirs, "head_dim", 1) is not None:
        assert_turns_as_in_transformers(ours, theirs)


def assert_turns_as_in_transformers(ours: ModelConfig, theirs: Any) -> None:
    """Layer by layer. Some families have an embedding for each of their types of layers."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

    by_type = theirs.rope_parameters
    types = theirs.layer_types if "full_attention" in by_type else [None] * ours.layers
    for layer, (rope, name) in enumerate(zip(ours.rope.by_layer(ours.layers), types, strict=True)):
        flat = copy.copy(theirs)
        flat.rope_parameters = by_type if name is None else by_type[name]
        if rope.kind != "nope" and flat.rope_parameters["rope_theta"] is not None:
            partly = {"phi3": Phi3RotaryEmbedding, "qwen3_next": Qwen3NextRotaryEmbedding}
            rotary = partly.get(theirs.model_type, LlamaRotaryEmbedding)
            found = rope_frequencies(rope, ours.head_width).float()
            torch.testing.assert_close(found, rotary(flat).inv_freq, msg=labelled(f"layer {layer}"))


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_each_default_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = SMALL | {"model_type": model_type}
    if model_type == "phi3":  # which takes yarn for longrope
        del config["rope_scaling"]
    known = {field.name for field in fields(type(AutoConfig.for_model(model_type)))}
    keys = known | {*SMALL, "head_dim", "sliding_window", "quantization_config"}
    for key in sorted(keys - {*family_of(model_type).sizes()}):
        assert_read_as_transformers_reads_it(tmp_path, {name: config[name] for name in config if name != key})
        # Of a model without them transformers can make no model, or no mask.
        if key != "rope_theta" and not (
            key == "sliding_window" and model_type in ("olmo3", "gemma2", "gemma3_text", "gpt_oss")
        ):
            assert_read_as_transformers_reads_it(tmp_path, config | {key: None}, refused=True)
    for key in config.get("rope_scaling", {}).keys() - {"rope_type"}:
        rest = {name: value for name, value in config["rope_scaling"].items() if name != key}
        assert_read_as_transformers_reads_it(tmp_path, config | {"rope_scaling": rest | {key: None}}, refused=True)
        if key != "factor":  # transformers asks for it, and takes null
            assert_read_as_transformers_reads_it(tmp_path, config | {"rope_scaling": rest})


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_transformers_writes_every_size_and_a_config_without_one_is_refused(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = family_of(model_type).sizes()
    assert {*sizes} <= AutoConfig.for_model(model_type).to_diff_dict().keys()
    for size in sizes:
        config = {key: value for key, value in SMALL.items() if key != size} | {"model_type": model_type}
        for value in ({}, {size: None}):
            (tmp_path / "config.json").write_text(json.dumps(config | value))
            with pytest.raises(CheckpointError, match=f"config.json: {size} is missing, allowed: "):
                read_model_config(tmp_path)


def test_llama_1_has_the_length_that_transformers_reads(tmp_path: Path) -> None:
    config = {key: value for key, value in SMALL.items() if key not in ("max_position_embeddings", "rope_scaling")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama", "max_sequence_length": 2048}))
    assert read_length(tmp_path) == 2048


@pytest.mark.parametrize("model_type", PUBLISHED)
@pytest.mark.parametrize(
    "key", ["attention_bias", "mlp_bias", "use_sliding_window", "tie_word_embeddings", "layer_types"]
)
def test_null_is_no_value_also_where_transformers_5_is_stricter_than_4(
    model_type: str, key: str, tmp_path: Path
) -> None:
    config = {name: value for name, value in SMALL.items() if name not in (key, "rope_scaling")}
    config["model_type"] = model_type
    (tmp_path / "config.json").write_text(json.dumps(config | {key: None}))
    (tmp_path / "left_out").mkdir()
    (tmp_path / "left_out" / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path) == read_model_config(tmp_path / "left_out")


def test_a_number_that_is_null_is_refused_as_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama", "rms_norm_eps": None}))
    with pytest.raises(CheckpointError, match="rms_norm_eps: given null; allowed: "):
        read_model_config(tmp_path)
