"""The cheapest changes of a recipe that make its plan fit a GPU."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from moba_train.config.parallel import ParallelConfig
from moba_train.errors import ConfigError
from moba_train.memory.devices import Gpu
from moba_train.memory.memory import MemoryPolicy
from moba_train.memory.shortage import usable_bytes
from moba_train.resolve.run import ResolvedRun
from moba_train.tools.plan.plan import Plan, StagePlan

Replan = Callable[[Sequence[str], int], Plan]
"""Plans the recipe with further overrides on a number of GPUs. Raises ConfigError for what cannot work."""

_MOST_GPUS = 16
"""Largest multiple of the given GPUs that is tried."""
_MOST_CHANGES = 3
"""Number of settings that are changed at once, at most."""


def largest_stage(plan: Plan) -> StagePlan:
    """The stage that needs most memory."""
    return max(plan.stages, key=lambda item: item.memory.total)


class Change(NamedTuple):
    """A change of the recipe, of the number of GPUs, or of both, with the changed plan."""

    overrides: tuple[str, ...]
    plan: Plan
    gpus: int | None
    """None: unchanged."""

    @property
    def arguments(self) -> str:
        """The change as arguments of `moba-train plan`."""
        return " ".join([*self.overrides, *([f"--gpus {self.gpus}"] if self.gpus else [])])


class Changes(NamedTuple):
    """Result of the search for changes."""

    fitting: tuple[Change, ...]
    """Changes that make the plan fit, cheapest first: without further GPUs, then by time."""
    nearest: Change | None
    """The change that needs least memory where none fits; None: none can be planned, or some fit."""


def cheapest_changes(run: ResolvedRun, plan: Plan, gpu: Gpu, replan: Replan, most: int = 3) -> Changes:
    """The `most` cheapest changes that make `plan`, the plan of `run`, fit `gpu`.

    Settings are changed one at a time, then two and three at once until `most` changes fit. Each candidate is planned
    as a recipe of its own. A change is left out if a part of it fits already.
    """
    settings = _settings(run.parallel, run.memory, plan, gpu)
    fitting: dict[tuple[int, ...], Change] = {}
    nearest: Change | None = None
    for count in range(1, _MOST_CHANGES + 1):
        for levels in _levels([len(values) for values in settings], count):
            if any(all(a <= b for a, b in zip(found, levels, strict=True)) for found in fitting):
                continue
            chosen = [values[level - 1] for values, level in zip(settings, levels, strict=True) if level]
            change = _planned(chosen, plan, replan)
            if change is None:
                continue
            peak = largest_stage(change.plan).memory.total
            if peak <= usable_bytes(gpu):
                fitting[levels] = change
            elif nearest is None or peak < largest_stage(nearest.plan).memory.total:
                nearest = change
        if len(fitting) >= most:
            break
    cheapest = sorted(fitting.values(), key=lambda change: (change.plan.world.ranks, change.plan.seconds))
    return Changes(tuple(cheapest[:most]), None if cheapest else nearest)


class _Value(NamedTuple):
    """One value of a setting: overrides of the recipe, or a multiple of the GPUs."""

    overrides: tuple[str, ...] = ()
    gpus: int = 1


def _levels(sizes: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """Every choice of `count` settings and a value of each: for each setting 1 to its size, or 0 if not changed."""
    for chosen in combinations(range(len(sizes)), count):
        for values in product(*(range(1, sizes[index] + 1) for index in chosen)):
            levels = dict(zip(chosen, values, strict=True))
            yield tuple(levels.get(index, 0) for index in range(len(sizes)))


def _settings(parallel: ParallelConfig, policy: MemoryPolicy, plan: Plan, gpu: Gpu) -> list[list[_Value]]:
    """The settings that save memory, each with its values from the mildest on."""
    large = [item for item in plan.stages if item.memory.total > usable_bytes(gpu)]
    mesh = plan.stages[0].mesh
    powers = [2**exponent for exponent in range(1, 11)]
    fill = () if -1 in (parallel.dp_shard, parallel.dp_replicate) else ("parallel.dp_shard=-1",)
    less_kept = {"none": ("budget", "full"), "selective": ("budget", "full"), "full": ("budget",), "budget": ()}
    recomputing = [_Value((f"activation_checkpointing={less}",)) for less in less_kept[policy.checkpointing]]
    offload = [] if policy.offload else [_Value(("activation_offload=true",))]
    micro = [
        _Value(tuple(_override(item, "micro_batch_size", item.stage.micro_batch_size // power) for item in divided))
        for power in powers
        if (divided := [item for item in large if item.stage.micro_batch_size % power == 0])
    ]
    context = [
        _Value((*(_override(item, "parallel.cp", item.mesh.cp * power) for item in large), *fill))
        for power in powers
        if all(item.mesh.cp * item.mesh.tp * power <= _MOST_GPUS * plan.world.ranks for item in large)
    ]
    tensor = [
        _Value((f"parallel.tp={mesh.tp * power}", *fill))
        for power in powers
        if mesh.tp * power <= plan.world.ranks_per_node
    ]
    replicas = [
        _Value((f"parallel.dp_replicate={mesh.dp_replicate // power}", "parallel.dp_shard=-1"))
        for power in powers
        if mesh.dp_replicate % power == 0
    ]
    further = [_Value(fill, power) for power in powers if power <= _MOST_GPUS]
    return [values for values in (recomputing, offload, micro, context, tensor, replicas, further) if values]


def _override(item: StagePlan, key: str, value: int) -> str:
    return f"stages.{item.stage.index}.{key}={value}"


def _planned(values: Sequence[_Value], plan: Plan, replan: Replan) -> Change | None:
    """The change to `values`, planned; None if it cannot work."""
    overrides = tuple(dict.fromkeys(override for value in values for override in value.overrides))
    gpus = plan.world.ranks * max(value.gpus for value in values)
    try:
        return Change(overrides, replan(overrides, gpus), gpus if gpus != plan.world.ranks else None)
    except ConfigError:
        return None
