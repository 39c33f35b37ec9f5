"""Families of published models go in and out without a change of a bit, and what their configs
say is read, refused or listed."""

import json
from inspect import getfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.errors import CheckpointError
from moba_train.registry import MODEL_FAMILIES
from moba_train.tools.convert.hf import export_to_hf, import_from_hf, imported_recipe
from moba_train.tools.convert.hf_export import hf_config
from moba_train.tools.evaluated_recipe import EvaluationOptions, open_for_evaluation
from moba_train.tools.hf.config import read_family, read_model_config
from moba_train.tools.hf.family import Family
from moba_train.tools.hf.files import SINGLE
from moba_train.tools.inference.generate import generate
from moba_train.tools.saved_recipe import load_trained, open_checkpoint
from tests.tools.convert.hf_models import (
    FAMILIES,
    PUBLISHED,
    logits,
    make_hf_model,
    our_model,
    random_tokens,
    save_as_checkpoint,
    sized,
)
from tests.tools.convert.test_hf_defaults import assert_turns_as_in_transformers
from tests.tools.convert.test_hf_export import SPARSE, tensors
from tests.tools.convert.test_with_code import loaded_here

WINDOW = {"kind": "window", "window": 24, "sinks": 0}
GDN = {"kind": "gdn", "heads": {"keys": 2, "values": 6, "width": 8}}
CAPPED = {"kind": "capped", "cap": 2.0, "window": None}
ATTENTION: dict[str, list[dict[str, Any]]] = {
    "mistral": [WINDOW] * 3,
    "ministral": [WINDOW, {}, WINDOW],
    "olmo3": [WINDOW, WINDOW, WINDOW, {}],
    "gemma2": [CAPPED | {"window": 24}, CAPPED, CAPPED | {"window": 24}],
    "gemma3": [WINDOW, WINDOW, {}],
    "phi3": [WINDOW] * 3,
    "mixtral_windows": [WINDOW] * 3,
    "gpt_oss": [WINDOW, {}, WINDOW],
    "qwen3_next": [GDN, GDN, GDN, {}],
}
"""Attention of each layer of the models in hf_models.py that have windows."""
NOT_BY_CODE = {"gemma2": "kind 'capped'", "phi3_long": "model.rope", "qwen3_next": "model.bare_layers"}
"""Families that the code of an export refuses, and what of."""


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A family, a Hugging Face folder, and what our checkpoint of it was exported to."""
    folder = tmp_path_factory.mktemp(request.param)
    make_hf_model(request.param, folder / "hf")
    save_as_checkpoint(folder / "hf", folder / "run", SPARSE, None)
    export_to_hf(open_checkpoint(folder / "run"), folder / "out", torch.float32, shard_bytes=40_000)
    return request.param, folder / "hf", folder / "out"


def test_import_and_export_give_back_every_bit_and_the_model(exported: tuple[str, Path, Path]) -> None:
    name, before, after = exported
    theirs = tensors(before)
    ours = tensors(after)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    assert read_model_config(before) == read_model_config(after)
    for folder in (before, after):
        family, config = read_family(folder)
        assert family.attention(config) == ATTENTION.get(name, [{}] * 3)
        assert family.unread(config) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_in_bfloat16_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    make_hf_model(name, tmp_path / "hf")
    theirs = {key: value.bfloat16() for key, value in tensors(tmp_path / "hf").items()}
    for path in (tmp_path / "hf").glob("*.safetensors*"):
        path.unlink()
    save_file(theirs, tmp_path / "hf" / SINGLE)
    import_from_hf(tmp_path / "hf", tmp_path / "run")
    export_to_hf(open_checkpoint(tmp_path / "run"), tmp_path / "out", torch.bfloat16, shard_bytes=2**30)
    ours = tensors(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].dtype == torch.bfloat16 and torch.equal(ours[key], theirs[key]) for key in theirs)


def test_transformers_computes_with_the_export_what_it_did_before(exported: tuple[str, Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    tokens = random_tokens(200)[None]
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in exported[1:]]
    with torch.no_grad():
        first, second = (model(tokens).logits for model in models)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert type(models[0]) is type(models[1])


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "qwen3_next"])
def test_it_continues_a_text_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Also by default, where new tokens of MoBA attend to everything: windows belong to the model."""
    theirs = make_hf_model(name, tmp_path)
    prompt = random_tokens(60)
    mask = torch.ones_like(prompt[None])
    expected = theirs.generate(prompt[None], attention_mask=mask, max_new_tokens=20, do_sample=False)[0, 60:]
    found = [*generate(our_model(tmp_path), prompt.tolist(), 20, temperature=0.0)]
    assert found == expected.tolist()


