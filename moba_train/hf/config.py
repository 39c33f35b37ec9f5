"""`config.json` of a Hugging Face model and our `model` section, rotary embeddings included.

Llama (also SmolLM2), Qwen2 and Qwen3, and those of registered feed-forwards (Qwen3-MoE and Mixtral).
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moba_train.config.explain import explain, given
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.errors import CheckpointError
from moba_train.foreign_files import folder_roots, read_foreign_json
from moba_train.model.rope import attention_factor
from moba_train.registry import FEED_FORWARDS

_SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of config.json that hold the embedding. transformers 5 writes the second, and goes by the first if both are
given."""
_TRAINED = "original_max_position_embeddings"
_STRETCHED = {"factor": "factor", "original_seq_len": _TRAINED}
ROPE_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "yarn": _STRETCHED | {"beta_fast": "beta_fast", "beta_slow": "beta_slow"},
    "llama3": _STRETCHED | {"beta_fast": "high_freq_factor", "beta_slow": "low_freq_factor"},
}
"""Keys of our `model.rope`, and those of config.json with the same values, by rope type."""
_NOT_HERE = {
    "dynamic": ". Its frequencies change with the length of each input, which model.rope cannot say; if none is longer "
    "than max_position_embeddings, it is the same as default",
    "longrope": ". It has a factor for each frequency, and others for short inputs, which model.rope cannot say",
}
"""Types of transformers that a model of these families may have: reasons why they are refused."""


def read_rope(config: dict[str, Any]) -> RopeConfig:
    """Rotary embedding of a `config.json`: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`.

    config: with the values that it leaves out, as `read_config` returns it

    Raises CheckpointError, naming the key, for an embedding that we do not have and for unusable values.
    """
    section = next(filter(config.get, _SECTIONS), _SECTIONS[0])
    own = config.get(section) or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{section} is {given(own)}, allowed: an object, such as {{'rope_type': 'default'}}")
    own = {key: value for key, value in own.items() if value is not None}
    rope_type = own.get("rope_type", own.get("type", "default"))
    if rope_type not in [*ROPE_KEYS]:
        needed = _NOT_HERE.get(str(rope_type), "")
        raise CheckpointError(f"{section}.rope_type is {given(rope_type)}, allowed: {', '.join(ROPE_KEYS)}{needed}")
    # As transformers 5 does, which prefers this key outside of the section.
    longest = config["max_position_embeddings"]
    trained = config.get(_TRAINED, own.get(_TRAINED, longest))
    values = {"rope_theta": config["rope_theta"], **own, _TRAINED: trained}
    if rope_type == "yarn" and "factor" not in own and type(trained) is type(longest) is int and trained > 0:
        values["factor"] = longest / trained
    keys = {"theta": "rope_theta"} | ROPE_KEYS[rope_type]
    for key in ("factor", _TRAINED):
        if key in keys.values() and values.get(key) is None:
            raise CheckpointError(f"{section}.{key} is missing; rope_type {rope_type} needs it")
    kind = {"default": "none", "linear": "pi"}.get(rope_type, rope_type)
    try:
        rope = RopeConfig.model_validate(
            {"kind": kind} | {ours: values[theirs] for ours, theirs in keys.items() if theirs in values}
        )
    except ValidationError as error:
        places = {ours: f"{section}.{theirs}" if theirs in own else theirs for ours, theirs in keys.items()}
        raise CheckpointError("; ".join(explain(error, RopeConfig, places))) from None
    _check_fixed_values(section, own, rope)
    if rope.factor == 1:
        return RopeConfig(theta=rope.theta)
    return rope if rope.kind == "pi" else rope.model_copy(update={"beta_fast": rope.fast_turns})


