"""Members found by name: attention kinds, feed-forwards, optimizers, objectives, transports, families of models, ...

A member is one entry point, in our pyproject.toml or in that of somebody else's package:

    [project.entry-points."moba_train.attention_kinds"]
    window = "my_package.window:WindowKind"

Names are known without importing anything; a member is imported when it is asked for. A package that is broken stops
only what asks for its member. The core names no member outside of the core, so folders of the package can be left out:
entries of ours whose module is not there are passed over.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from moba_train.errors import UserError

T = TypeVar("T")

_OURS = "moba_train."
_PYPROJECTS = [folder / "pyproject.toml" for folder in Path(__file__).parents[:2]]
"""In a wheel, whose list of entry points is sorted by name (setup.py puts it there), and in a checkout."""


class Registry(Mapping[str, T], Generic[T]):
    """The members of an entry-point group by name: ours in the order of pyproject.toml, then those of others."""

    def __init__(self, group: str, what: str, needed: Sequence[str]) -> None:
        """`group`: of the entry points; `what`: one member in words, for messages; `needed`: attributes by which a
        member is told from anything else."""
        self._group = group
        self._what = what
        self._needed = needed
        self._loaded: dict[str, T] = {}
        self._same_name: dict[str, EntryPoint] = {}

    @cached_property
    def _found(self) -> dict[str, EntryPoint]:
        ours = _ours(self._group)
        # An editable installation lists our members as they were when it was made.
        theirs = [entry for entry in entry_points(group=self._group) if not (ours and entry.module.startswith(_OURS))]
        found: dict[str, EntryPoint] = {}
        for entry in [*ours, *theirs]:
            if _left_out(entry):
                continue
            first = found.setdefault(entry.name, entry)
            if first.value != entry.value:
                self._same_name[entry.name] = entry
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
        """The member, imported at the first use. Raises KeyError for an unknown name, UserError for what cannot be
        imported or is no member, and for a name that two packages have or that is not the member's own."""
        if name not in self._loaded:
            self._loaded[name] = self._load(self._found[name])
        return self._loaded[name]

    def _load(self, entry: EntryPoint) -> T:
        given = f"{self._what} {entry.name!r}: {entry.value}"
        if other := self._same_name.get(entry.name):
            raise UserError(
                f"{given} and {other.value} have one name; allowed: one of them, so uninstall the package "
                f"{_package(other)!r}, or have it choose another name"
            )
        try:
            member: T = entry.load()
        except Exception as error:  # the package is somebody else's, and anything can go wrong in it
            raise UserError(
                f"{given} cannot be imported: {error!r}; install or repair the package {_package(entry)!r}"
            ) from error
        unmade: frozenset[str] = getattr(member, "__abstractmethods__", frozenset())  # those of the base class alone
        if missing := [name for name in self._needed if name in unmade or not hasattr(member, name)]:
            raise UserError(
                f"{given} of the package {_package(entry)!r} is none: it lacks {', '.join(missing)}; "
                "docs/explanation/architecture.md says how to add one"
            )
        if isinstance(name := getattr(member, "name", None), str) and name != entry.name:
            raise UserError(
                f"{given} of the package {_package(entry)!r} has the name {name!r}; allowed: that of its entry point"
            )
        return member

    def usable(self) -> dict[str, T]:
        """The members by name, imported, without those that cannot be used: for what asks for no single one."""
        found: dict[str, T] = {}
        for name in self:
            with suppress(UserError):
                found[name] = self[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter({**self._found, **self._loaded})

    def __len__(self) -> int:
        return len({*self._found, *self._loaded})

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._found


def _ours(group: str) -> list[EntryPoint]:
    """Our entries in their order: a checkout may be used without being installed."""
    for path in filter(Path.is_file, _PYPROJECTS):
        groups = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        return [EntryPoint(name, value, group) for name, value in groups.get(group, {}).items()]
    return []


def _left_out(entry: EntryPoint) -> bool:
    """True if the entry is of a folder of ours that this copy of the package does not have."""
    if not entry.module.startswith(_OURS):
        return False
    return find_spec(".".join(entry.module.split(".")[:2])) is None


def _package(entry: EntryPoint) -> str:
    """Name of the package that an entry comes from, for messages."""
    return entry.dist.name if entry.dist else entry.module.partition(".")[0]


ATTENTION_KINDS: Registry[Any] = Registry("moba_train.attention_kinds", "attention kind", ("Options", "mix", "pairs"))
"""Subclasses of `attention.kind.AttentionKind`."""
FEED_FORWARDS: Registry[Any] = Registry("moba_train.feed_forwards", "feed-forward", ("Options", "costs", "steps"))
"""Subclasses of `model.feed_forward.RegisteredFeedForward`."""
EVALUATIONS: Registry[Any] = Registry("moba_train.evaluations", "evaluation", ("Options", "numbers", "run"))
"""Subclasses of `evals.evaluation.Evaluation`, in the order in which they run."""
MODEL_FAMILIES: Registry[Any] = Registry("moba_train.model_families", "model family", ("defaults", "values", "name"))
"""Subclasses of `hf.family.Family`, by the `model_type` of their config.json."""
WEIGHT_SOURCES: Registry[Any] = Registry("moba_train.weight_sources", "source of weights", ("matches", "model", "load"))
"""Subclasses of `resolve.initial_weights.WeightSource`."""
OPTIMIZERS: Registry[Any] = Registry("moba_train.optimizers", "optimizer", ("Options", "build", "state_bytes"))
"""Objects `optim.spec.OptimizerSpec`."""
ADAMW_KERNELS: Registry[Any] = Registry("moba_train.adamw_kernels", "kernel of AdamW", ("problem", "state_device"))
"""Subclasses of `mechanisms.adamw.kernel.KernelAdamW`."""
OBJECTIVES: Registry[Any] = Registry("moba_train.objectives", "objective", ("Options", "prepare", "of_chunk"))
"""Subclasses of `model.objective.Objective`."""
ADAPTERS: Registry[Any] = Registry("moba_train.adapters", "adapter", ("Options", "problems", "check"))
"""Subclasses of `model.adapters.Adapters`."""
TRANSPORTS: Registry[Any] = Registry("moba_train.transports", "transport", ("make", "cost", "check_sizes"))
"""Objects `parallel.context.transport.base.TransportSpec`."""
CHECKPOINT_STORES: Registry[Any] = Registry(
    "moba_train.checkpoint_stores", "checkpoint store", ("Options", "copy", "local_copy")
)
"""Classes with the interface of `run.checkpoints.CheckpointStore`."""
TELEMETRY_SINKS: Registry[Any] = Registry("moba_train.telemetry_sinks", "telemetry sink", ("open", "write", "close"))
"""Classes with the interface of `telemetry.telemetry.Sink`."""
