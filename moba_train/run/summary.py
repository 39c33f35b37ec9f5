"""A run in a few aligned lines, for the beginning of its output."""

from collections import Counter
from collections.abc import Callable

import torch

from moba_train.config.base import format_count, format_duration
from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.memory.devices import local_host_bytes, local_host_memory, peak_tflops
from moba_train.memory.plan import StagePlan, make_plan
from moba_train.memory.shortage import host_shortage
from moba_train.parallel.float8 import describe_layers
from moba_train.telemetry.sinks import describe_sinks

MFU = 0.4
"""Utilisation that the predicted time assumes, as `moba-train plan` does."""


def summarize(config: RunConfig, world_size: int, ranks_per_node: int, device: torch.device) -> str:
    """Model, stages, mesh, tokens, layers in FP8 and predictions of a validated recipe on these ranks.

    Memory is predicted for GPUs only, with a warning where their host has too little, and time for GPUs whose peak is
    known.
    """
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    peak = peak_tflops(gpu.name) if gpu is not None else None
    gpu_bytes = gpu.total_memory if gpu is not None else None
    host_bytes = local_host_bytes(ranks_per_node)
    plan = make_plan(config, world_size, peak or 1.0, MFU, ranks_per_node, gpu_bytes, host_bytes=host_bytes)
    model = config.model
    heads = f"{model.heads} heads" + (f" on {model.kv_heads} kv heads" if model.kv_heads != model.heads else "")
    counts = plan.parameters
    lines = [
        (
            "model",
            f"{format_count(counts.total)} parameters ({format_count(counts.without_embeddings)} without embeddings): "
            f"{model.layers} layers, hidden size {model.hidden_size}, {heads}",
        ),
        *(("stages" if index == 0 else "", row) for index, row in enumerate(_stages(plan.stages))),
        ("mesh", _mesh(plan.stages, world_size, gpu.name if gpu is not None else "CPU")),
        ("tokens", _tokens(plan.stages)),
    ]
    if config.precision.linear == "fp8":
        lines.append(("fp8", describe_layers(config)))
    if gpu is not None:
        largest = max(plan.stages, key=lambda item: item.memory.total)
        gib = f"{largest.memory.total / 2**30:.1f} of {gpu.total_memory / 2**30:.0f} GiB"
        lines.append(("memory", f"{gib} per GPU in stage {largest.stage.name} (predicted)"))
    if peak is not None:
        at_most = "at most " if any(item.stage.until for item in plan.stages) else ""
        lines.append(("time", f"about {at_most}{format_duration(plan.seconds)} (predicted, at {MFU:.0%} of the peak)"))
    lines.append(("folder", f"{config.run_dir}: config.yaml (every value of the recipe), metrics.jsonl, checkpoints"))
    lines.append(("records", describe_sinks(config.telemetry)))
    shortage = host_shortage(plan, local_host_memory(ranks_per_node)) if gpu is not None else None
    warnings = [f"warning: {shortage}"] if shortage else []
    return "\n".join([f"run {config.name}", *(f"  {label:<8}{text}" for label, text in lines), *warnings])


def _stages(stages: tuple[StagePlan, ...]) -> list[str]:
    """A line for each stage, in columns."""
    rows = [
        (
            item.stage.name,
            f"{item.stage.seq_len:,} tokens a sequence",
            _at_most(item.stage.planned_steps, item.stage.steps, "{:,}".format) + " steps",
            _at_most(item.stage.planned_tokens, item.tokens, format_count) + " tokens",
            ", ".join(f"{count} {kind}" for kind, count in Counter(item.stage.kinds).items()),
        )
        for item in stages
    ]
    name, length, steps, tokens, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        f"{row[0]:<{name}}  {row[1]:>{length}}  {row[2]:>{steps}}  {row[3]:>{tokens}}  attention {row[4]}"
        for row in rows
    ]


def _at_most(planned: int, most: int, show: Callable[[int], str]) -> str:
    """The planned number or, for a stage with an exit criterion, the range up to its limit."""
    return show(most) if planned == most else f"{show(planned)} to {show(most)}"


def _mesh(stages: tuple[StagePlan, ...], world_size: int, device: str) -> str:
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    layouts = dict.fromkeys(_layout(item.mesh) for item in stages)
    return f"{ranks} ({device})" + (f": {', then '.join(layouts)}" if world_size > 1 else "")


def _layout(mesh: MeshSizes) -> str:
    """The dimensions with more than one rank."""
    return " x ".join(f"{name} {size}" for name, size in mesh._asdict().items() if size > 1)


def _tokens(stages: tuple[StagePlan, ...]) -> str:
    last = stages[-1].stage
    total = _at_most(sum(item.stage.planned_tokens for item in stages), last.end_token, format_count)
    steps = _at_most(sum(item.stage.planned_steps for item in stages), last.end_step, "{:,}".format)
    batches = dict.fromkeys(f"{item.stage.batch_tokens:,}" for item in stages)
    return f"{total} in {steps} steps of {', then '.join(batches)} tokens"
