"""A plan, and the best layouts, as tables in the terminal."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

from rich.console import Console
from rich.table import Table

from moba_train.config.base import format_count, format_duration
from moba_train.memory.devices import Gpu
from moba_train.memory.moments import MEMORY_PARTS
from moba_train.memory.shortage import format_gib, over_budget, usable_bytes
from moba_train.tools.plan.changes import Change, Changes, largest_stage
from moba_train.tools.plan.layouts import Layouts
from moba_train.tools.plan.plan import Plan, StagePlan
from moba_train.tools.plan.step_time import Machine, StageStep


def print_plan(plan: Plan, console: Console) -> None:
    """Print the layout, then parameters, stages, FLOPs, memory and predicted steps as tables."""
    layouts = dict.fromkeys(_layout(item) for item in plan.stages)
    console.print(f"{plan.world.ranks} GPUs: {', then '.join(layouts)}")
    console.print(_parameters(plan))
    console.print(_stages(plan))
    console.print(_flops(plan))
    console.print(f"real FLOPs count {_documents(plan)}", soft_wrap=True)
    for item in plan.stages:
        for warning in item.documents.warnings:
            console.print(f"warning: stage {item.stage.name}: {warning}", soft_wrap=True)
    console.print(_memory(plan))
    for item in plan.stages:
        console.print(f"{item.stage.name}: {item.activations.describe()}", soft_wrap=True)
    if len(plan.parts) > 1:
        own, best = (", ".join(map(str, parts)) for parts in (plan.parts, plan.best_parts))
        console.print(f"layers of each part of the pipeline (pp_layers): {own}; best for all stages together: {best}")
    for item in plan.stages:
        if item.layout.reason:
            console.print(f"{item.stage.name}: {item.layout.reason}", soft_wrap=True)
    if plan.steps:
        console.print(_parts("Seconds of a step, and what a GPU receives in it", plan.steps))
        console.print(_predictions(plan.machine), soft_wrap=True)
    if plan.unpredicted:
        missing = [item.stage.name for item in plan.stages if item.stage.name not in _predicted(plan)]
        of = f" of {', '.join(missing)}" if plan.steps else ""
        console.print(f"time{of} is not predicted: {plan.unpredicted}", soft_wrap=True)
    else:
        console.print(f"all stages: {_at_most(plan.stages)}{format_duration(plan.seconds)}")


def _predicted(plan: Plan) -> dict[str, float]:
    """Seconds of the stages whose time is predicted, by their names."""
    return {step.stage.name: step.seconds for step in plan.steps}


def _at_most(stages: Sequence[StagePlan]) -> str:
    return "at most " if any(item.stage.until for item in stages) else ""


def print_fit(plan: Plan, gpu: Gpu | None, console: Console) -> None:
    """Print how the stage that needs most memory fits the GPU; without a GPU, how to name one."""
    if gpu is None:
        text = (
            "this machine has no GPU: times are for an H200, and memory is compared with none; name one by --gpu, such "
            "as --gpu h200"
        )
    else:
        largest = largest_stage(plan)
        text = (
            f"memory: stage {largest.stage.name} needs most, {format_gib(largest.memory.total)} GiB on each GPU; "
            f"{format_gib(usable_bytes(gpu))} GiB are usable on {gpu.name}"
        )
    console.print(text, soft_wrap=True)


def print_over_budget(gpu_bytes: float | None, stages: Sequence[StagePlan | StageStep], console: Console) -> None:
    """Print a warning for each of the stages that needs more than memory.gpu_gib."""
    for item in stages:
        if warning := over_budget(item.stage.name, item.activations.memory, gpu_bytes):
            console.print(f"warning: {warning}", soft_wrap=True)


def print_changes(plan: Plan, changes: Changes, console: Console) -> None:
    """Print the changes that make a plan fit, with their memory and time; else the nearest one."""
    if changes.fitting:
        cheapest = "changes" if plan.unpredicted else "cheapest changes"
        console.print(f"{cheapest} that make it fit, as arguments of this command:")
        for change in changes.fitting:
            console.print(_change(plan, change), soft_wrap=True)
    elif changes.nearest is not None:
        console.print("no change of layout, micro-batch or checkpointing makes it fit; the nearest:")
        console.print(_change(plan, changes.nearest), soft_wrap=True)
    else:
        console.print("no change of layout, micro-batch or checkpointing can be planned")


def _change(plan: Plan, change: Change) -> str:
    largest = largest_stage(change.plan).memory.total
    unpredicted = plan.unpredicted or change.plan.unpredicted
    time = "" if unpredicted else f", time {change.plan.seconds / plan.seconds - 1:+.0%}"
    return f"  {change.arguments}    # {format_gib(largest)} GiB{time}"


def _layout(item: StagePlan) -> str:
    text = f"pp {item.mesh.pp} x " if item.mesh.pp > 1 else ""
    text += f"dp_replicate {item.mesh.dp_replicate} x dp_shard {item.mesh.dp_shard}"
    further = {"cp": item.mesh.cp, "tp": item.mesh.tp, "ep": item.stage.parallel.ep}
    return text + "".join(f" x {name} {size}" for name, size in further.items() if size > 1)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _parameters(plan: Plan) -> Table:
    table = _table("Parameters", "part", "count")
    for field in fields(plan.parameters):
        if field.name not in ("idle", "adapters", "base"):
            table.add_row(field.name.replace("_", " "), f"{getattr(plan.parameters, field.name):,}")
    table.add_section()
    table.add_row("total", f"{plan.parameters.total:,}")
    table.add_row("without embeddings", f"{plan.parameters.without_embeddings:,}")
    if plan.parameters.base:
        table.add_row("adapters", f"{plan.parameters.adapters:,}")
        table.add_row("trained", f"{plan.parameters.total - plan.parameters.base:,}")
    if plan.parameters.idle:
        table.add_row("active for each token", f"{plan.parameters.active:,}")
    return table


def _by_stage(plan: Plan, title: str, rows: dict[str, Callable[[StagePlan], str]]) -> Table:
    """A table with a column for each stage and a row for each quantity."""
    table = _table(title, "", *(item.stage.name for item in plan.stages))
    for name, text in rows.items():
        table.add_row(name, *(text(item) for item in plan.stages))
    return table


def _stages(plan: Plan) -> Table:
    rows: dict[str, Callable[[StagePlan], str]] = {
        "sequence length": lambda item: f"{item.stage.seq_len:,}",
        "attention (layers)": _attention,
        "tokens": _tokens,
        "steps": _steps,
        "tokens per step": lambda item: f"{item.stage.batch_tokens:,}",
        "layout": _layout,
        "micro-batches per step": lambda item: str(item.layout.micro_batches),
    }
    if plan.steps:
        rows["time (estimate)"] = partial(_time, _predicted(plan))
    if any(item.layout.backends for item in plan.stages):
        rows["kernels of selected blocks"] = _backends
    return _by_stage(plan, "Stages", rows)


def _time(predicted: dict[str, float], item: StagePlan) -> str:
    seconds = predicted.get(item.stage.name)
    return "not predicted" if seconds is None else _at_most([item]) + format_duration(seconds)


def _tokens(item: StagePlan) -> str:
    planned = f"{format_count(item.stage.planned_tokens)} to " if item.stage.until else ""
    return planned + format_count(item.tokens)


def _steps(item: StagePlan) -> str:
    planned = f"{item.stage.planned_steps:,} to " if item.stage.until else ""
    return planned + f"{item.stage.steps:,}"


def _attention(item: StagePlan) -> str:
    kinds = Counter(item.stage.kinds)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _backends(item: StagePlan) -> str:
    """The first backend of each attention to selected blocks; a batch may take a later one."""
    first = {f"{choice.order[0]} ({layer.kind})": None for layer, choice in item.layout.backends.items()}
    return ", ".join(first) or "-"


def _flops(plan: Plan) -> Table:
    return _by_stage(
        plan,
        "FLOPs per token, forward and backward",
        {
            "dense causal": lambda item: format_count(item.dense_flops),
            "real": lambda item: format_count(item.real_flops),
            "real / dense": lambda item: f"{item.real_flops / item.dense_flops:.3f}",
        },
    )


def _documents(plan: Plan) -> str:
    """Origin of the document lengths: once if all stages have the same, else by stage."""
    sources = {item.stage.name: item.documents.source for item in plan.stages}
    if len(set(sources.values())) == 1:
        return next(iter(sources.values()))
    return "; ".join(f"{name}: {source}" for name, source in sources.items())


def _memory(plan: Plan) -> Table:
    rows: dict[str, Callable[[StagePlan], str]] = {"peak during": lambda item: item.memory.moment}
    rows |= {part: partial(_gibibytes, part) for part in (*MEMORY_PARTS, "total")}
    if any(item.memory.host_optimizer for item in plan.stages):
        rows["optimizer, in host memory"] = partial(_gibibytes, "host_optimizer")
    if any(item.memory.host_copies for item in plan.stages):
        rows["copy of a save, in host memory"] = partial(_gibibytes, "host_copies")
    if any(item.activations.host_bytes for item in plan.stages):
        rows["activations, in host memory"] = lambda item: f"{item.activations.host_bytes / 2**30:.2f}"
    if len(plan.parts) > 1:
        rows["total of each rank of the pipeline"] = lambda item: ", ".join(
            format_gib(memory.total) for memory in item.activations.rank_memory
        )
    return _by_stage(plan, "Memory per GPU in GiB (estimate)", rows)


def _gibibytes(part: str, item: StagePlan) -> str:
    return f"{getattr(item.memory, part) / 2**30:.2f}"


OWN_LAYOUT = "the recipe's own layout"
_COLUMNS: dict[str, Callable[[StageStep], str]] = {
    "stage": lambda step: step.stage.name,
    "pp": lambda step: str(step.mesh.pp),
    "dp_replicate": lambda step: str(step.mesh.dp_replicate),
    "dp_shard": lambda step: str(step.mesh.dp_shard),
    "cp": lambda step: str(step.mesh.cp),
    "tp": lambda step: str(step.mesh.tp),
    "ep": lambda step: str(step.stage.parallel.ep),
    "step, s": lambda step: f"{step.time.seconds:.2f}",
    "tokens/s/GPU": lambda step: f"{step.tokens_per_second:,.0f}",
    "memory, GiB": lambda step: format_gib(step.memory),
    "in the node, GiB": lambda step: format_gib(step.received.node),
    "from the network, GiB": lambda step: format_gib(step.received.network),
    "waiting": lambda step: f"{step.time.communication / step.time.seconds:.0%}",
}
_PARTS = (
    "matrix products",
    "attention",
    "other operations",
    "output projection and loss",
    "recomputed",
    "the objective's teacher",
    "optimizer",
    "waiting for weights and gradients (FSDP)",
    "tp's communication",
    "cp's communication and copies",
    "tokens to their experts (ep)",
    "waiting for other ranks of the pipeline",
)
"""Labels of the fields of `StepTime`, in their order."""
_SOURCES = {"fsdp": "weights and gradients", "tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp"}


def print_layouts(layouts: Layouts, nodes: int, machine: Machine, console: Console) -> None:
    """Print the best layouts with their stages, then the parts of the fastest one's steps, and how to choose one."""
    gpus = nodes * machine.ranks_per_node
    count = "1 node" if nodes == 1 else f"{nodes} nodes"
    console.print(
        f"{gpus} GPUs: {count} of {machine.ranks_per_node} {machine.gpu.name}; {layouts.tried} layouts divide "
        f"GPUs, model and batches, {layouts.fitting} fit\n{_predictions(machine)}",
        soft_wrap=True,
    )
    console.print(_best(layouts))
    console.print(_parts("Layout 1: seconds of a step, and what a GPU receives in it", layouts.best[0].stages))
    console.print("as arguments of `moba-train launch` and `plan`, with the time of all stages:")
    for number, layout in enumerate(layouts.best, start=1):
        arguments = " ".join(layout.arguments) or OWN_LAYOUT
        console.print(f"  {number}. {arguments}    # {format_duration(layout.seconds)}", soft_wrap=True)


