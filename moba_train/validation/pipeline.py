"""Checks of pipeline parallelism: layers, micro-batches, and what its schedules and ranks cannot do."""

from collections.abc import Iterator

from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.parallel.pipeline.split import number_of_parts


def pipeline_problems(config: RunConfig) -> Iterator[str]:
    """What does not fit `parallel.pp` whatever the number of ranks: layers, schedule and evaluations."""
    parallel = config.parallel
    if parallel.pp == 1:
        return
    yield from _layer_problems(config)
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
    yield from _evaluation_problems(config)


def _layer_problems(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    layers = config.model.layers
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


def _evaluation_problems(config: RunConfig) -> Iterator[str]:
    pp = config.parallel.pp
    evaluation = config.evaluation
    later = "which a pipeline cannot do; `moba-train eval` can, on the checkpoints"
    if evaluation.needle is not None and evaluation.needle.generate:
        yield f"evaluation.needle.generate: given true with parallel.pp {pp}, {later}; set it to false"
    if evaluation.ruler is not None and evaluation.ruler.scoring == "generated":
        yield f"evaluation.ruler.scoring: given 'generated' with parallel.pp {pp}, {later}; set it to teacher_forced"
    for name in ("gradient_reach", "needle_signal"):
        if getattr(evaluation, name) is not None:
            yield f"evaluation.{name}: given with parallel.pp {pp}, {later}; remove it"


def micro_batch_problems(config: RunConfig, stage: Stage, mesh: MeshSizes) -> Iterator[str]:
    """Too few micro-batches for a pipeline's schedule in `stage` on a mesh, or a number that it cannot divide."""
    pp = mesh.pp
    count, rest = divmod(stage.batch_sequences, stage.micro_batch_size * mesh.dp)
    if pp == 1 or rest:
        return
    key = "batch_tokens" if config.stages[stage.index].batch_tokens is None else f"stages[{stage.index}].batch_tokens"
    unit = stage.seq_len * stage.micro_batch_size * mesh.dp
    given = (
        f"{key}: given {stage.batch_tokens}, which makes {count} micro-batches on each rank in stage {stage.name!r}; "
        f"parallel.pp {pp} needs"
    )
    if count < pp:
        yield f"{given} at least {pp}: {pp * unit} tokens, or a smaller micro_batch_size"
    elif config.parallel.pp_schedule != "1f1b" and count % (rounds := count // pp):
        lower, upper = count // pp * pp, -(-count // pp) * pp
        yield (
            f"{given} with {config.parallel.pp_schedule} a multiple of {rounds}, the rounds of {pp}; nearest: "
            f"{lower * unit} or {upper * unit} tokens"
        )
