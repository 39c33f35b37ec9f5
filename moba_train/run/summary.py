"""A run in a few aligned lines, for the beginning of its output."""

from collections import Counter
from collections.abc import Callable, Sequence

from moba_train.config.base import format_count
from moba_train.config.stages import Stage
from moba_train.memory.shortage import host_shortage
from moba_train.parallel.float8 import describe_layers
from moba_train.resolve.run import ResolvedRun, StageLayout
from moba_train.telemetry.sinks import describe_sinks


def summarize(run: ResolvedRun) -> str:
    """Model, stages, mesh, tokens, layers in FP8 and memory of a run on known ranks and devices.

    Memory is predicted for GPUs only, with a warning where their host has too little.
    """
    assert run.world is not None
    assert run.device is not None
    gpu = run.device.gpu
    model = run.setup.shape
    heads = f"{model.heads} heads" + (f" on {model.kv_heads} kv heads" if model.kv_heads != model.heads else "")
    counts = run.setup.spec.counts
    parts = f"{format_count(counts.without_embeddings)} without embeddings"
    parts += f"; {format_count(counts.total - counts.base)} are trained" if counts.base else ""
    lines = [
        (
            "model",
            f"{format_count(counts.total)} parameters ({parts}): {model.layers} layers, "
            f"hidden size {model.hidden_size}, {heads}",
        ),
        *(("stages" if index == 0 else "", row) for index, row in enumerate(_stages(run.stages))),
        ("mesh", _mesh(run.layouts, run.world.ranks, gpu.name if gpu is not None else "CPU")),
        ("tokens", _tokens(run.stages)),
    ]
    precision = run.setup.computation.precision
    if precision.linear == "fp8":
        lines.append(("fp8", describe_layers(run.setup.spec, precision)))
    if gpu is not None:
        needs = {
            stage.name: layout.activations.memory.total for stage, layout in zip(run.stages, run.layouts, strict=True)
        }
        name = max(needs, key=needs.__getitem__)
        gib = f"{needs[name] / 2**30:.1f} of {gpu.memory / 2**30:.0f} GiB"
        lines.append(("memory", f"{gib} per GPU in stage {name} (predicted)"))
    lines.append(("folder", f"{run.folders.run}: config.yaml (every value of the recipe), metrics.jsonl, checkpoints"))
    lines.append(("records", describe_sinks(run.telemetry)))
    warnings = []
    if gpu is not None and run.device.host_memory is not None:
        activations = {stage.name: layout.activations for stage, layout in zip(run.stages, run.layouts, strict=True)}
        if shortage := host_shortage(activations, run.device.host_memory):
            warnings.append(f"warning: {shortage}")
    return "\n".join([f"run {run.name}", *(f"  {label:<8}{text}" for label, text in lines), *warnings])


def _stages(stages: Sequence[Stage]) -> list[str]:
    """A line for each stage, in columns."""
    rows = [
        (
            stage.name,
            f"{stage.seq_len:,} tokens a sequence",
            _at_most(stage.planned_steps, stage.steps, "{:,}".format) + " steps",
            _at_most(stage.planned_tokens, stage.end_token - stage.first_token, format_count) + " tokens",
            ", ".join(f"{count} {kind}" for kind, count in Counter(stage.kinds).items()),
        )
        for stage in stages
    ]
    name, length, steps, tokens, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        f"{row[0]:<{name}}  {row[1]:>{length}}  {row[2]:>{steps}}  {row[3]:>{tokens}}  attention {row[4]}"
        for row in rows
    ]


def _at_most(planned: int, most: int, show: Callable[[int], str]) -> str:
    """The planned number or, for a stage with an exit criterion, the range up to its limit."""
    return show(most) if planned == most else f"{show(planned)} to {show(most)}"


def _mesh(layouts: Sequence[StageLayout], ranks: int, device: str) -> str:
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    sizes = (layout.mesh._asdict().items() for layout in layouts)
    meshes = dict.fromkeys(" x ".join(f"{name} {size}" for name, size in mesh if size > 1) for mesh in sizes)
    return f"{count} ({device})" + (f": {', then '.join(meshes)}" if ranks > 1 else "")


def _tokens(stages: Sequence[Stage]) -> str:
    last = stages[-1]
    total = _at_most(sum(stage.planned_tokens for stage in stages), last.end_token, format_count)
    steps = _at_most(sum(stage.planned_steps for stage in stages), last.end_step, "{:,}".format)
    batches = dict.fromkeys(f"{stage.batch_tokens:,}" for stage in stages)
    return f"{total} in {steps} steps of {', then '.join(batches)} tokens"
