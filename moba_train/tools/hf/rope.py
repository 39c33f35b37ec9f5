"""Rotary embedding of a Hugging Face model's `config.json`."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from moba_train.config.explain import explain, given
from moba_train.config.model import RopeConfig
from moba_train.errors import CheckpointError
from moba_train.model.rope import attention_factor

ROPE_SECTIONS = ("rope_scaling", "rope_parameters")
"""Keys of config.json that hold the embedding. transformers 5 writes the second, and goes by the first if both are
given."""
TRAINED = "original_max_position_embeddings"
_STRETCHED = {"factor": "factor", "original_seq_len": TRAINED}
ROPE_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "yarn": _STRETCHED | {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "truncate": "truncate"},
    "longrope": _STRETCHED | {"short_factors": "short_factor", "long_factors": "long_factor"},
    "llama3": _STRETCHED | {"beta_fast": "high_freq_factor", "beta_slow": "low_freq_factor"},
}
"""Keys of our `model.rope`, and those of config.json with the same values, by rope type."""
_SHARPENED = {"mscale", "mscale_all_dim", "attention_factor"}
_READ = {"rope_type", "type", "rope_theta", TRAINED, "partial_rotary_factor"} | _SHARPENED
_READ = _READ.union(*(keys.values() for keys in ROPE_KEYS.values()))
"""All keys of the section that are read for some type; others have no effect, or one that model.rope cannot say."""
_NOT_HERE = {
    "dynamic": ". Its frequencies change with the length of each input, which model.rope cannot say; if none is longer "
    "than max_position_embeddings, it is the same as default",
}
"""Types of transformers that a model of these families may have: reasons why they are refused."""


def read_rope(config: Mapping[str, Any], fraction: float = 1.0) -> RopeConfig:
    """Rotary embedding of a `config.json`: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`.

    config: with the values that it leaves out, as `hf.config.read_family` returns it
    fraction: of each head that turns, which the family has read

    Raises CheckpointError, naming the key, for an embedding that we do not have and for unusable values.
    """
    section = next(filter(config.get, ROPE_SECTIONS), ROPE_SECTIONS[0])
    own = config.get(section) or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{section} is {given(own)}, allowed: an object, such as {{'rope_type': 'default'}}")
    own = {key: value for key, value in own.items() if value is not None}
    rope_type = own.get("rope_type", own.get("type", "default"))
    if rope_type not in [*ROPE_KEYS]:
        needed = _NOT_HERE.get(str(rope_type), "")
        raise CheckpointError(f"{section}.rope_type is {given(rope_type)}, allowed: {', '.join(ROPE_KEYS)}{needed}")
    if strange := sorted(own.keys() - _READ):
        raise CheckpointError(
            f"{section}.{strange[0]} is {given(own[strange[0]])}, which no embedding of ours "
            "has; remove it if the model does not need it"
        )
    # As transformers 5 does, which prefers this key outside of the section.
    longest = config["max_position_embeddings"]
    trained = config.get(TRAINED, own.get(TRAINED, longest))
    values = {"rope_theta": config["rope_theta"], **own, TRAINED: trained}
    if (
        rope_type in ("yarn", "longrope")
        and "factor" not in own
        and type(trained) is type(longest) is int
        and trained > 0
    ):
        values["factor"] = longest / trained
    keys = {"theta": "rope_theta"} | ROPE_KEYS[rope_type]
    for key in ("factor", TRAINED, "short_factor", "long_factor"):
        if key in keys.values() and values.get(key) is None:
            raise CheckpointError(f"{section}.{key} is missing; rope_type {rope_type} needs it")
    kind = {"default": "none", "linear": "pi"}.get(rope_type, rope_type)
    try:
        rope = RopeConfig.model_validate(
            {"kind": kind, "fraction": fraction}
            | {ours: values[theirs] for ours, theirs in keys.items() if theirs in values}
        )
    except ValidationError as error:
        places = {ours: f"{section}.{theirs}" if theirs in own else theirs for ours, theirs in keys.items()}
        raise CheckpointError("; ".join(explain(error, RopeConfig, places))) from None
    _check_fixed_values(section, own, rope)
    if rope.kind == "longrope":
        return rope
    if rope.factor == 1:
        return RopeConfig(theta=rope.theta, fraction=fraction)
    return rope if rope.kind == "pi" else rope.model_copy(update={"beta_fast": rope.fast_turns})


def turning_fraction(config: Mapping[str, Any], default: float = 1.0) -> Any:
    """Part of each head that turns, which may stand inside of the embedding's section."""
    section = next(filter(None, map(config.get, ROPE_SECTIONS)), None)
    found = [where.get("partial_rotary_factor") for where in (section, config) if isinstance(where, Mapping)]
    return next((part for part in found if part is not None), default)


def unused_keys(config: Mapping[str, Any], usual_theta: float) -> Iterator[str]:
    """Keys of the embedding in a `config.json` that can be read, which its types do not use, or which say something
    else than the section that is read. usual_theta: base of the family."""
    sections = {key: config[key] for key in ROPE_SECTIONS if config.get(key)}
    for name, section in sections.items():
        if not isinstance(section, dict):  # not the one that is read
            yield name
            continue
        by_type = {f"{name}.{key}": own for key, own in section.items() if isinstance(own, dict)}
        for where, own in (by_type or {name: section}).items():
            rope_type = str(own.get("rope_type", own.get("type", "default")))
            used = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS.get(rope_type, {}).values()}
            used |= _SHARPENED if rope_type in ("yarn", "longrope") else set()
            yield from (f"{where}.{key}" for key, value in own.items() if key not in used and value is not None)
        if not by_type:
            read = {**config, **sections[next(iter(sections))]}
            yield from (f"{name}.{key}" for key, value in section.items() if key in used and read.get(key) != value)
            if config["rope_theta"] not in (usual_theta, read["rope_theta"]):
                yield "rope_theta"


def _check_fixed_values(section: str, own: dict[str, Any], rope: RopeConfig) -> None:
    """Raise CheckpointError for keys without a counterpart in our model, unless they change nothing."""
    allowed: dict[str, object] = {"partial_rotary_factor": rope.fraction}
    if rope.kind == "yarn" and rope.factor != 1:
        allowed |= {"mscale": None, "mscale_all_dim": None}
    for key, value in allowed.items():
        if own.get(key, value) != value:
            raise CheckpointError(f"{section}.{key} is {given(own[key])}, allowed: {value}")
    sharpened = own.get("attention_factor")
    if rope.kind not in ("yarn", "longrope") or sharpened is None:
        return
    ours = attention_factor(rope)
    # Not `> 1e-6`, which NaN is not.
    if not isinstance(sharpened, int | float) or not abs(sharpened - ours) <= 1e-6:
        raise CheckpointError(f"{section}.attention_factor is {given(sharpened)}, allowed: {ours} or none")
