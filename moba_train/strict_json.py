"""JSON that every reader accepts, also where numbers are not finite.

JSON has no NaN and no infinity. Python writes them as bare words, which strict readers (jq, JavaScript) refuse with the
whole file. Here they are the strings "NaN", "Infinity" and "-Infinity", as in the JSON form of protocol buffers: they
are not taken for values that are missing, and `float` in Python and `Number` in JavaScript turn them into numbers.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

NAMED_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, by their names. A text that is one of these names would be read as its number."""
_NAMED = re.compile('"(?:NaN|-?Infinity)"')


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON, with strings for numbers that are not finite."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_replaced(value, _name), indent=indent, allow_nan=False)


def from_json(text: str) -> Any:
    """The value in `text`, with numbers for the strings of `to_json`, and also for the bare words that Python's json
    writes. Raises ValueError when `text` is not JSON, RecursionError when nested too deeply.
    """
    value = json.loads(text)
    return _replaced(value, lambda found: NAMED_NUMBERS.get(found, found)) if _NAMED.search(text) else value


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """`value` with all its texts and numbers replaced."""
    if isinstance(value, dict):
        return {key: _replaced(inner, replace) for key, inner in value.items()}
    return [_replaced(inner, replace) for inner in value] if isinstance(value, list | tuple) else replace(value)


def _name(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
