"""Results that a plan asks for thousands of times."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from moba_train.config.schema import RunConfig

T = TypeVar("T")


def once_a_recipe(function: Callable[[RunConfig], T]) -> Callable[[RunConfig], T]:
    """`function`, which takes milliseconds, called again only for another recipe than the last: none ever changes."""
    last: list[tuple[RunConfig, T]] = []

    @wraps(function)
    def remembered(config: RunConfig) -> T:
        if not last or last[0][0] is not config:
            last[:] = [(config, function(config))]
        return last[0][1]

    return remembered
