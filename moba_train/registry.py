"""Members found by name: attention kinds, evaluations, optimizers, transports and telemetry sinks.

A member is one entry point, in our pyproject.toml or in that of somebody else's package:

    [project.entry-points."moba_train.attention_kinds"]
    window = "my_package.window:WindowKind"

Names are known without importing anything; a member is imported when it is asked for. The core names no member outside
of the core, so folders of the package can be left out: entries of ours whose module is not there are passed over.
"""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from moba_train.errors import UserError

T = TypeVar("T")

_OURS = "moba_train."
_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


class Registry(Mapping[str, T], Generic[T]):
    """The members of an entry-point group by name: ours in the order of pyproject.toml, then those of others."""

    def __init__(self, group: str, what: str) -> None:
        """`group`: of the entry points; `what`: one member in words, for messages."""
        self._group = group
        self._what = what
        self._loaded: dict[str, T] = {}

    @cached_property
    def _found(self) -> dict[str, EntryPoint]:
        checkout = _of_the_checkout(self._group)
        installed = list(entry_points(group=self._group))
        if checkout:  # an editable installation lists our members as they were when it was made
            installed = [entry for entry in installed if not entry.module.startswith(_OURS)]
        found: dict[str, EntryPoint] = {}
        for entry in [*checkout, *installed]:
            if entry.name not in found and not _left_out(entry):
                found[entry.name] = entry
        return found

    def register(self, name: str, member: T) -> None:
        """Make a member known in this process alone, as notebooks and tests do."""
        self._loaded[name] = member

    @contextmanager
    def registered(self, name: str, member: T) -> Iterator[None]:
        """Inside, the member is known."""
        self.register(name, member)
        try:
            yield
        finally:
            del self._loaded[name]

    def __getitem__(self, name: str) -> T:
        """The member, imported at the first use. Raises KeyError for an unknown name, UserError for a member whose
        package cannot be imported."""
        if name not in self._loaded:
            entry = self._found[name]
            try:
                self._loaded[name] = entry.load()
            except (ImportError, AttributeError) as error:
                raise UserError(
                    f"{self._what} {name!r}: {entry.value} cannot be imported: {error}; install or repair the package "
                    f"{entry.dist.name if entry.dist else entry.module.partition('.')[0]!r}"
                ) from error
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._found, **self._loaded})

    def __len__(self) -> int:
        return len({*self._found, *self._loaded})

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._found


def _of_the_checkout(group: str) -> list[EntryPoint]:
    """Entries of pyproject.toml beside the package: a checkout may be used without being installed."""
    if not _PYPROJECT.is_file():
        return []
    groups = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"].get("entry-points", {})
    return [EntryPoint(name, value, group) for name, value in groups.get(group, {}).items()]


def _left_out(entry: EntryPoint) -> bool:
    """True if the entry is of a folder of ours that this copy of the package does not have."""
    if not entry.module.startswith(_OURS):
        return False
    folder = ".".join(entry.module.split(".")[:2])
    return find_spec(folder) is None


ATTENTION_KINDS: Registry[Any] = Registry("moba_train.attention_kinds", "attention kind")
"""Subclasses of `attention.kind.AttentionKind`."""
EVALUATIONS: Registry[Any] = Registry("moba_train.evaluations", "evaluation")
"""Subclasses of `evals.evaluation.Evaluation`, in the order in which they run."""
OPTIMIZERS: Registry[Any] = Registry("moba_train.optimizers", "optimizer")
"""Objects `optim.spec.OptimizerSpec`."""
TRANSPORTS: Registry[Any] = Registry("moba_train.transports", "transport")
"""Subclasses of `parallel.context.transport.base.Transport`."""
TELEMETRY_SINKS: Registry[Any] = Registry("moba_train.telemetry_sinks", "telemetry sink")
"""Classes with the interface of `telemetry.telemetry.Sink`."""
