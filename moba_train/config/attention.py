"""The attention of each layer, in YAML.

    attention:
      default: moba                 # any registered kind
      full_layers: "last:3"         # all | none | last:N | first:N | every:N | [ids]
      moba: {block_size: 4096, topk: 12}
      overrides: {5: {block_size: 1024}, 7: {kind: full}, "every:4": {topk: 4}}

Configuration knows no kind by itself: a registered kind (registry.py) brings its section of options.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError, field_validator

from moba_train.config.base import OpenSection, Section
from moba_train.config.explain import did_you_mean, explain
from moba_train.config.layers import PATTERNS, LayerPattern, by_layer, layer_ids, plain_keys
from moba_train.errors import ConfigError
from moba_train.registry import ATTENTION_KINDS


class AttentionConfig(OpenSection):
    """Attention kind and options, layer by layer. A stage's `attention` is merged over the recipe's, key by key."""

    members = ATTENTION_KINDS
    defaults_stand = True
    not_here = {"kind": "did you mean 'default'?"}

    default: str = Field("moba", description="kind of every layer not named below, any that has a section here")
    full_layers: LayerPattern = Field("none", description=f"layers with full attention: {PATTERNS}")
    overrides: dict[int | str, dict[str, Any] | None] = Field(
        {},
        description="layer id or pattern, such as every:4 -> `kind` and/or options of the layer's kind; ids win over "
        "patterns, later patterns over earlier ones, all over everything above; null, for a layer or an option that "
        "its kind lacks, takes back what an extended recipe gives",
    )

    _plain_keys = field_validator("overrides", mode="before")(plain_keys)

    @property
    def used_kinds(self) -> set[str]:
        """Registered kinds that the keys given here, `default` among them, give to layers."""
        kinds = {str(override.get("kind")) for override in self.overrides.values() if override}
        kinds |= {"full"} if self.full_layers not in ("none", []) else set()
        kinds |= {self.default} if "default" in self.model_fields_set else set()
        return kinds & {*ATTENTION_KINDS}

    def options_of(self, name: str) -> Section:
        """The section of a registered kind, given or its defaults."""
        options = super().options_of(name)
        assert options is not None
        return options

    def dump_given(self) -> dict[str, Any]:
        """The keys that were given, as plain values, without the defaults of any."""
        given = self.model_dump(exclude_unset=True)
        return {key: value for key, value in given.items() if key not in ATTENTION_KINDS or value}


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer: a registered kind and its validated options."""

    kind: str
    options: Section

    def full(self, keep_windows: bool = False) -> "LayerAttention | None":
        """Full attention on the same weights (`AttentionKind.full_attention`)."""
        found: LayerAttention | None = ATTENTION_KINDS[self.kind].full_attention(self.options, keep_windows)
        return found


def merge_attention(base: AttentionConfig, over: AttentionConfig | None) -> AttentionConfig:
    """`over` laid on `base`: only keys that `over` sets explicitly win, one level into each kind's options."""
    if over is None:
        return base
    merged = base.dump_given()
    for key, value in over.dump_given().items():
        both = key in ATTENTION_KINDS and key in merged
        merged[key] = {**merged[key], **value} if both else value
    return AttentionConfig.model_validate(merged)


def resolve_layers(config: AttentionConfig, layers: int) -> tuple[LayerAttention, ...]:
    """The attention of every layer of a model with `layers` layers.

    Raises ConfigError with every unknown kind, pattern, layer id or option, each named by its key under `attention`.
    """
    problems: list[str] = []
    full: set[int] = set()
    if config.default not in ATTENTION_KINDS:
        problems.append(f"default: {_unknown_kind(config.default)}")
    try:
        full = layer_ids(config.full_layers, layers)
    except ValueError as error:
        problems.append(f"full_layers: {error}")
    known: dict[int | str, dict[str, Any] | None] = {}
    for pattern, override in config.overrides.items():
        try:
            by_layer({pattern: {}}, layers)
            known[pattern] = override
        except ValueError as error:
            problems.append(f"overrides: {error}")
    overrides = by_layer(known, layers)
    for layer, override in config.overrides.items():
        problems += [f"overrides.{layer}.{problem}" for problem in _key_problems(override or {}, config)]

    resolved = []
    for layer in range(layers):
        override = overrides.get(layer, {})
        kind = override.get("kind", "full" if layer in full else config.default)
        if not isinstance(kind, str) or kind not in ATTENTION_KINDS:
            continue  # reported above
        try:
            resolved.append(LayerAttention(kind, _layer_options(config.options_of(kind), override)))
        except ValidationError as error:
            problems += [f"overrides.{layer}.{problem}" for problem in explain(error, ATTENTION_KINDS[kind].Options)]
    if problems:
        raise ConfigError(problems)
    return tuple(resolved)


def _key_problems(override: dict[str, Any], config: AttentionConfig) -> Iterator[str]:
    """Keys of an override that no kind has: looked for in the kinds that the section names before all others."""
    named = {"full", config.default, *config.given_members, str(override.get("kind"))} & set(ATTENTION_KINDS)
    for key, value in override.items():
        if key == "kind":
            if not isinstance(value, str) or value not in ATTENTION_KINDS:
                yield f"kind: {_unknown_kind(value)}"
            continue
        if key in _option_names(named):
            continue
        known = sorted({"kind", *_option_names(ATTENTION_KINDS.usable())})
        if key not in known:
            yield f"{key}: unknown option{did_you_mean(key, known)}; allowed: {', '.join(known)}"


def _option_names(kinds: Iterable[str]) -> set[str]:
    return {key for kind in kinds for key in ATTENTION_KINDS[kind].Options.model_fields}


def _layer_options(options: Section, override: dict[str, Any]) -> Section:
    # A stage may switch a layer's kind while its options for the other kind stay written down: those rest.
    relevant = {key: value for key, value in override.items() if key in type(options).model_fields}
    return type(options).model_validate({**options.model_dump(), **relevant}) if relevant else options


def _unknown_kind(kind: Any) -> str:
    hint = did_you_mean(str(kind), list(ATTENTION_KINDS))
    return f"{kind!r} is not a registered attention{hint}; allowed: {', '.join(ATTENTION_KINDS)}"
