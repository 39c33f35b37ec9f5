"""Stand-ins that note their calls."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def noting(note: Callable[..., object], function: Callable[..., T]) -> Callable[..., T]:
    """`function`, before whose calls `note` is called with the same arguments."""

    def noted(*arguments: Any, **options: Any) -> T:
        note(*arguments, **options)
        return function(*arguments, **options)

    return noted
