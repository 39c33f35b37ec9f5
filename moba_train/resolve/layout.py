"""Checks of parallel layouts: meshes, the layers, micro-batches and schedules of a pipeline, sizes that tensor
parallelism divides, context parallelism, shared weights, and the batches that all of them divide."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import get_args

from moba_train.config.mesh import MeshSizes, WorldSize, allowed_divisors, fit_mesh
from moba_train.config.model import ModelConfig
from moba_train.config.parallel import CPLayout, ParallelConfig
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.config.stages import Stage, merge_parallel
from moba_train.model.build import build_attention
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.policy import transport_spec
from moba_train.parallel.links import linked_group
from moba_train.parallel.pipeline.model import number_of_parts
from moba_train.parallel.stage_strategy import stage_strategy


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


def tensor_problems(config: RunConfig, ranks_per_node: int | None, training: bool) -> Iterator[str]:
    """Sizes of the model, and ranks of a node, that `parallel.tp` does not divide, and an overlap that cannot train."""
    model = config.model
    tp = config.parallel.tp
    cp = max(merge_parallel(config.parallel, stage.parallel).cp for stage in config.stages)
    if training and config.parallel.tp_overlap and (tp == 1 or cp > 1 or not config.compile):
        given = f"parallel.tp {tp}, cp {cp} and compile: {str(config.compile).lower()}"
        yield f"parallel.tp_overlap: given true with {given}; it needs parallel.tp above 1, cp 1 and compile: true"
    dense = not all(map(model.feed_forward, range(model.layers)))
    sizes = {key: getattr(model, key) for key in _DIVIDED if dense or key != "intermediate_size"}
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


def stage_meshes(
    parallel: ParallelConfig, stages: Sequence[StageConfig], world: WorldSize | None
) -> tuple[list[MeshSizes | None], list[str]]:
    """The mesh of every stage, and the problems that they have."""
    ranks = world.ranks if world is not None else None
    meshes: list[MeshSizes | None] = []
    problems: dict[str, None] = {}  # stages without a layout of their own share their problems
    for index, stage in enumerate(stages):
        key = _parallel_key(index, stage, "cp")
        sizes, found = fit_mesh(merge_parallel(parallel, stage.parallel), ranks, key)
        problems |= dict.fromkeys(found)
        first = meshes[0] if meshes else None
        if sizes and first and sizes.dp_replicate != first.dp_replicate:
            problems[
                f"{key}: given {sizes.cp}, which makes dp_replicate {sizes.dp_replicate}, but the weights stay sharded "
                f"as in the first stage, with dp_replicate {first.dp_replicate}; set parallel: {{dp_replicate: "
                f"{first.dp_replicate}, dp_shard: -1}}"
            ] = None
        meshes.append(sizes)
    return meshes, list(problems)


def _parallel_key(index: int, stage: StageConfig, key: str) -> str:
    """The key under which the stage's `parallel` key was given."""
    own = stage.parallel
    return f"stages[{index}].parallel.{key}" if own is not None and key in own.model_fields_set else f"parallel.{key}"


def context_problems(
    config: RunConfig, stages: Sequence[Stage], ranks_per_node: int | None, here: str | None
) -> Iterator[str]:
    """Stages of the recipe, as resolved, whose sequences cannot be shared by `cp` ranks as asked."""
    model = config.model
    for stage, own in zip(stages, config.stages, strict=True):
        parallel = stage.parallel
        tokens = stage.micro_batch_size * stage.seq_len
        where = f"in stage {stage.name!r}"
        key = partial(_parallel_key, stage.index, own)
        if parallel.cp == 1:
            continue
        if tokens < parallel.cp:
            yield (
                f"{key('cp')}: given {parallel.cp} {where}, whose micro-batches have {tokens} tokens; "
                f"allowed: at most seq_len x micro_batch_size"
            )
        spec = None if parallel.cp_transport == "auto" else transport_spec(parallel.cp_transport)
        if spec:
            kinds = build_attention(stage.attention, model.head_width)
            if found := [*spec.problems(kinds, model, here, config.precision.compute)]:
                yield from (f"{key('cp_transport')}: given {spec.name!r} {where}, {text}" for text in found)
                continue
            if spec.needs_nodes and ranks_per_node is None:
                continue
        try:
            stage_strategy(model, stage, ranks_per_node or parallel.cp * parallel.tp)
        except ValueError as error:
            name, _, problem = str(error).partition(": ")
            yield f"{key(name.removeprefix('parallel.'))}: {where}: {problem}"


