"""Layers of a model by patterns: `all`, `none`, `last:N`, `first:N`, `every:N`, or layer ids, counted from 0."""

import re
from collections.abc import Mapping
from typing import Any

LayerPattern = str | list[int]
"""Layers by a pattern, or a list of layer ids."""
PATTERNS = "all | none | last:N | first:N | every:N | list of layer ids"

_PATTERN = re.compile(r"^(last|first|every):([1-9][0-9]*)$")


def layer_ids(pattern: LayerPattern, layers: int) -> set[int]:
    """Layer ids (0-based) that `pattern` names in a model of `layers` layers.

    Raises ValueError when the pattern is unknown or an id is out of range.
    """
    if isinstance(pattern, list):
        bad = [layer for layer in pattern if not 0 <= layer < layers]
        if bad:
            raise ValueError(f"layer ids {bad} do not exist; the model has layers 0 to {layers - 1}")
        return set(pattern)
    if pattern in ("all", "none"):
        return set(range(layers)) if pattern == "all" else set()
    match = _PATTERN.match(pattern)
    if match is None:
        raise ValueError(f"{pattern!r} is not one of all, none, last:N, first:N, every:N or a list of layer ids")
    count = int(match[2])
    if count > layers:
        raise ValueError(f"{pattern!r} asks for {count} layers; the model has {layers}")
    if match[1] == "every":
        return set(range(count - 1, layers, count))
    return set(range(layers - count, layers)) if match[1] == "last" else set(range(count))


def plain_keys(overrides: Any) -> Any:
    """`overrides` with layer ids as numbers, also those that were given as text. Raises ValueError for what is neither
    a layer id nor a pattern, and for layers given twice, as 1 and '1'."""
    if not isinstance(overrides, dict):
        return overrides
    names: dict[str, Any] = {}
    for layer in overrides:
        text = str(layer).lower() if isinstance(layer, bool) else str(layer)
        if not (text.lstrip("-").isdigit() or text in ("all", "none") or _PATTERN.match(text)):
            raise ValueError(f"given layer {text}; allowed: layer ids, counted from 0, all, last:N, first:N or every:N")
        if str(layer) in names:
            raise ValueError(f"layer {layer} is given twice, as {names[str(layer)]!r} and {layer!r}; name it once")
        names[str(layer)] = layer
    return {int(name) if name.lstrip("-").isdigit() else layer: overrides[layer] for name, layer in names.items()}


def by_layer(overrides: Mapping[int | str, Mapping[str, Any] | None], layers: int) -> dict[int, dict[str, Any]]:
    """Values of each layer that `overrides` names: those of patterns in their order, then those of layer ids.

    Raises ValueError as `layer_ids`.
    """
    found: dict[int, dict[str, Any]] = {}
    for pattern, values in sorted(overrides.items(), key=lambda item: isinstance(item[0], int)):
        for layer in layer_ids([pattern] if isinstance(pattern, int) else pattern, layers):
            found[layer] = found.get(layer, {}) | dict(values or {})
    return found
