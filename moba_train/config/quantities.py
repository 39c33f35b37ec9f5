"""Human-sized numbers in YAML and on the command line: `128K`, `10B`.

Two readings, as in the field's own usage: sequence lengths count in powers of 1024 (`128K` = 131072 tokens), token
budgets in powers of 1000 (`1B` = 10**9 tokens).
"""

import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([KMBT]?)\s*$", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}

LARGEST_COUNT = 2**53
"""Largest whole number of a recipe, nine thousand trillions: up to here float64, in which suffixes are read and corpora
are blended, holds every one. Beyond 2**63 they overflow in numpy and torch."""

MOST_SAMPLES = 1_000_000
"""Largest number of samples of an evaluation, and of steps that a spike is compared with."""


def parse_number(value: Any, base: int) -> Any:
    """An int from `value` (int, integral float or text such as "1.5B"), suffixes being powers of `base`.

    Values of other types are returned untouched, for the caller's own validation to refuse.
    Raises ValueError when the text is not a number or not a whole one, and for more than LARGEST_COUNT.
    """
    if isinstance(value, bool):
        raise ValueError(f"given {str(value).lower()}, which is not a number; write e.g. 4096, 128K or 1.5B")
    number = value
    if isinstance(value, str):
        match = _NUMBER.match(value)
        if match is None:
            raise ValueError(f"given {value!r}, which is not a number; write e.g. 4096, 128K or 1.5B")
        digits = match[1].replace("_", "")
        number = float(digits)
        if 0 < number <= LARGEST_COUNT:  # the fraction of 1e999999 would fill the memory
            exact = Fraction(digits) * base ** _POWER[match[2].upper()]
            number = exact.numerator if exact.denominator == 1 else float(exact)
    if isinstance(number, int | float) and number > LARGEST_COUNT:
        raise ValueError(f"given {value!r}; allowed: at most {LARGEST_COUNT:,} tokens")
    if isinstance(number, float) and number.is_integer():
        return int(number)
    if isinstance(value, str) and not isinstance(number, int):
        raise ValueError(f"given {value!r}, which is {number:,} tokens; allowed: a whole number")
    return number


def format_count(number: float, base: int = 1000) -> str:
    """`number` with three significant digits and a suffix, e.g. 1.24B; the digits before the point are all kept."""
    shown = ""
    for suffix in ("", "K", "M", "B", "T"):
        value = number / base ** _POWER[suffix]
        shown = f"{value:.0f}{suffix}" if abs(value) >= 100 else f"{value:.3g}{suffix}"
        if round(abs(value)) < base:
            break
    return shown


def _json_schema(minimum: int) -> WithJsonSchema:
    """What an editor should accept: a whole number, or text with a suffix."""
    text = {"type": "string", "pattern": r"^\s*[0-9][0-9_]*(\.[0-9]+)?([eE]\+?[0-9]+)?\s*[KMBTkmbt]?\s*$"}
    return WithJsonSchema({"anyOf": [{"type": "integer", "minimum": minimum}, text]})


Length = Annotated[
    int,
    BeforeValidator(lambda value: parse_number(value, 1024)),
    Field(ge=1, description="tokens; K, M count in 1024"),
    _json_schema(1),
]
"""A sequence length or batch size in tokens; suffixes count in 1024."""

TokenBudget = Annotated[
    int,
    BeforeValidator(lambda value: parse_number(value, 1000)),
    Field(ge=0, description="tokens; K, M, B, T count in 1000"),
    _json_schema(0),
]
"""A number of training tokens; suffixes count in 1000."""
