"""Which attention each layer uses, in YAML.

    attention:
      default: moba                 # any registered kind
      full_layers: "last:3"         # all | none | last:N | first:N | every:N | [ids]
      moba: {block_size: 4096, topk: 12}
      overrides: {5: {block_size: 1024}, 7: {kind: full}}

Configuration knows no kind by itself: attention/registry.py registers each kind's section of options here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails

from moba_train.config.base import Section
from moba_train.config.explain import did_you_mean, explain
from moba_train.errors import ConfigError

_PATTERN = re.compile(r"^(last|first|every):([1-9][0-9]*)$")

_KIND_OPTIONS: dict[str, type[Section]] = {}


def register_kind_options(kind: str, options: type[Section]) -> None:
    """Let recipes say `attention: {KIND: {...}}`, validated as `options`, whose defaults must be usable."""
    _KIND_OPTIONS[kind] = options


class AttentionConfig(Section):
    """Attention kind and options, layer by layer. A stage's `attention` is merged over the recipe's, key by key."""

    model_config = ConfigDict(extra="allow")  # a section for each registered kind, validated below
    called_here = {"kind": "default"}

    default: str = Field("moba", description="kind of every layer not named below, any that has a section here")
    full_layers: str | list[int] = Field(
        "none", description="layers with full attention: all | none | last:N | first:N | every:N | list of layer ids"
    )
    overrides: dict[int, dict[str, Any] | None] = Field(
        {},
        description="layer id -> `kind` and/or options of the layer's kind; wins over everything above; null, for a "
        "layer or an option that its kind lacks, takes back what an extended recipe gives",
    )

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """The keys above and one section for each registered kind."""
        kinds = {kind: FieldInfo(annotation=cls_, default=cls_()) for kind, cls_ in _KIND_OPTIONS.items()}
        return {**super().fields(), **kinds}

    @field_validator("overrides", mode="before")
    @classmethod
    def _one_override_for_each_layer(cls, overrides: Any) -> Any:
        """Refuse layers that are no numbers, and those given twice, as 1 and '1'."""
        if not isinstance(overrides, dict):
            return overrides
        names: dict[str, Any] = {}
        for layer in overrides:
            if isinstance(layer, bool):
                raise ValueError(f"given layer {str(layer).lower()}; allowed: layer ids, counted from 0")
            if str(layer) in names:
                raise ValueError(f"layer {layer} is given twice, as {names[str(layer)]!r} and {layer!r}; name it once")
            names[str(layer)] = layer
        return overrides

    @model_validator(mode="after")
    def _validate_kind_sections(self) -> Self:
        assert _KIND_OPTIONS, "no attention kind is registered: import moba_train.attention.registry first"
        sections = self.__pydantic_extra__
        assert sections is not None
        errors: list[InitErrorDetails] = []
        for key, value in sections.items():
            if key not in _KIND_OPTIONS:
                errors.append(InitErrorDetails(type="extra_forbidden", loc=(key,), input=value))
                continue
            try:
                sections[key] = _KIND_OPTIONS[key].model_validate(value)
            except ValidationError as error:
                errors += [_below(key, details) for details in error.errors(include_url=False)]
        if errors:
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        for kind, options in _KIND_OPTIONS.items():
            sections.setdefault(kind, options())
        return self

    def options_of(self, kind: str) -> Section:
        """The section of a registered kind, given or its defaults."""
        options = getattr(self, kind)
        assert isinstance(options, Section)
        return options

    def dump_given(self) -> dict[str, Any]:
        """The keys that were given, as plain values, without the defaults of any."""
        given = self.model_dump(exclude_unset=True)
        return {key: value for key, value in given.items() if key not in _KIND_OPTIONS or value}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of the keys above with one section for each registered kind."""
        schema = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        resolved["additionalProperties"] = False
        for kind, options in _KIND_OPTIONS.items():
            resolved["properties"][kind] = handler(options.__pydantic_core_schema__)
        return schema


