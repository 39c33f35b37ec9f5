"""`config.json` of a Hugging Face model and our `model` section, rotary embeddings included.

Llama (also SmolLM2), Qwen2 and Qwen3.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moba_train.config.explain import explain, given
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.errors import CheckpointError
from moba_train.foreign_files import folder_roots, read_foreign_json
from moba_train.model.rope import attention_factor

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


def read_rope(config: dict[str, Any]) -> RopeConfig:
    """Rotary embedding of a `config.json`: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`.

    Raises CheckpointError, naming the key, for an embedding that we do not have and for unusable values.
    """
    section = next(filter(config.get, _SECTIONS), _SECTIONS[0])
    own = config.get(section) or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{section} is {given(own)}, allowed: an object, such as {{'rope_type': 'default'}}")
    rope_type = own.get("rope_type", own.get("type", "default"))
    if rope_type not in [*ROPE_KEYS]:
        raise CheckpointError(f"{section}.rope_type is {given(rope_type)}, allowed: {', '.join(ROPE_KEYS)}")
    # As transformers 5 does, which prefers this key outside of the section.
    lengths = (config.get(_TRAINED), own.get(_TRAINED), config.get("max_position_embeddings"))
    values = own | {_TRAINED: next((length for length in lengths if length is not None), None)}
    keys = ROPE_KEYS[rope_type]
    for key in ("factor", _TRAINED):
        if key in keys.values() and values.get(key) is None:
            raise CheckpointError(f"{section}.{key} is missing; rope_type {rope_type} needs it")
    try:
        rope = RopeConfig.model_validate(
            {
                "kind": {"default": "none", "linear": "pi"}.get(rope_type, rope_type),
                "theta": own.get("rope_theta", config.get("rope_theta", 10_000.0)),
                **{ours: values[theirs] for ours, theirs in keys.items() if values.get(theirs) is not None},
            }
        )
    except ValidationError as error:
        keys = keys | {"theta": "rope_theta"}
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
_REFUSED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}
"""Keys of config.json, and the only value that our Transformer implements."""


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of config.json in `folder`. Raises CheckpointError unless it is that of a Hugging Face model."""
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(f"{folder}: not a Hugging Face model: there is no {CONFIG}")
    try:
        config = read_foreign_json(path, roots=folder_roots(folder))
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError("there is no model_type")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a Hugging Face model's config ({error})") from error
    return config


def read_model_config(folder: Path) -> ModelConfig:
    """The `model` section for the Hugging Face model in `folder`.

    Raises CheckpointError, naming the key, for a model that our Transformer does not implement.
    """
    path = folder / CONFIG
    config = read_config(folder)
    model_type = config["model_type"]
    if model_type not in ARCHITECTURES:
        raise CheckpointError(f"{path}: model_type is {given(model_type)}, allowed: {', '.join(ARCHITECTURES)}")
    for key, allowed in _REFUSED.items():
        if config.get(key, allowed) != allowed:
            raise CheckpointError(f"{path}: {key} is {given(config[key])}, allowed: {allowed!r}")
    layer_types = config.get("layer_types") or []
    sliding = (
        [layer for layer in layer_types if layer != "full_attention"]
        if isinstance(layer_types, list)
        else [layer_types]
    )
    if sliding:
        raise CheckpointError(f"{path}: layer_types has {given(sliding[0])}, allowed: full_attention")
    values = {ours: config[theirs] for ours, theirs in SAME_VALUES.items() if config.get(theirs) is not None}
    values.setdefault("kv_heads", values.get("heads"))
    values.setdefault("norm_eps", 1e-6)  # the default of Hugging Face, not ours
    values |= {
        # Qwen3's default in transformers, whatever the hidden size.
        "head_dim": config.get("head_dim", 128 if model_type == "qwen3" else None),
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type == "qwen3",
    }
    try:
        return ModelConfig.model_validate(values | {"rope": read_rope(config)})
    except ValidationError as error:
        raise CheckpointError(f"{path}: {'; '.join(explain(error, ModelConfig, SAME_VALUES))}") from None
    except (ArithmeticError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}") from error