def test_transformers_runs_the_export_with_its_layers(exported: tuple[str, Path, Path], tmp_path: Path) -> None:
    """By the code of an export: MoBA where it was trained with it, windows elsewhere."""
    saved = open_checkpoint(exported[2].parent / "run")
    if exported[0] in NOT_BY_CODE:
        with pytest.raises(CheckpointError, match=NOT_BY_CODE[exported[0]]):
            export_to_hf(saved, tmp_path, torch.float32, shard_bytes=2**30, with_code=True)
        return
    export_to_hf(saved, tmp_path, torch.float32, shard_bytes=2**30, with_code=True)
    tokens = random_tokens(90)
    with torch.no_grad():
        got = loaded_here(tmp_path)(tokens[None]).logits[0]
    want = logits(load_trained(saved, torch.device("cpu"), torch.float64), tokens)
    assert (got - want).abs().max() / want.abs().max() < 1e-10


def test_an_imported_recipe_has_the_windows_of_the_model(tmp_path: Path) -> None:
    make_hf_model("ministral", tmp_path)
    attention = imported_recipe(tmp_path, tmp_path).attention
    assert (attention.default, attention.overrides) == ("window", {1: {"kind": "full"}})
    assert attention.options_of("window").model_dump()["window"] == 24


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
V4_AND_V5: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3_text": (
        {
            "rope_theta": 2e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 2e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
            },
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "olmo3": (
        {"rope_theta": 7e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "max_position_embeddings": 64},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 7e5, "rope_type": "yarn", "factor": 8.0},
                "sliding_attention": {"rope_theta": 7e5, "rope_type": "default"},
            },
            "max_position_embeddings": 64,
        },
    ),
    "smollm3": (
        {"rope_theta": 7e5, "no_rope_layers": [1, 0, 1, 1]},
        {"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}, "no_rope_layers": [1, 0, 1, 1]},
    ),
    "mistral": (
        {"rope_theta": 7e5, "sliding_window": None},
        {"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}, "sliding_window": None},
    ),
    "qwen3_next": (
        {"rope_theta": 7e5, "partial_rotary_factor": 0.5, "full_attention_interval": 2},
        {
            "rope_parameters": {"rope_theta": 7e5, "partial_rotary_factor": 0.5, "rope_type": "default"},
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "gpt_oss": (
        {
            "rope_theta": 7e5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        },
        {"rope_theta": 7e5},
    ),
    "phi3": (
        {"rope_theta": 7e5, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 7e5, "partial_rotary_factor": 0.5, "rope_type": "default"}},
    ),
}
"""By model_type: one config as transformers 4 writes it, and as 5 does."""


@pytest.mark.parametrize("model_type", V4_AND_V5)
def test_configs_of_both_versions_of_transformers_are_one_model(model_type: str, tmp_path: Path) -> None:
    """A base that is not found where the other version has it has raised perplexities a thousandfold elsewhere."""
    found = []
    for changes in V4_AND_V5[model_type]:
        config = sized(model_type) | {"num_hidden_layers": 4} | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        family, read = read_family(tmp_path)
        found.append((read_model_config(tmp_path), family.attention(read), family.unread(read)))
    assert found[0] == found[1]
    bases = {rope.theta for rope in found[0][0].rope.by_layer(4)}
    assert bases == ({2e6, 2e4} if model_type == "gemma3_text" else {7e5})


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("olmo3", {"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types\[1\] is 'chunked_attention'"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("olmo3", {"rope_scaling": 2}, "rope_scaling is 2, allowed: an object"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": 2}},
            r"rope_parameters\.full_attention is 2",
        ),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": YARN | {"truncate": False}}},
            r"sliding_attention\.truncate is false, allowed in this family: true",
        ),
        ("olmo3", {"rope_parameters": {"rope_theta": 777.0}}, "rope_parameters is .* full_attention and sliding_att"),
        ("gemma3_text", {"sliding_window_pattern": "x"}, "sliding_window_pattern is 'x', allowed: integer"),
        ("ministral", {"layer_types": 1}, r"layer_types\[0\] is 1"),
        ("smollm3", {"layer_types": 1}, r"layer_types\[0\] is 1"),
        ("olmo3", {"sliding_window": None}, "sliding_window is null, but layer 0 is sliding_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, allowed: number > 0"),
        ("granite", {"mlp_bias": True}, "mlp_bias is true"),
        ("granite", {"residual_multiplier": -1.0}, "residual_multiplier: given -1"),
        ("mistral", {"rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers is .*a list of 2 numbers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "allowed in this family: default, longrope"),
        ("phi3", {"rope_scaling": {"type": "yarn"}}, "short_factor is missing; rope_type longrope"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 3, "long_factor": [1.0] * 48}},
            r"model\.rope\.short_factors: given 3 numbers; allowed: 48",
        ),
        ("qwen3_next", {"linear_value_head_dim": 64}, "linear_value_head_dim is 64"),
        ("qwen3_next", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3, allowed: 4"),
        (
            "qwen3_next",
            {"shared_expert_intermediate_size": 500},
            "shared_expert_intermediate_size is 500",
        ),
        ("qwen3_next", {"layer_types": ["linear_attention", "sliding"]}, r"layer_types\[1\] is 'sliding'"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("qwen3_next", {"linear_num_key_heads": 5}, "layer 0: heads: values: given 32; allowed: multiples of keys, 5"),
        ("gpt_oss", {"sliding_window": 0}, "attention of layer 0: window: given 0"),
        (
            "minimax_m3_vl_text",
            {"mlp_layer_types": ["dense"] * 2, "sparse_attention_config": {"sparse_topk_blocks": 8}},
            "sparse_attention_config is",
        ),
        ("phi3", {"embd_pdrop": 0.1}, "embd_pdrop is 0.1"),
        ("mixtral", {"num_local_experts": 1}, "num_local_experts: given 1; allowed: integer >= 2"),
        ("mixtral", {"num_experts_per_tok": 9}, "active: given 9; allowed: at most experts, 8"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("qwen3_moe", {"num_local_experts": "many"}, "num_local_experts: given 'many'"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size: given 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob: given 1"),
        ("qwen3_moe", {"router_aux_loss_coef": -1.0}, "router_aux_loss_coef: given -1"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias is false, allowed: True"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, r"swiglu_alpha is 1\.0, allowed: 1\.702"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit: given 0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is "),
        ("gpt_oss", {"num_experts_per_tok": 200}, "active: given 200"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("llama", {"is_causal": False}, "is_causal is false, allowed: True"),
        ("gemma3_text", {"is_causal": False}, "is_causal is false, allowed: True"),
        ("qwen3", {"is_causal": None}, "is_causal is null, allowed: True"),
        ("mistral", {"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config is .* allowed: None"),
    ],
)
def test_what_changes_the_function_is_refused_by_its_key(
    model_type: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = sized(model_type) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        read_model_config(tmp_path)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_a_key_that_nothing_reads_is_listed(model_type: str, tmp_path: Path) -> None:
    config = sized(model_type) | {"rms_norm_eps": 1e-5, "eos_token_id": 2, "attention_chunks": 3, "mu": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    family, read = read_family(tmp_path)
    assert family.unread(read) == ["attention_chunks"]


BY_TYPE = {"full_attention": {"rope_theta": 777.0}, "sliding_attention": {"rope_theta": 55.0, "factor": 2.0}}


@pytest.mark.parametrize(
    ("model_type", "said", "unread"),
    [
        ("llama", {"rope_scaling": {"factor": 4.0}}, ["rope_scaling.factor"]),
        ("llama", {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e3}, ["rope_theta"]),
        ("llama", {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5}, []),
        ("llama", {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, ["rope_parameters.factor"]),
        ("llama", {"rope_scaling": YARN, "rope_parameters": YARN}, []),
        ("llama", {"rope_scaling": YARN, "rope_parameters": 1}, ["rope_parameters"]),
        (
            "qwen3",
            {"rope_scaling": YARN | {"attention_factor": None, "low_freq_factor": 1.0}},
            ["rope_scaling.low_freq_factor"],
        ),
        ("olmo3", {"rope_parameters": BY_TYPE}, ["rope_parameters.sliding_attention.factor"]),
        ("olmo3", {"sliding_window_pattern": 2}, ["sliding_window_pattern"]),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}}, []),
        ("mixtral", {"layer_types": ["sliding_attention"] * 2}, ["layer_types"]),
        ("mistral", {"layer_types": ["full_attention"] * 2}, []),
        ("llama", {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "modeling.Llama"}}, []),
        ("llama", {"architectures": ["OurLlama"], "auto_map": {"AutoModel": "m.X"}}, ["architectures", "auto_map"]),
    ],
)
def test_what_changes_nothing_is_listed_by_its_key(
    model_type: str, said: dict[str, Any], unread: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sized(model_type) | said))
    read_model_config(tmp_path)
    family, config = read_family(tmp_path)
    assert family.unread(config) == unread


def test_commands_that_read_a_folder_list_such_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_hf_model("llama2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_chunks": 3}))
    open_for_evaluation(tmp_path, EvaluationOptions())
    assert "Nothing reads attention_chunks of " in caplog.text


@pytest.mark.parametrize(
    ("model_type", "said", "thetas"),
    [
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_theta": 777.0}}}, {777.0, 5e5}),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": 777.0}}}, {777.0, 1e6}),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, {1e4, 1e6}),
        ("olmo3", {"sliding_window_pattern": 2}, {5e5}),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"] * 4}, {1e4}),
        ("phi3", {"rope_scaling": {"rope_theta": 5e5}, "rope_parameters": {"partial_rotary_factor": 0.5}}, {5e5}),
        ("gpt_oss", {"rope_parameters": {}}, {1.5e5}),
    ],
)
def test_sections_that_are_not_complete_are_read_as_in_transformers(
    model_type: str, said: dict[str, Any], thetas: set[float], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(sized(model_type) | {"num_hidden_layers": 8} | said))
    ours = read_model_config(tmp_path)
    family, config = read_family(tmp_path)
    assert {rope.theta for rope in ours.rope.by_layer(8)} == thetas
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert [entry.get("window") for entry in family.attention(config)] == [
        theirs.sliding_window if name == "sliding_attention" else None
        for name in getattr(theirs, "layer_types", ["full_attention"] * 8)
    ]
    assert_turns_as_in_transformers(ours, theirs)


