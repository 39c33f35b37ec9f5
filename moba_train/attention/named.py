"""Objects that torch operators refer to by name.

The arguments of a custom operator are tensors, numbers and text; torch.compile takes text as a constant. Compiled code
outlives the process in a cache on disk, together with the shapes of the operators' results, and is found again by its
constants: so a name says all that those shapes may depend on, or a run with other options would be given that code.
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

    def add(self, member: T, *settings: object) -> str:
        """A new name for `member`, which these settings were made from."""
        name = f"{type(member).__name__} {next(self._numbers)}: {', '.join(map(repr, settings))}"
        self._objects[name] = member
        return name

    def __getitem__(self, name: str) -> T:
        return self._objects[name]
