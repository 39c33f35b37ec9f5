"""Rotary embeddings of a Hugging Face `config.json` and of our `model.rope`."""

from typing import Any

from moba_train.config.model import RopeConfig
from moba_train.errors import CheckpointError
from moba_train.model.rope import attention_factor

_TURNS = {"yarn": ("beta_fast", "beta_slow"), "llama3": ("high_freq_factor", "low_freq_factor")}
"""Keys of our `beta_fast` and `beta_slow` in config.json, by rope type."""


def read_rope(config: dict[str, Any]) -> RopeConfig:
    """Rotary embedding of a `config.json`: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`.

    Raises CheckpointError for a rope type that we do not have; KeyError and ValidationError for unusable values.
    """
    values = {"rope_theta": config.get("rope_theta", 10_000.0)}
    values |= config.get("rope_scaling") or {}
    values |= config.get("rope_parameters") or {}
    rope_type = values.get("rope_type", values.get("type", "default"))
    theta = values["rope_theta"]
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"partial_rotary_factor is {values['partial_rotary_factor']!r}, allowed: 1.0")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type in ("linear", *_TURNS) and values["factor"] == 1:
        return RopeConfig(theta=theta)  # stretches nothing
    if rope_type == "linear":
        return RopeConfig(kind="pi", theta=theta, factor=values["factor"])
    if rope_type not in _TURNS:
        raise CheckpointError(f"rope_type is {rope_type!r}, allowed: default, linear, {', '.join(_TURNS)}")
    fast, slow = (values.get(name) for name in _TURNS[rope_type])
    original = values.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    rope = RopeConfig(
        kind=rope_type,
        theta=theta,
        factor=values["factor"],
        original_seq_len=original,
        beta_fast=fast,
        **({} if slow is None else {"beta_slow": slow}),
    )
    temperature = values.get("attention_factor")
    if rope_type == "yarn" and temperature is not None and abs(temperature - attention_factor(rope)) > 1e-6:
        raise CheckpointError(f"attention_factor is {temperature}, allowed: {attention_factor(rope)} or none")
    for key, allowed in {"mscale": None, "mscale_all_dim": None, "truncate": True}.items():
        if rope_type == "yarn" and values.get(key, allowed) != allowed:
            raise CheckpointError(f"{key} is {values[key]!r} in a yarn embedding, allowed: {allowed}")
    return rope.model_copy(update={"beta_fast": rope.fast_turns})


def hf_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a `config.json`; with yarn, transformers before 5 also goes by `hf_length`."""
    if rope.kind == "pi":
        return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": "linear", "factor": rope.factor}}
    if rope.kind not in _TURNS:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    fast, slow = _TURNS[rope.kind]
    scaling = {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_seq_len,
        fast: rope.fast_turns,
        slow: rope.beta_slow,
    }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def hf_length(rope: RopeConfig, trained: int) -> int:
    """`max_position_embeddings` of a `config.json`, for a model whose last stage was `trained` tokens long.

    For yarn the length that it extends the model to, if that is more: transformers 4 takes this number over
    `original_max_position_embeddings` for the factor, and would rotate a model with a smaller one by other angles. One
    that was trained on longer sequences than that it reads with a larger factor all the same.
    """
    if rope.kind != "yarn" or rope.original_seq_len is None:
        return trained
    return max(trained, round(rope.factor * rope.original_seq_len))