@pytest.mark.parametrize("name", ["olmo3", "gemma2", "gemma3", "gpt_oss", "smollm3", "phi3", "ministral"])
def test_an_export_without_windows_and_tokenizer_runs_in_transformers(name: str, tmp_path: Path) -> None:
    """Such as one with MoBA in all layers: transformers makes a mask of windows for some families in any case, and
    looks for the row that the default of `pad_token_id` names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_hf_model(name, tmp_path / "hf")
    model = read_model_config(tmp_path / "hf")
    overrides = model.rope.overrides if name == "smollm3" else {}  # others turn by windows
    contents = hf_config(model, model.rope.model_copy(update={"overrides": overrides}), 256, "float32")
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**contents))
    assert theirs(random_tokens(40)[None]).logits.isfinite().all()


def test_a_family_is_one_file_of_at_most_120_lines() -> None:
    """Beyond the base of all, which has Llama's and Qwen's as well."""
    files = {Path(getfile(MODEL_FAMILIES[name])) for name in MODEL_FAMILIES} - {Path(getfile(Family))}
    assert {file.name: lines for file in files if (lines := len(file.read_text().splitlines())) > 120} == {}


def test_a_model_that_no_architecture_has_is_refused_by_its_keys() -> None:
    shape = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "layers": 2, "heads": 6, "kv_heads": 2}
    for changes, said in (
        ({"sink_layers": "all"}, r"model\.sink_layers: no Hugging Face architecture"),
        ({"gate_layers": "last:1", "residual_scale": 0.5}, r"model\.gate_layers: no Hugging Face architecture"),
        ({"residual_scale": 0.5, "qk_norm": True}, "qwen3 comes nearest, where residual_scale is 1.0, not 0.5"),
        ({"rope": RopeConfig(overrides={0: {"theta": 5.0}})}, r"model\.rope: no Hugging Face architecture"),
    ):
        model = ModelConfig.model_validate(shape | changes)
        with pytest.raises(CheckpointError, match=said):
            hf_config(model, model.rope, 256, "float32")
