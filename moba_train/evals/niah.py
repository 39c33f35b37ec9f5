"""The words of needle-in-a-haystack questions: RULER's (Hsieh et al. 2024, arXiv:2404.06654).

Prompt templates are those of RULER (NVIDIA, github.com/NVIDIA/RULER, Apache-2.0), because scores can only be compared
where the words are the same.
"""

import random
import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

from moba_train.evals.words import PAIRS

ValueType = Literal["numbers", "uuids"]


class NeedleFrame(NamedTuple):
    """The text around a haystack."""

    before: str
    after: str
    answer: str
    """How the answer begins."""


def needle_sentence(key: str, value: str, kind: ValueType) -> str:
    """The sentence that hides `value`."""
    return needle_parts(key, kind)[0] + f" {value}" + needle_parts(key, kind)[1]


def needle_parts(key: str, kind: ValueType) -> tuple[str, str]:
    """The sentence before the space and the value, and after."""
    return f"One of the special magic {kind} for {key} is:", "."


def needle_frame(keys: Sequence[str], values: int, kind: ValueType) -> NeedleFrame:
    """The question for all values of `keys`, `values` in total."""
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    if values == 1:
        some, thing, verb, are = "A", kind[:-1], "is", "is"
    else:
        some, thing, verb, are = "Some", kind, "are", "are all"
    before = (
        f"{some} special magic {thing} {verb} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {thing} afterwards.\n"
    )
    after = f"\nWhat {are} the special magic {thing} for {query} mentioned in the provided text?"
    return NeedleFrame(before, after, f"The special magic {thing} for {query} mentioned in the provided text {verb}")


def separated(values: Sequence[str], comma: str = ",") -> list[tuple[str, bool]]:
    """The text of an answer in parts, each with whether it counts: the values, and not the commas between them."""
    parts: list[tuple[str, bool]] = []
    for index, value in enumerate(values):
        if index and comma:
            parts.append((comma, False))
        parts.append((f" {value}", True))
    return parts


def draw_keys(count: int, rng: random.Random) -> list[str]:
    """Different keys such as `amber-acorn`."""
    return rng.sample(PAIRS, count)


def draw_values(count: int, kind: ValueType, rng: random.Random) -> list[str]:
    """Different values: numbers of seven digits, or UUIDs."""
    if kind == "numbers":
        return [str(number) for number in rng.sample(range(10**6, 10**7), count)]
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]
