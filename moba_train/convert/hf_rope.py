"""Rotary embeddings of a Hugging Face `config.json` and of our `model.rope`."""

from typing import Any

from pydantic import ValidationError

from moba_train.config.explain import explain, given
from moba_train.config.model import RopeConfig
from moba_train.errors import CheckpointError
from moba_train.model.rope import attention_factor

_SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of config.json that hold the embedding. transformers 5 writes the second, and goes by the first if both are
there."""
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
    """Raises CheckpointError for keys that we have no counterpart of, unless they change nothing."""
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
    if not isinstance(sharpened, int | float) or not abs(sharpened - ours) <= 1e-6:
        raise CheckpointError(f"{section}.attention_factor is {given(sharpened)}, allowed: {ours} or none")


def hf_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a `config.json`; with yarn, transformers before 5 also goes by `hf_length`."""
    if rope.kind in ("none", "abf"):
        return {"rope_theta": rope.theta, "rope_scaling": None}
    rope_type = "linear" if rope.kind == "pi" else rope.kind
    values = rope.model_dump() | {"beta_fast": rope.fast_turns}
    scaling = {theirs: values[ours] for ours, theirs in _KEYS[rope_type].items()}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope_type} | scaling}


def hf_length(rope: RopeConfig, trained: int) -> int:
    """`max_position_embeddings` of a `config.json`, for a model whose last stage was `trained` tokens long.

    For yarn the length that it extends the model to, if that is more: transformers 4 takes this number over
    `original_max_position_embeddings` for the factor, and would rotate a model with a smaller one by other angles. One
    that was trained on longer sequences than that it reads with a larger factor all the same.
    """
    if rope.kind != "yarn" or rope.original_seq_len is None:
        return trained
    return max(trained, round(rope.factor * rope.original_seq_len))