def _best(layouts: Layouts) -> Table:
    has_ep = any(step.stage.parallel.ep > 1 for layout in layouts.best for step in layout.stages)
    columns = {name: show for name, show in _COLUMNS.items() if name != "ep" or has_ep}
    table = _table("Best layouts: one step on each GPU", "", *columns)
    for number, layout in enumerate(layouts.best, start=1):
        for index, step in enumerate(layout.stages):
            table.add_row("" if index else f"{number}.", *(show(step) for show in columns.values()))
        table.add_section()
    return table


def _predictions(machine: Machine) -> str:
    return (
        f"all times are predictions, from {machine.rates.told} and {8e-9 * machine.links.network:g} Gbit/s a GPU "
        "between nodes; evaluations, checkpoints, the offload of activations and the host's time are left out"
    )


def _parts(title: str, steps: Sequence[StageStep]) -> Table:
    table = _table(title, "", *(step.stage.name for step in steps))
    for name, *values in zip(_PARTS, *(vars(step.time).values() for step in steps), strict=True):
        if any(values):
            table.add_row(name, *map(_seconds, values))
    table.add_section()
    table.add_row("the whole step", *(_seconds(step.time.seconds) for step in steps))
    table.add_section()
    for link, where in (("node", "in the node"), ("network", "from the network")):
        for dimension, name in _SOURCES.items():
            received = [getattr(step.traffic[dimension], link) for step in steps]
            if any(received):
                table.add_row(f"{name}, {where}, GiB", *map(format_gib, received))
    return table


def _seconds(value: float) -> str:
    """Three decimals, or one digit of a time that has none there."""
    return f"{value:.3f}" if value >= 0.001 else f"{value:.0e}" if value else "0"