def _check_fixed_values(section: str, own: dict[str, Any], rope: RopeConfig) -> None:
    """Raise CheckpointError for keys without a counterpart in our model, unless they change nothing."""
    allowed: dict[str, object] = {"partial_rotary_factor": 1.0}
    if rope.kind == "yarn" and rope.factor != 1:
        allowed |= {"mscale": None, "mscale_all_dim": None, "truncate": True}
    for key, value in allowed.items():
        if own.get(key, value) != value:
            raise CheckpointError(f"{section}.{key} is {given(own[key])}, allowed: {value}")
    sharpened = own.get("attention_factor")
    if rope.kind != "yarn" or sharpened is None:
        return
    ours = attention_factor(rope)
    # Not `> 1e-6`, which NaN is not.
    if not isinstance(sharpened, int | float) or not abs(sharpened - ours) <= 1e-6:
        raise CheckpointError(f"{section}.attention_factor is {given(sharpened)}, allowed: {ours} or none")


CONFIG = "config.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

SAME_VALUES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
"""Our keys, and those of config.json with equal values."""
_FIXED = ("hidden_act", "attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
"""Keys of config.json of whose values our Transformer implements the default alone."""
_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10_000.0,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), False),
    "hidden_act": "silu",
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
DEFAULTS: dict[str, dict[str, Any]] = {"llama": _LLAMA, "qwen2": _QWEN2, "qwen3": _QWEN2 | {"head_dim": 128}}
"""Values that transformers gives to keys which a config.json leaves out, by model_type; None: no value."""


def registered_forms() -> dict[str, tuple[str, Any]]:
    """Name and Hugging Face form of the registered feed-forward of each further model_type."""
    kinds = FEED_FORWARDS.usable()
    return {model_type: (name, kind.hf) for name, kind in kinds.items() if kind.hf for model_type in kind.hf.LIKE}


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of config.json in `folder`, with `DEFAULTS` for keys that it leaves out. Null counts as left out, except
    for numbers, where transformers also refuses it.

    Raises CheckpointError unless it is that of a Hugging Face model of a type that our Transformer implements.
    """
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(f"{folder}: not a Hugging Face model: there is no {CONFIG}")
    try:
        config = read_foreign_json(path, roots=folder_roots(folder))
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError("there is no model_type")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a Hugging Face model's config ({error})") from error
    model_type = config["model_type"]
    forms = registered_forms()
    if model_type in forms:
        _, form = forms[model_type]
        defaults = DEFAULTS[form.LIKE[model_type]] | form.DEFAULTS[model_type]
    elif model_type in ARCHITECTURES:
        defaults = DEFAULTS[model_type]
    else:
        allowed = ", ".join([*ARCHITECTURES, *forms])
        raise CheckpointError(f"{path}: model_type is {given(model_type)}, allowed: {allowed}")
    numbers = {key for key, value in defaults.items() if type(value) in (int, float)}
    config = defaults | {key: value for key, value in config.items() if value is not None or key in numbers}
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def read_model_config(folder: Path) -> ModelConfig:
    """The `model` section for the Hugging Face model in `folder`.

    Raises CheckpointError, naming the key, for a model that our Transformer does not implement.
    """
    path = folder / CONFIG
    config = read_config(folder)
    model_type = config["model_type"]
    name, form = registered_forms().get(model_type, ("", None))
    model_type = form.LIKE[model_type] if form else model_type
    for key in _FIXED:
        if config.get(key) != (allowed := DEFAULTS[model_type].get(key)):
            raise CheckpointError(f"{path}: {key} is {given(config[key])}, allowed: {allowed!r}")
    layer_types = config.get("layer_types", [])
    for kind in layer_types if isinstance(layer_types, list) else [layer_types]:
        if kind != "full_attention":
            raise CheckpointError(f"{path}: layer_types has {given(kind)}, allowed: full_attention")
    values = {ours: config[theirs] for ours, theirs in SAME_VALUES.items()} | {
        "head_dim": config.get("head_dim"),
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type == "qwen3",
    }
    try:
        if form:
            values[name] = form.section(config)
        return ModelConfig.model_validate(values | {"rope": read_rope(config)})
    except ValidationError as error:
        raise CheckpointError(f"{path}: {'; '.join(explain(error, ModelConfig, SAME_VALUES))}") from None
    except (ArithmeticError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}") from error
