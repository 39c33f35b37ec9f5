"""`config.json` of a Hugging Face model and our `model` section, rotary embeddings included.

Llama (also SmolLM2), Qwen2 and Qwen3.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moba_train.attention.kind import AttentionKind, parameter_count
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.explain import explain, given
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.errors import CheckpointError
from moba_train.foreign_files import folder_roots, read_foreign_json
from moba_train.model.build import build_attention
from moba_train.model.rope import attention_factor

_SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of config.json that hold the embedding. transformers 5 writes the second, and goes by the first if both are
given."""
_TRAINED = "original_max_position_embeddings"
_STRETCHED = {"factor": "factor", "original_seq_len": _TRAINED}
_KEYS: dict[str, dict[str, str]] = {
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
    if rope_type not in [*_KEYS]:
        raise CheckpointError(f"{section}.rope_type is {given(rope_type)}, allowed: {', '.join(_KEYS)}")
    # As transformers 5 does, which prefers this key outside of the section.
    lengths = (config.get(_TRAINED), own.get(_TRAINED), config.get("max_position_embeddings"))
    values = own | {_TRAINED: next((length for length in lengths if length is not None), None)}
    keys = _KEYS[rope_type]
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


def hf_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a `config.json`. With yarn, transformers before 5 also goes by `hf_length`."""
    if rope.kind in ("none", "abf"):
        return {"rope_theta": rope.theta, "rope_scaling": None}
    rope_type = "linear" if rope.kind == "pi" else rope.kind
    values = rope.model_dump() | {"beta_fast": rope.fast_turns}
    scaling = {theirs: values[ours] for ours, theirs in _KEYS[rope_type].items()}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope_type} | scaling}


def hf_length(rope: RopeConfig, trained: int) -> int:
    """`max_position_embeddings` of a `config.json`, for a model whose last stage was `trained` tokens long.

    With yarn it is the length that the model is extended to, if that is more: transformers 4 takes this number over
    `original_max_position_embeddings` as the factor, and with a smaller number would rotate by other angles. A model
    that was trained on longer sequences gets a larger factor from transformers 4 in any case.
    """
    if rope.kind != "yarn" or rope.original_seq_len is None:
        return trained
    return max(trained, round(rope.factor * rope.original_seq_len))


CONFIG = "config.json"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_SAME = {
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
    if model_type not in _ARCHITECTURES:
        raise CheckpointError(f"{path}: model_type is {given(model_type)}, allowed: {', '.join(_ARCHITECTURES)}")
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
    values = {ours: config[theirs] for ours, theirs in _SAME.items() if config.get(theirs) is not None}
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
        raise CheckpointError(f"{path}: {'; '.join(explain(error, ModelConfig, _SAME))}") from None
    except (ArithmeticError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def hf_config(model: ModelConfig, rope: RopeConfig, max_length: int, dtype: str) -> dict[str, Any]:
    """Contents of `config.json` for `model` with `rope`, trained on sequences of `max_length` tokens.

    Raises CheckpointError for a shape that no Hugging Face architecture has.
    """
    if model.qk_norm and model.qkv_bias:
        raise CheckpointError("model.qk_norm and model.qkv_bias: both given; Hugging Face has no such architecture")
    model_type = "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"
    if model_type == "llama" and model.hidden_size % model.heads:
        raise CheckpointError(
            f"model.heads: given {model.heads}; allowed in an export as {_ARCHITECTURES[model_type]}: a divisor of "
            f"model.hidden_size ({model.hidden_size}), because transformers refuses other models of this architecture"
        )
    return {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        **{theirs: getattr(model, ours) for ours, theirs in _SAME.items()},
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": hf_length(rope, max_length),
        **hf_rope(rope),
        # Newer releases of transformers read the first, older ones the second.
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def read_layers(folder: Path) -> dict[str, Any]:
    """`attention` section of a recipe: the layers in config.json's entry `moba`, and full attention in others.

    The section's default is the attention of most layers, so that a recipe that extends it can give them another kind.
    """
    model = read_model_config(folder)
    moba = read_config(folder).get("moba") or {}
    entries = moba.get("layers", []) if isinstance(moba, dict) else None
    if not isinstance(entries, list) or len(entries) > model.layers:
        raise CheckpointError(
            f"{folder / CONFIG}: moba is {given(moba)}; allowed: {{'layers': a list of at most {model.layers} entries}}"
        )
    layers = [layer_entry(kind) for kind in build_attention(map(parse_layer, entries), model.head_width)]
    layers += [{"kind": "full"}] * (model.layers - len(layers))
    common = max(layers, key=layers.count)
    options = {key: value for key, value in common.items() if key != "kind"}
    overrides = {layer: entry for layer, entry in enumerate(layers) if entry != common}
    return {"default": common["kind"], "overrides": overrides} | ({common["kind"]: options} if options else {})


def layer_entry(kind: AttentionKind) -> dict[str, Any]:
    """A layer's entry in an exported config.json, as JSON values: what decides which keys it attends to."""
    return {"kind": kind.name, **kind.options.model_dump(mode="json", exclude=set(kind.facts.not_exported))}


def layer_problem(kind: AttentionKind, model: ModelConfig) -> str:
    """What an exported model would lose of a layer: its kind's parameters; empty if it has none."""
    count = parameter_count(kind, model)
    if not count:
        return ""
    return f"kind {kind.name!r} has {count} parameters in a layer, which no Hugging Face architecture can hold"


def parse_layer(entry: dict[str, Any]) -> LayerAttention:
    """Attention of a layer from its entry by `layer_entry`. Raises CheckpointError for other entries."""
    try:
        options = KINDS[entry["kind"]].Options
        return LayerAttention(
            entry["kind"], options.model_validate({key: value for key, value in entry.items() if key != "kind"})
        )
    except ValidationError as error:
        raise CheckpointError(f"{CONFIG}: moba.layers: {'; '.join(explain(error, options))}") from None
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{CONFIG}: moba.layers: {given(entry)} is no entry of the kinds {', '.join(KINDS)}"
        ) from error
