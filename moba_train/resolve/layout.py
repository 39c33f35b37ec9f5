"""Checks of pipeline parallelism (layers, micro-batches, schedules) and of tensor parallelism (sizes to divide)."""

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import get_args

from moba_train.config.mesh import MeshSizes, allowed_divisors
from moba_train.config.model import ModelConfig
from moba_train.config.parallel import CPLayout, ParallelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.pipeline.model import number_of_parts


def pipeline_problems(config: RunConfig) -> Iterator[str]:
    """Layers and schedules that do not fit `parallel.pp` on any number of ranks."""
    parallel = config.parallel
    if parallel.pp == 1:
        return
    yield from _layer_problems(parallel, config.model.layers)
    if parallel.pp_schedule == "zero_bubble":
        given = "parallel.pp_schedule: given 'zero_bubble', which computes the gradients of weights on their own, but"
        allowed = "cannot be divided so; set it to 1f1b or interleaved_1f1b"
        if config.compile:
            yield f"{given} compiled blocks (compile: true) {allowed}"
        if config.activation_checkpointing in ("full", "selective"):
            yield f"{given} recomputed blocks (activation_checkpointing: {config.activation_checkpointing}) {allowed}"
        if config.memory.gpu_gib is not None and config.activation_checkpointing == "budget":
            yield (
                f"{given} recomputed blocks (activation_checkpointing: budget with memory.gpu_gib) {allowed}, or "
                "memory.gpu_gib to null"
            )
        if config.precision.linear == "fp8":
            yield f"{given} FP8 layers (precision.linear: fp8) {allowed}"
    if config.activation_offload:
        yield (
            f"activation_offload: given true with parallel.pp {parallel.pp}, whose ranks keep activations of several "
            "micro-batches on the GPU; set it to false"
        )


def _layer_problems(parallel: ParallelConfig, layers: int) -> Iterator[str]:
    parts = number_of_parts(parallel)
    interleaved = parallel.pp_schedule == "interleaved_1f1b"
    if parallel.pp_layers == "auto":
        if parts > layers:
            each = f" with {parts // parallel.pp} parts of the layers on each rank (pp_schedule)" if interleaved else ""
            yield f"parallel.pp: given {parallel.pp}{each}, more than model.layers {layers} can be divided into"
        return
    given = f"parallel.pp_layers: given {list(parallel.pp_layers)}"
    if interleaved and (parts % parallel.pp or parts == parallel.pp):
        yield f"{given}, {parts} parts; allowed with interleaved_1f1b: 2 x pp = {2 * parallel.pp}, 3 x pp, ... parts"
    if not interleaved and parts != parallel.pp:
        yield f"{given}, {parts} parts; allowed with {parallel.pp_schedule}: pp = {parallel.pp} parts"
    if sum(parallel.pp_layers) != layers:
        yield f"{given}, {sum(parallel.pp_layers)} layers in all; model.layers is {layers}"


def micro_batch_problems(stage: Stage, mesh: MeshSizes) -> Iterator[str]:
    """Too few micro-batches for a pipeline's schedule in `stage` on a mesh, or a number that it cannot divide."""
    pp = mesh.pp
    count, rest = divmod(stage.batch_sequences, stage.micro_batch_size * mesh.dp)
    if pp == 1 or rest:
        return
    schedule = stage.parallel.pp_schedule
    unit = stage.seq_len * stage.micro_batch_size * mesh.dp
    given = (
        f"{stage.key('batch_tokens')}: given {stage.batch_tokens}, which makes {count} micro-batches on each rank in "
        f"stage {stage.name!r}; parallel.pp {pp} needs"
    )
    if count < pp:
        yield f"{given} at least {pp}: {pp * unit} tokens, or a smaller micro_batch_size"
    elif schedule != "1f1b" and count % (rounds := count // pp):
        lower, upper = count // pp * pp, -(-count // pp) * pp
        yield (
            f"{given} with {schedule} a multiple of {rounds}, the rounds of {pp}; nearest: "
            f"{lower * unit} or {upper * unit} tokens"
        )


_DIVIDED = ("heads", "kv_heads", "intermediate_size", "vocab_size")


def tensor_problems(
    model: ModelConfig, parallel: ParallelConfig, compiled: bool, ranks_per_node: int | None
) -> Iterator[str]:
    """Sizes of the model, and ranks of a node, that `parallel.tp` does not divide, and an overlap that cannot be."""
    tp = parallel.tp
    if parallel.tp_overlap and (tp == 1 or not compiled):
        missing = "parallel.tp is 1" if tp == 1 else "compile is false"
        yield f"parallel.tp_overlap: given true, but {missing}; it needs parallel.tp above 1 and compile: true"
    sizes = {key: getattr(model, key) for key in _DIVIDED}
    uneven = [f"model.{key} {size}" for key, size in sizes.items() if size % tp]
    if uneven:
        allowed = allowed_divisors(gcd(*sizes.values()))
        yield f"parallel.tp: given {tp}, which does not divide {', '.join(uneven)}; {allowed}"
    if ranks_per_node is not None and ranks_per_node % tp:
        ranks = f"the {ranks_per_node} rank{'s' * (ranks_per_node > 1)} of a node"
        yield (
            f"parallel.tp: given {tp}, which does not divide {ranks}; a tp group must not span nodes; "
            f"{allowed_divisors(ranks_per_node)}"
        )


def row_problems(stages: Sequence[Stage], evaluated: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Stages whose rows (tokens on a rank) `parallel.tp` does not divide, in training or evaluation, as problems.

    evaluated: for each stage, sequences of one forward pass of each of its evaluations, by the evaluation's key
    """
    for stage, evaluations in zip(stages, evaluated, strict=True):
        tp = stage.parallel.tp
        if tp == 1:
            continue
        cp = stage.parallel.cp
        layout = stage.parallel.cp_layout
        passes = {f"seq_len {stage.seq_len} x micro_batch_size {stage.micro_batch_size}": stage.micro_batch_size}
        for key, sequences in evaluations.items():
            passes[f"seq_len {stage.seq_len} ({key})"] = sequences
        for text, sequences in passes.items():
            tokens = stage.seq_len * sequences
            # `auto` may choose either, by the memory that is free
            kinds = get_args(CPLayout) if layout == "auto" else (layout,)
            rows = {SequenceLayout.split(tokens, cp, kind).rows for kind in kinds} if tokens >= cp else set()
            if uneven := [str(count) for count in sorted(rows) if count % tp]:
                over, unit = (f" over cp {cp}", 2 * cp * tp) if cp > 1 else ("", tp)
                yield (
                    f"parallel.tp: given {tp}, which does not divide the {' or '.join(uneven)} rows of {text}{over} in "
                    f"stage {stage.name!r}; make them a multiple of {unit} tokens"
                )
                break