def gather_problems(
    config: RunConfig, mesh: MeshSizes | None, ranks_per_node: int | None, here: str | None
) -> Iterator[str]:
    """Weights that cannot be gathered as asked: by copy engines on other nodes, in FP8 in parts of unequal rows."""
    if mesh is None or mesh.shards == 1:
        return
    by_copy_engines = config.parallel.fsdp_copy_engines and here != "cpu" and ranks_per_node is not None
    if by_copy_engines and linked_group(mesh, ranks_per_node or 1, "dp_shard", "cp").nodes > 1:
        each = f" with tp {mesh.tp}" if mesh.tp > 1 else ""
        yield (
            f"parallel.fsdp_copy_engines: given true, but the {mesh.shards} ranks that share the weights{each} are on "
            f"several nodes of {ranks_per_node}; set false, or parallel.dp_replicate and dp_shard so that one has them"
        )
    if config.precision.gathers_fp8 and (uneven := _uneven_rows(config.model, mesh)):
        each = f", each with 1/{mesh.tp} of them (parallel.tp)" if mesh.tp > 1 else ""
        yield (
            f"precision.linear: given 'fp8', whose weights {mesh.shards} ranks share in parts of equal rows{each}: "
            f"{', '.join(uneven)} cannot be; set precision.fp8.scaling: rowwise, or another parallel.dp_shard"
        )


def _uneven_rows(model: ModelConfig, mesh: MeshSizes) -> list[str]:
    """Numbers of rows of the blocks' weights that the ranks of a shard do not divide."""
    shared = {
        "model.heads x width": model.heads * model.head_width,
        "model.kv_heads x width": model.kv_heads * model.head_width,
        "model.intermediate_size": model.intermediate_size,
    }
    rows = {name: size // mesh.tp for name, size in shared.items()} | {"model.hidden_size": model.hidden_size}
    return [f"{name} {size}" for name, size in rows.items() if size % mesh.shards]


def batch_problems(
    index: int, stage: StageConfig, batch_tokens: int, micro: int, mesh: MeshSizes | None
) -> Iterator[str]:
    """A batch that the stage's sequences, micro-batches and ranks do not divide. batch_tokens: the recipe's."""
    batch = stage.batch_tokens or batch_tokens
    key = "batch_tokens" if stage.batch_tokens is None else f"stages[{index}].batch_tokens"
    dp = mesh.dp if mesh is not None else 1
    # The largest unit that does not fit says most; a smaller one that does not fit explains it better.
    factors = {f"seq_len {stage.seq_len}": stage.seq_len, f"micro_batch_size {micro}": micro}
    factors[f"{dp} data-parallel ranks"] = dp
    for count in range(1, len(factors) + 1):
        unit = prod([*factors.values()][:count])
        text = " x ".join(name for name, size in [*factors.items()][:count] if size > 1)
        if batch % unit:
            lower = batch // unit * unit
            upper = lower + unit
            fits = f"{lower} or {upper}" if lower else f"{upper}"
            product = f"{text} = {unit}" if " x " in text else text
            if mesh is not None and count == len(factors) and batch * dp // unit % mesh.dp_replicate == 0:
                shards = gcd(mesh.dp_shard, batch * dp // unit // mesh.dp_replicate)
                fits += f"; or set stages[{index}].parallel.cp to {mesh.cp * mesh.dp_shard // shards}"
            yield f"{key}: given {batch}; stage {stage.name!r} needs a multiple of {product}; nearest: {fits}"
            return
