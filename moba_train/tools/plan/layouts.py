"""The best parallel layouts of a recipe on a number of nodes, by the predicted time of all its stages.

Every layout is tried that divides the GPUs, the model and the batches: pp, tp and dp_replicate are the same in all
stages, and so is ep, cp is each stage's own, dp_shard is the rest. Layouts that do not fit the GPU's memory are left
out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import NamedTuple

from moba_train.config.mesh import MeshSizes, divisors
from moba_train.config.model import ModelConfig
from moba_train.config.parallel import ParallelConfig
from moba_train.config.stages import Stage
from moba_train.errors import ConfigError, PlanError
from moba_train.memory.devices import Device
from moba_train.memory.flops import Documents
from moba_train.memory.memory import MemoryPolicy
from moba_train.memory.shortage import format_gib, usable_bytes
from moba_train.model.feed_forward import feed_forward_costs
from moba_train.parallel.fsdp import ModelSetup
from moba_train.parallel.pipeline.model import number_of_parts
from moba_train.resolve.run import ResolvedRun, pipeline_parts, stage_layout
from moba_train.tools.plan.step_time import AttentionTimes, Machine, StageStep, attention_times, predict_step

_SHARED = ("pp", "tp", "ep", "dp_replicate", "dp_shard", "pp_layers", "tp_overlap")
"""Keys of `parallel` that a search sets for all stages."""

Accept = Callable[[Sequence[str]], object]
"""Checks the recipe with further overrides on these GPUs. Raises ConfigError for what cannot work."""


@dataclass(frozen=True)
class Layout:
    """A layout of all stages and their predicted steps."""

    arguments: tuple[str, ...]
    """Overrides of the recipe that make it this layout."""
    stages: tuple[StageStep, ...]

    @property
    def seconds(self) -> float:
        """All steps of all stages."""
        return sum(step.seconds for step in self.stages)

    @property
    def without_copies(self) -> tuple[MeshSizes, ...]:
        """The mesh of each stage, as if weights were sharded over all of dp: layouts that differ otherwise only in
        dp_replicate take nearly the same time."""
        return tuple(step.mesh._replace(dp_replicate=1, dp_shard=step.mesh.dp) for step in self.stages)

    @property
    def largest(self) -> StageStep:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda step: step.memory)


class Layouts(NamedTuple):
    """Result of a search."""

    best: tuple[Layout, ...]
    """Fastest first."""
    fitting: int
    """Layouts that fit the GPU."""
    tried: int
    """Layouts that divide GPUs, model and batches."""


def best_layouts(
    run: ResolvedRun, nodes: int, machine: Machine, documents: Sequence[Documents], accept: Accept, most: int = 5
) -> Layouts:
    """The `most` fastest layouts of a run on `nodes` nodes that fit the GPU and that `accept` lets
    through; of those that differ in dp_replicate alone the fastest.

    documents: those of each stage. Raises PlanError, which says what comes nearest, if no layout divides the recipe's
    batches, or none fits; if `accept` refuses all, its error about the fastest.
    """
    model = run.setup.shape
    stages = run.stages
    pairs = zip(stages, documents, strict=True)
    attention = [attention_times(model, stage, own, machine) for stage, own in pairs]
    found = [
        _predicted(run, parallel, meshes, attention, machine)
        for parallel, meshes in _candidates(model, run.parallel, stages, nodes, machine)
    ]
    layouts = [layout for layout in found if layout is not None]
    if not layouts:
        raise PlanError(_nothing_divides(model, run.parallel, stages, nodes, machine))
    limit = usable_bytes(machine.gpu)
    fitting = sorted((one for one in layouts if one.largest.memory <= limit), key=lambda one: one.seconds)
    if not fitting:
        raise PlanError(_nothing_fits(layouts, nodes, machine))
    best: dict[tuple[MeshSizes, ...], Layout] = {}
    refused: ConfigError | None = None
    for layout in fitting:
        if len(best) < most and layout.without_copies not in best:
            try:
                accept(layout.arguments)
                best[layout.without_copies] = layout
            except ConfigError as error:
                refused = refused or error
    if not best and refused is not None:
        raise refused
    return Layouts(tuple(best.values()), len(fitting), len(layouts))


def _candidates(
    model: ModelConfig, given: ParallelConfig, stages: Sequence[Stage], nodes: int, machine: Machine
) -> Iterator[tuple[ParallelConfig, list[list[MeshSizes]]]]:
    """All layouts that divide GPUs, model and batches: the keys that all stages share, and the meshes of each stage."""
    world = nodes * machine.ranks_per_node
    fed = [feed_forward_costs(model, layer) for layer in range(model.layers)]
    widths = {width for costs in fed for width in costs.widths}
    most_tp = gcd(model.heads, model.kv_heads, *widths, model.vocab_size, machine.ranks_per_node)
    most_ep = gcd(*(costs.parts for costs in fed)) or 1
    most_copies = min(stage.batch_sequences for stage in stages)
    for pp in divisors(world):
        if pp > model.layers:
            break
        for tp in divisors(gcd(most_tp, world // pp)):
            for copies in divisors(world // (pp * tp)):
                if copies > most_copies:
                    break
                shared = _with_layout(given, pp, tp, copies)
                if number_of_parts(shared) > model.layers:
                    continue
                whole = MeshSizes(pp, copies, world // (pp * tp * copies), 1, tp)
                meshes = [[*_meshes(stage, whole)] for stage in stages]
                if all(meshes):
                    for ep, overlap in product(divisors(gcd(most_ep, whole.shards)), {shared.tp_overlap, False}):
                        yield shared.model_copy(update={"ep": ep, "tp_overlap": overlap}), meshes


def _with_layout(own: ParallelConfig, pp: int, tp: int, copies: int) -> ParallelConfig:
    update: dict[str, object] = {"pp": pp, "tp": tp, "dp_replicate": copies, "dp_shard": -1}
    update |= {"pp_layers": own.pp_layers if pp == own.pp else "auto", "tp_overlap": own.tp_overlap and tp > 1}
    return own.model_copy(update=update)


def _meshes(stage: Stage, whole: MeshSizes) -> Iterator[MeshSizes]:
    """`whole` with each cp that its dp_shard can give way to in `stage`."""
    rows = stage.micro_batch_size * stage.seq_len
    for cp in divisors(whole.dp_shard):
        mesh = whole._replace(dp_shard=whole.dp_shard // cp, cp=cp)
        unit = mesh.tp * (2 * cp if cp > 1 else 1)  # zigzag layouts cut a sequence into 2 cp parts
        count, rest = divmod(stage.batch_sequences, stage.micro_batch_size * mesh.dp)
        if rows % unit or rest or count < mesh.pp:
            continue
        if mesh.pp == 1 or stage.parallel.pp_schedule == "1f1b" or count % (count // mesh.pp) == 0:
            yield mesh


def _predicted(
    run: ResolvedRun,
    parallel: ParallelConfig,
    meshes: Sequence[Sequence[MeshSizes]],
    attention: Sequence[AttentionTimes],
    machine: Machine,
) -> Layout | None:
    """The layout with the fastest mesh of each stage that fits the GPU, or the one that needs least memory; None if
    a stage cannot run on any."""
    parts = pipeline_parts(run.setup.shape, parallel, run.stages, run.memory.checkpointing)
    setup = replace(run.setup, parts=parts)
    steps = []
    for stage, times, own_meshes in zip(run.stages, attention, meshes, strict=True):
        tried = (_step(setup, run.memory, parallel, stage, mesh, times, machine) for mesh in own_meshes)
        found = [step for step in tried if step is not None]
        if not found:
            return None
        fitting = [step for step in found if step.memory <= usable_bytes(machine.gpu)]
        fastest = min(fitting, key=lambda step: step.time.seconds, default=None)
        steps.append(fastest or min(found, key=lambda step: step.memory))
    return Layout(_arguments(run.parallel, parallel, run.stages, steps), tuple(steps))


def _step(
    setup: ModelSetup,
    policy: MemoryPolicy,
    shared: ParallelConfig,
    stage: Stage,
    mesh: MeshSizes,
    attention: AttentionTimes,
    machine: Machine,
) -> StageStep | None:
    if shared.tp_overlap and mesh.cp > 1:  # refused in recipes
        return None
    device = Device(machine.gpu, host_memory=None, is_here=False)
    parallel = {name: getattr(shared, name) for name in _SHARED} | {"cp": mesh.cp}
    laid_out = replace(stage, parallel=stage.parallel.model_copy(update=parallel))
    try:
        layout = stage_layout(setup, policy, laid_out, mesh, machine.ranks_per_node, device)
    except (ConfigError, ValueError):  # too little host memory, or a transport that cannot do these sizes
        return None
    return predict_step(setup, policy.optimizer, laid_out, layout, attention, machine)


def _arguments(
    given: ParallelConfig, shared: ParallelConfig, stages: Sequence[Stage], steps: Sequence[StageStep]
) -> tuple[str, ...]:
    """Overrides that change a recipe with the layout `given` and these `stages` into this layout."""
    values = {name: (getattr(given, name), getattr(shared, name)) for name in _SHARED}
    changed = [
        f"parallel.{name}={str(value).lower().replace(' ', '')}"
        for name, (before, value) in values.items()
        if value != before
    ]
    pairs = zip(stages, steps, strict=True)
    own = [f"stages.{old.index}.parallel.cp={new.mesh.cp}" for old, new in pairs if old.parallel.cp != new.mesh.cp]
    return (*changed, *own)


def _nothing_divides(
    model: ModelConfig, parallel: ParallelConfig, stages: Sequence[Stage], nodes: int, machine: Machine
) -> str:
    stage = min(stages, key=lambda stage: stage.batch_sequences // stage.micro_batch_size)
    powers = [2**exponent for exponent in reversed(range((nodes - 1).bit_length()))]
    fewer = [count for count in powers if any(_candidates(model, parallel, stages, count, machine))]
    nearest = f"nearest: --nodes {fewer[0]}" if fewer else "no smaller number of nodes does, either"
    gpus = nodes * machine.ranks_per_node
    return (
        f"--nodes: given {nodes}; no layout of {gpus} GPUs divides the model and the batches: "
        f"stage {stage.name!r} has {stage.batch_sequences} sequences a step, of which a rank takes "
        f"{stage.micro_batch_size} at a time (micro_batch_size); {nearest}, or other batch_tokens"
    )


def _nothing_fits(layouts: Sequence[Layout], nodes: int, machine: Machine) -> str:
    nearest = min(layouts, key=lambda layout: layout.largest.memory)
    step = nearest.largest
    return (
        f"no layout of {nodes * machine.ranks_per_node} GPUs fits {machine.gpu.name}, of which "
        f"{format_gib(usable_bytes(machine.gpu))} GiB are usable; the nearest needs {format_gib(step.memory)} GiB in "
        f"stage {step.stage.name}: {' '.join(nearest.arguments) or 'the layout of the recipe'}; allowed: more nodes, a "
        "smaller micro_batch_size, activation_checkpointing=budget, activation_offload=true"
    )
