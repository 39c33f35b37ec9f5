"""Living objects by handle: the text that names an attention or an engine in the arguments of a torch operator.

The arguments of a custom operator are tensors, numbers and text; torch.compile takes text as a constant. Compiled code
outlives the process in a cache on disk, together with the shapes of the operators' results, and is found again by its
constants: so a handle says all that those shapes may depend on, or a run with other options would be given that code.
"""

import itertools
from functools import partial
from typing import Any, Self
from weakref import WeakValueDictionary

# Weak: code that torch.compile caches would otherwise keep every attention of the process alive by its handle.
_objects: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()


class Handled:
    """Base class of what operators find by its handle, which keeps no object alive."""

    handle: str = ""
    """Number and constructor arguments of this object."""
    _settings: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        member = super().__new__(cls)
        member.handle = f"{cls.__name__} {next(_numbers)}: {', '.join(map(repr, (*arguments, options)))}"
        member._settings = arguments, options
        _objects[member.handle] = member
        return member

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is constructed again, as it needs a handle of its own."""
        arguments, options = self._settings
        return partial(type(self), *arguments, **options), ()


def by_handle(handle: str) -> Any:
    """The living object of this handle. Raises KeyError if there is none."""
    return _objects[handle]
