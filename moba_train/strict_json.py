"""JSON that every reader accepts, also where numbers are not finite.

JSON has no NaN and no infinity. Python writes them as bare words, which strict readers (jq, JavaScript) refuse with the
whole file. Here they are the strings "NaN", "Infinity" and "-Infinity", as in the JSON form of protocol buffers: they
are not taken for values that are missing, and `float` in Python and `Number` in JavaScript turn them into numbers.
"""

import json
import math
import re
from typing import Any

NAMED_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, by their names. A text that is one of these names would be read as its number."""
_NAMED = re.compile('"(?:NaN|-?Infinity)"')


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON, with strings for numbers that are not finite."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_with_strings(value), indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
    """The value in `text`, with numbers for the strings of `to_json`, and also for the bare words that Python's json
    writes, as earlier versions did. Raises ValueError when `text` is not JSON, RecursionError when nested too deeply.
    """
    value = json.loads(text)
    return _with_numbers(value) if _NAMED.search(text) else value


def _with_strings(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_strings(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_strings(inner) for inner in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_numbers(inner) for inner in value]
    return NAMED_NUMBERS.get(value, value) if isinstance(value, str) else value