def _below(key: str, details: Any) -> InitErrorDetails:
    """An error of a section as an error of the section above it, where it is called `key`."""
    return InitErrorDetails(
        type=details["type"], loc=(key, *details["loc"]), input=details["input"], ctx=details.get("ctx", {})
    )


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer: a registered kind and its validated options."""

    kind: str
    options: Section


def merge_attention(base: AttentionConfig, over: AttentionConfig | None) -> AttentionConfig:
    """`over` laid on `base`: only keys that `over` sets explicitly win, one level into each kind's options."""
    if over is None:
        return base
    merged = base.dump_given()
    for key, value in over.dump_given().items():
        both = key in _KIND_OPTIONS and key in merged
        merged[key] = {**merged[key], **value} if both else value
    return AttentionConfig.model_validate(merged)


def full_layer_ids(full_layers: str | list[int], layers: int) -> set[int]:
    """Layer ids (0-based) that `full_layers` names in a model of `layers` layers.

    Raises ValueError when the pattern is unknown or an id is out of range.
    """
    if isinstance(full_layers, list):
        bad = [layer for layer in full_layers if not 0 <= layer < layers]
        if bad:
            raise ValueError(f"layer ids {bad} do not exist; the model has layers 0 to {layers - 1}")
        return set(full_layers)
    if full_layers in ("all", "none"):
        return set(range(layers)) if full_layers == "all" else set()
    match = _PATTERN.match(full_layers)
    if match is None:
        raise ValueError(f"{full_layers!r} is not one of all, none, last:N, first:N, every:N or a list of layer ids")
    count = int(match[2])
    if count > layers:
        raise ValueError(f"{full_layers!r} asks for {count} layers; the model has {layers}")
    if match[1] == "every":
        return set(range(count - 1, layers, count))
    return set(range(layers - count, layers)) if match[1] == "last" else set(range(count))


def resolve_layers(config: AttentionConfig, layers: int) -> tuple[LayerAttention, ...]:
    """The attention of every layer of a model with `layers` layers.

    Raises ConfigError with every unknown kind, pattern, layer id or option, each named by its key under `attention`.
    """
    problems: list[str] = []
    full: set[int] = set()
    if config.default not in _KIND_OPTIONS:
        problems.append(f"default: {_unknown_kind(config.default)}")
    try:
        full = full_layer_ids(config.full_layers, layers)
    except ValueError as error:
        problems.append(f"full_layers: {error}")
    unknown = [layer for layer in config.overrides if not 0 <= layer < layers]
    if unknown:
        problems.append(f"overrides: layer ids {unknown} do not exist; the model has layers 0 to {layers - 1}")
    for layer, override in config.overrides.items():
        problems += [f"overrides.{layer}.{problem}" for problem in _key_problems(override or {})]

    resolved = []
    for layer in range(layers):
        override = config.overrides.get(layer) or {}
        kind = override.get("kind", "full" if layer in full else config.default)
        if kind not in tuple(_KIND_OPTIONS):
            continue  # reported above
        try:
            resolved.append(LayerAttention(kind, _layer_options(config.options_of(kind), override)))
        except ValidationError as error:
            problems += [f"overrides.{layer}.{problem}" for problem in explain(error, _KIND_OPTIONS[kind])]
    if problems:
        raise ConfigError(problems)
    return tuple(resolved)


def _key_problems(override: dict[str, Any]) -> Iterator[str]:
    known = sorted({"kind"}.union(*(options.model_fields for options in _KIND_OPTIONS.values())))
    for key, value in override.items():
        if key == "kind" and value not in tuple(_KIND_OPTIONS):
            yield f"kind: {_unknown_kind(value)}"
        elif key not in known:
            yield f"{key}: unknown option{did_you_mean(key, known)}; allowed: {', '.join(known)}"


def _layer_options(options: Section, override: dict[str, Any]) -> Section:
    # A stage may switch a layer's kind while its options for the other kind stay written down: those rest.
    relevant = {key: value for key, value in override.items() if key in type(options).model_fields}
    return type(options).model_validate({**options.model_dump(), **relevant}) if relevant else options


def _unknown_kind(kind: Any) -> str:
    hint = did_you_mean(str(kind), list(_KIND_OPTIONS))
    return f"{kind!r} is not a registered attention{hint}; allowed: {', '.join(_KIND_OPTIONS)}"
