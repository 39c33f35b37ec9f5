"""The fields of a record that can be drawn as curves."""

from typing import Any

_HEAD = {"time", "step", "tokens", "type", "stage"}


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The record's metrics and numeric event fields."""
    return {name: value for name, value in record.items() if name not in _HEAD and isinstance(value, int | float)}
