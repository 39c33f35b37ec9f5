"""Objects that torch operators refer to by name.

The arguments of a custom operator are tensors, numbers and text; torch.compile takes text as a constant.
"""

import itertools
import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """The living objects of one kind, by name. Keeps none of them alive."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, member: T) -> str:
        """A new name for `member`."""
        name = f"{type(member).__name__} {next(self._numbers)}"
        self._objects[name] = member
        return name

    def __getitem__(self, name: str) -> T:
        return self._objects[name]
