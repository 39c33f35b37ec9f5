"""The best layouts as tables in the terminal."""

from collections.abc import Callable
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from moba_train.planning.devices import H200
from moba_train.planning.fit import format_gib
from moba_train.planning.layouts import Layout, Layouts
from moba_train.planning.render import format_duration
from moba_train.planning.step_time import Machine, StageStep, StepTime

_COLUMNS: dict[str, Callable[[StageStep], str]] = {
    "stage": lambda step: step.stage.name,
    "pp": lambda step: str(step.mesh.pp),
    "dp_replicate": lambda step: str(step.mesh.dp_replicate),
    "dp_shard": lambda step: str(step.mesh.dp_shard),
    "cp": lambda step: str(step.mesh.cp),
    "tp": lambda step: str(step.mesh.tp),
    "step, s": lambda step: f"{step.time.seconds:.2f}",
    "tokens/s/GPU": lambda step: f"{step.tokens_per_second:,.0f}",
    "memory, GiB": lambda step: format_gib(step.activations.memory.total),
    "in the node, GiB": lambda step: format_gib(step.received.node),
    "from the network, GiB": lambda step: format_gib(step.received.network),
    "waiting": lambda step: f"{step.time.communication / step.time.seconds:.0%}",
}
_PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "other operations",
    "loss": "output projection and loss",
    "repeated": "recomputed",
    "optimizer": "optimizer",
    "fsdp": "waiting for weights and gradients (FSDP)",
    "tp": "tp's communication",
    "cp": "cp's communication and copies",
    "pp": "waiting for other ranks of the pipeline",
}
"""Labels of the parts of `StepTime`."""
_SOURCES = {"fsdp": "weights and gradients", "tp": "tp", "cp": "cp", "pp": "pp"}


def print_layouts(layouts: Layouts, nodes: int, machine: Machine, console: Console) -> None:
    """Print the best layouts with their stages, then the parts of the fastest one's steps, and how to choose one."""
    gpu = machine.gpu
    gpus = nodes * machine.ranks_per_node
    count = "1 node" if nodes == 1 else f"{nodes} nodes"
    scaled = "" if gpu.name == H200.name else f", scaled to {gpu.name} by peak rates"
    console.print(
        f"{gpus} GPUs: {count} of {machine.ranks_per_node} {gpu.name}, {8e-9 * machine.links.network:g} Gbit/s a GPU "
        f"between nodes; {layouts.tried} layouts divide GPUs, model and batches, {layouts.fitting} fit\n"
        f"all times are predictions, from rates measured on one and two H200{scaled}; evaluations, checkpoints and the "
        "host's time are left out",
        soft_wrap=True,
    )
    console.print(_best(layouts))
    console.print(_parts(layouts.best[0]))
    console.print("as arguments of `moba-train launch` and `plan`, with the time of all stages:")
    for number, layout in enumerate(layouts.best, start=1):
        arguments = " ".join(layout.arguments) or "the recipe's own layout"
        console.print(f"  {number}. {arguments}    # {format_duration(layout.seconds)}", soft_wrap=True)


def _best(layouts: Layouts) -> Table:
    table = Table(title="Best layouts: one step on each GPU", title_justify="left")
    table.add_column("", justify="right")
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for number, layout in enumerate(layouts.best, start=1):
        for index, step in enumerate(layout.stages):
            table.add_row("" if index else f"{number}.", *(show(step) for show in _COLUMNS.values()))
        table.add_section()
    return table


def _parts(layout: Layout) -> Table:
    table = Table(title="Layout 1: seconds of a step, and what a GPU receives in it", title_justify="left")
    table.add_column("")
    for step in layout.stages:
        table.add_column(step.stage.name, justify="right", overflow="fold")
    for field in fields(StepTime):
        values = [getattr(step.time, field.name) for step in layout.stages]
        if any(values):
            table.add_row(_PARTS[field.name], *(f"{value:.3f}" for value in values))
    table.add_section()
    for link, where in (("node", "in the node"), ("network", "from the network")):
        for dimension, name in _SOURCES.items():
            received = [getattr(step.traffic[dimension], link) for step in layout.stages]
            if any(received):
                table.add_row(f"{name}, {where}, GiB", *map(format_gib, received))
    return table
