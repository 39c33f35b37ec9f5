"""Whether the parameters that a stage is to train exist.

What no single key can know: combinations that cannot work, found before any GPU is touched.
"""

import difflib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch

from moba_train.config.mesh import MeshSizes, allowed_divisors, fit_mesh
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.config.optim import OptimConfig, ScheduleConfig
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.config.stages import Stage, merge_parallel, merge_rope, resolve_stages
from moba_train.errors import ConfigError, number_ranges
from moba_train.hf.initial_weights import initial_problems
from moba_train.memory.devices import Gpu
from moba_train.model.build import build_attention, build_model, kind_of_parameter
from moba_train.optim.adamw import implementation_problem
from moba_train.optim.spec import is_trainable
from moba_train.parallel.context.strategy import GATHERING_TRANSPORTS
from moba_train.parallel.float8 import exclude_problems, float8_problem, gpu_problem
from moba_train.parallel.fsdp import norm_problem
from moba_train.parallel.links import linked_group
from moba_train.parallel.stage_strategy import stage_strategy
from moba_train.resolve.attention import attention_problems
from moba_train.resolve.data import file_problems, length_problems
from moba_train.resolve.evaluations import evaluation_problems, evaluation_settings, exit_problems
from moba_train.resolve.layout import micro_batch_problems, pipeline_problems, row_problems, tensor_problems
from moba_train.strict_json import NAMED_NUMBERS
from moba_train.telemetry.sinks import sink_problems


def trainable_problems(config: RunConfig) -> Iterator[str]:
    """Patterns in `stages[i].trainable` that no parameter of the model matches, and stages that would train nothing.

    The recipe's model must be sound.
    """
    if all(stage.trainable == "all" for stage in config.stages):
        return
    names = _parameter_names(config)
    for index, (stage, resolved) in enumerate(zip(config.stages, resolve_stages(config), strict=True)):
        used = [name for name in names if kind_of_parameter(name) in ("", *resolved.kinds)]
        matched = [name for name in names if is_trainable(name, resolved.trainable)]
        trained = [name for name in matched if name in used]
        if matched and not trained:
            yield (
                f"stages[{index}].trainable: given {stage.trainable}, which names parameters of attention kinds that "
                f"stage {stage.name!r} does not use, so nothing would be trained; change it or the stage's attention"
            )
        elif trained and not any(_learns(name, resolved, config) for name in trained):
            kinds = ", ".join(sorted({kind_of_parameter(name) for name in trained}))
            yield (
                f"stages[{index}].trainable: given {stage.trainable}, which names gates alone, and those of {kinds} do "
                f"not learn as stage {stage.name!r} uses them, so nothing would be trained; set train_gate: true or "
                "mode: warmup, or change it"
            )
        for place, pattern in enumerate(() if stage.trainable == "all" else stage.trainable):
            if any(is_trainable(name, [pattern]) for name in names):
                continue
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
            hint = f"; closest: {', '.join(close)}" if close else f"; they begin with {names[0]}, {names[1]}"
            yield f"stages[{index}].trainable[{place}]: given {pattern!r}, which no parameter's name matches{hint}"


def _learns(name: str, stage: Stage, config: RunConfig) -> bool:
    """Whether the parameter gets gradients in a stage: those of an attention kind may not, as its options say."""
    if not (kind := kind_of_parameter(name)):
        return True
    layer = stage.attention[int(name.split(".")[1])]
    return layer.kind == kind and build_attention([layer], config.model.head_width)[0].learns


def _parameter_names(config: RunConfig) -> list[str]:
    with torch.device("meta"):
        model = build_model(config)
    return [name for name, _ in model.named_parameters()]


def validate(
    config: RunConfig,
    world_size: int | None = None,
    check_files: bool = False,
    ranks_per_node: int | None = None,
    device: str | None = None,
    allow_idle: bool = False,
    training: bool = True,
    gpu: Gpu | None = None,
) -> None:
    """Check everything that can be known without a GPU.

    world_size: the number of ranks; None leaves out what depends on it, and so does None for ranks_per_node.
    device: "cuda" or "cpu", where the run will train; None where that is not known.
    allow_idle: accept options that change nothing, as recipes of earlier versions may have them.
    training: False where a trained model is only evaluated or generates.
    gpu: what the recipe is planned for, here or on other machines; None where that is not known.
    check_files: also look for the corpora and the tokenizer, relative to the working directory, and for the packages
        that telemetry asks for.
    Raises ConfigError with all problems, each named by its key.
    """
    problems = [
        *_model_problems(config.model),
        *_rope_problems(config.model.rope, "model.rope", allow_idle),
        *_stage_name_problems(config.stages),
        *_schedule_problems(config),
        *(_checkpoint_problems(config) if training else ()),
        *_precision_problems(config, device, gpu),
        *_norm_problems(config, device),
        *_optimizer_problems(config.optim, device if training else None),
        *([] if allow_idle else _memory_problems(config)),
        *attention_problems(config, device, allow_idle, training),
        *length_problems(config),
        *tensor_problems(config, ranks_per_node),
        *(pipeline_problems(config) if training else ()),
    ]
    if not problems:  # a stage is resolved from sound parts only
        problems += [*_context_problems(config, ranks_per_node, device), *row_problems(config)]
        settings = evaluation_settings(config, resolve_stages(config))
        problems += evaluation_problems(config.evaluation, settings)
        problems += exit_problems(config.evaluation, settings, config.stages, config.optim.schedule)
        problems += trainable_problems(config)
        problems += [] if allow_idle else exclude_problems(config)
    meshes, mesh_problems = _meshes(config, world_size)
    problems += mesh_problems
    for index, stage in enumerate(config.stages):
        if stage.rope is not None:
            problems += _rope_problems(merge_rope(config.model.rope, stage.rope), f"stages[{index}].rope", allow_idle)
        problems += _batch_problems(config, index, meshes[index])
    problems += _gather_problems(config, meshes[0], ranks_per_node, device)
    if training and not problems:
        for resolved, mesh in zip(resolve_stages(config), meshes, strict=True):
            problems += micro_batch_problems(config, resolved, mesh) if mesh is not None else ()
    if check_files:
        problems += file_problems(config, resolvable=not problems)
        problems += [*initial_problems(config), *_folder_problems(config)]
        problems += sink_problems(config.telemetry) if training else ()
    if problems:
        raise ConfigError(problems)


def _folder_problems(config: RunConfig) -> Iterator[str]:
    """Files, and links that lead nowhere, where folders must be. What a rank may write is seen when the run begins."""
    for key, given in (("run_dir", config.run_dir), ("checkpoint.fallback_dir", config.checkpoint.fallback_dir)):
        if given is None:
            continue
        nearest = next(path for path in (Path(given), *Path(given).absolute().parents) if os.path.lexists(path))
        if not os.path.isdir(nearest):
            kind, target = "file", ""
            if not os.path.exists(nearest):
                kind, target = "link", f" to {os.readlink(nearest)!r}, which is missing"
            what = f"is a {kind}{target}" if nearest == Path(given) else f"lies below the {kind} {nearest}{target}"
            yield f"{key}: given {given!r}, which {what}; allowed: a folder, which is made if need be"


def _model_problems(model: ModelConfig) -> Iterator[str]:
    if model.heads % model.kv_heads:
        fits = allowed_divisors(model.heads)
        yield f"model.kv_heads: given {model.kv_heads}, which does not divide heads {model.heads}; {fits}"
    if model.head_dim is None and model.hidden_size % model.heads:
        yield (
            f"model.heads: given {model.heads}, which does not divide hidden_size {model.hidden_size}; "
            "change one of them or set model.head_dim"
        )
    elif model.head_width % 2:
        key = "model.head_dim" if model.head_dim is not None else "model.hidden_size / model.heads"
        yield f"{key}: gives heads of width {model.head_width}; allowed: even widths (rotary embedding turns pairs)"


def _precision_problems(config: RunConfig, device: str | None, gpu: Gpu | None) -> Iterator[str]:
    precision = config.precision
    if precision.linear == "bf16" and precision.compute == "fp32":
        yield "precision.linear: given 'bf16' with precision.compute: fp32; allowed: auto or fp8"
    if precision.linear == "fp8":
        reason = float8_problem(precision, device)
        if not reason and gpu is not None and gpu.capability is not None:
            reason = gpu_problem(precision, gpu.name, gpu.capability)
        if reason:
            yield f"precision.linear: given 'fp8', which cannot run: {reason}; set auto"
    if precision.linear == "fp8" and precision.implementation == "transformer_engine":
        given = "precision.implementation: given 'transformer_engine'"
        for key, value, allowed in (
            ("precision.fp8.scaling", precision.fp8.scaling, "tensorwise"),
            ("precision.fp8.emulate", precision.fp8.emulate, False),
            ("parallel.tp", config.parallel.tp, 1),
            ("compile", config.compile, False),
        ):
            if value != allowed:
                needed = str(allowed).lower()
                yield f"{given} with {key}: {str(value).lower()}; allowed: {needed}, or implementation: torchao"


def _norm_problems(config: RunConfig, device: str | None) -> Iterator[str]:
    given = f"norm_implementation: given {config.norm_implementation!r}"
    if reason := norm_problem(config.norm_implementation, device):
        yield f"{given}, which cannot run: {reason}; set torch"
    if config.norm_implementation == "apex" and config.parallel.tp > 1:
        yield f"{given} with parallel.tp: {config.parallel.tp}, whose norms are sharded by rows; set torch, or tp to 1"


def _optimizer_problems(optim: OptimConfig, device: str | None) -> Iterator[str]:
    key = f"optim.implementation: given {optim.implementation!r}"
    if optim.kind != "adamw" and optim.implementation != "torch":
        yield f"{key}, which is for optim.kind: adamw alone, with kind: {optim.kind}; set torch, or kind: adamw"
    elif reason := implementation_problem(optim, device):
        yield f"{key}, which cannot run: {reason}; set torch"


def _memory_problems(config: RunConfig) -> Iterator[str]:
    """Keys that limit what the recipe does not do."""
    parallel = config.parallel
    keeps_weights = parallel.reshard_after_forward == "budget" and parallel.pp == 1
    fills = config.activation_checkpointing == "budget" or keeps_weights
    if config.memory.gpu_gib is not None and not fills:
        yield (
            f"memory.gpu_gib: given {config.memory.gpu_gib:g} with activation_checkpointing: "
            f"{config.activation_checkpointing}, which it does not change; allowed: null, or activation_checkpointing "
            "or parallel.reshard_after_forward: budget"
        )
    if config.memory.host_gib is not None and not config.activation_offload:
        yield (
            f"memory.host_gib: given {config.memory.host_gib:g} without activation_offload, which it limits; allowed: "
            "null, or activation_offload: true"
        )


def _rope_problems(rope: RopeConfig, path: str, allow_idle: bool) -> Iterator[str]:
    if rope.factor != 1 and rope.kind not in ("pi", "yarn", "llama3"):
        yield (
            f"{path}.factor: given {rope.factor:g}, which kind {rope.kind!r} does not use; set kind: pi, yarn or "
            "llama3, or factor: 1"
        )
    if rope.factor == 1 and rope.kind in ("pi", "yarn", "llama3") and not allow_idle:
        yield (
            f"{path}.factor: given 1, with which kind {rope.kind!r} changes nothing; set the new length / the trained "
            "length, more than 1, or kind: none"
        )
    if rope.kind not in ("yarn", "llama3"):
        return
    if rope.original_seq_len is None:
        yield f"{path}.original_seq_len: missing; kind {rope.kind} needs the length that was trained before"
    if rope.fast_turns <= rope.beta_slow:
        yield f"{path}.beta_fast: given {rope.fast_turns:g}; allowed: more than beta_slow, {rope.beta_slow:g}"


def _stage_name_problems(stages: Sequence[StageConfig]) -> Iterator[str]:
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            where = " and ".join(f"stages[{index}].name" for index, stage in enumerate(stages) if stage.name == name)
            yield f"{where}: given {name!r} {count} times; stage names must differ"
    for index, stage in enumerate(stages):
        if stage.name in NAMED_NUMBERS:
            yield f"stages[{index}].name: given {stage.name!r}, which logs write for a number; allowed: another name"


def _meshes(config: RunConfig, world_size: int | None) -> tuple[list[MeshSizes | None], list[str]]:
    """The mesh of every stage, and what is wrong with them."""
    meshes: list[MeshSizes | None] = []
    problems: dict[str, None] = {}  # stages without a layout of their own share their problems
    for index, stage in enumerate(config.stages):
        sizes, found = fit_mesh(merge_parallel(config.parallel, stage.parallel), world_size, _cp_key(config, index))
        problems |= dict.fromkeys(found)
        first = meshes[0] if meshes else None
        if sizes and first and sizes.dp_replicate != first.dp_replicate:
            problems[
                f"{_cp_key(config, index)}: given {sizes.cp}, which makes dp_replicate {sizes.dp_replicate}, but the "
                f"weights stay sharded as in the first stage, with dp_replicate {first.dp_replicate}; set "
                f"parallel: {{dp_replicate: {first.dp_replicate}, dp_shard: -1}}"
            ] = None
        meshes.append(sizes)
    return meshes, list(problems)


def _cp_key(config: RunConfig, index: int, key: str = "cp") -> str:
    """Where the stage's `parallel` key was given."""
    own = config.stages[index].parallel
    return f"stages[{index}].parallel.{key}" if own is not None and key in own.model_fields_set else f"parallel.{key}"


def _context_problems(config: RunConfig, ranks_per_node: int | None, device: str | None) -> Iterator[str]:
    for index, stage in enumerate(resolve_stages(config)):
        parallel = stage.parallel
        tokens = stage.micro_batch_size * stage.seq_len
        where = f"in stage {stage.name!r}"
        if parallel.cp == 1:
            continue
        if tokens < parallel.cp:
            yield (
                f"{_cp_key(config, index)}: given {parallel.cp} {where}, whose micro-batches have {tokens} tokens; "
                f"allowed: at most seq_len x micro_batch_size"
            )
        if parallel.cp_ring_depth is not None and parallel.cp_transport not in ("auto", "ring"):
            yield (
                f"{_cp_key(config, index, 'cp_ring_depth')}: given {parallel.cp_ring_depth} {where}, which "
                f"cp_transport {parallel.cp_transport!r} does not use; remove it or set cp_transport: ring"
            )
        if parallel.cp_slices is not None and parallel.cp_transport not in ("auto", *GATHERING_TRANSPORTS):
            yield (
                f"{_cp_key(config, index, 'cp_slices')}: given {parallel.cp_slices} {where}, which cp_transport "
                f"{parallel.cp_transport!r} does not use; remove it or set cp_transport: allgather"
            )
        if parallel.cp_transport == "dispatch" and (found := [*_dispatch_problems(config, stage, device)]):
            yield from (f"{_cp_key(config, index, 'cp_transport')}: given 'dispatch' {where}, {text}" for text in found)
            continue
        if parallel.cp_transport == "hierarchical" and ranks_per_node is None:
            continue
        try:
            stage_strategy(config, stage, ranks_per_node or parallel.cp * parallel.tp)
        except ValueError as error:
            key, _, problem = str(error).partition(": ")
            yield f"{_cp_key(config, index, key.removeprefix('parallel.'))}: {where}: {problem}"


def _gather_problems(
    config: RunConfig, mesh: MeshSizes | None, ranks_per_node: int | None, device: str | None
) -> Iterator[str]:
    """Weights that cannot be gathered as asked: by copy engines on other nodes, in FP8 in parts of unequal rows."""
    if mesh is None or mesh.shards == 1:
        return
    by_copy_engines = config.parallel.fsdp_copy_engines and device != "cpu" and ranks_per_node is not None
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


def _dispatch_problems(config: RunConfig, stage: Stage, device: str | None) -> Iterator[str]:
    """Layers that cannot be dispatched, and what the varlen kernels that attend to them cannot do on CUDA."""
    width = config.model.head_width
    layers = enumerate(build_attention(stage.attention, width))
    others = [layer for layer, kind in layers if any(attention.by_unit is None for attention in kind.attentions)]
    if others:
        kinds = sorted({stage.attention[layer].kind for layer in others})
        yield (
            f"which sends queries to the owners of the blocks that they select; kind {' or '.join(map(repr, kinds))} "
            f"(layers {number_ranges(others)}) cannot be divided so; use another transport"
        )
    if device == "cuda" and config.precision.compute == "fp32":
        yield "which computes in 16 bits on CUDA; set precision.compute: bf16, or use another transport"
    if device == "cuda" and (width % 8 or width > 256):
        yield f"which needs heads of a width of 8, 16, ... or 256 on CUDA; the model's have {width}"


def _batch_problems(config: RunConfig, index: int, mesh: MeshSizes | None) -> Iterator[str]:
    stage = config.stages[index]
    batch = _batch_tokens(config, stage)
    micro = stage.micro_batch_size or config.micro_batch_size
    key = "batch_tokens" if stage.batch_tokens is None else f"stages[{index}].batch_tokens"
    dp = mesh.dp if mesh is not None else 1
    # The largest unit that does not fit says most; a smaller one that does not fit explains it better.
    factors = {f"seq_len {stage.seq_len}": stage.seq_len, f"micro_batch_size {micro}": micro}
    factors[f"{dp} data-parallel ranks"] = dp
    for count in range(1, len(factors) + 1):
        unit = prod([*factors.values()][:count])
        text = " x ".join(name for name, size in [*factors.items()][:count] if size > 1)
        if batch % unit:
            lower, upper = batch // unit * unit, (batch // unit + 1) * unit
            fits = f"{lower} or {upper}" if lower else f"{upper}"
            product = f"{text} = {unit}" if " x " in text else text
            yield f"{key}: given {batch}; stage {stage.name!r} needs a multiple of {product}; nearest: {fits}"
            return


def _batch_tokens(config: RunConfig, stage: StageConfig) -> int:
    return stage.batch_tokens or config.batch_tokens


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    spans = []
    for index, stage in enumerate(config.stages):
        batch = _batch_tokens(config, stage)
        spans.append(-(-stage.tokens // batch) * batch)
        if stage.schedule is not None:
            path = f"stages[{index}].schedule"
            yield from _shape_problems(stage.schedule, path)
            yield from _span_problems(stage.schedule, path, spans[-1], f"stage {stage.name!r}")
        elif stage.lr is not None:
            # With an lr of its own the stage runs the recipe's schedule over its own tokens.
            where = f"stage {stage.name!r}, whose lr starts the schedule anew"
            yield from _span_problems(config.optim.schedule, "optim.schedule", spans[-1], where)
    yield from _shape_problems(config.optim.schedule, "optim.schedule")
    yield from _span_problems(config.optim.schedule, "optim.schedule", sum(spans), "the run")


def _span_problems(schedule: ScheduleConfig, path: str, span: int, name: str) -> Iterator[str]:
    parts = {"warmup_tokens": schedule.warmup_tokens, "decay_tokens": schedule.decay_tokens}
    given = [f"{key} {tokens}" for key, tokens in parts.items() if tokens]
    if sum(parts.values()) > span:
        yield f"{path}: {' + '.join(given)} do not fit in the {span} tokens of {name}"


def _shape_problems(schedule: ScheduleConfig, path: str) -> Iterator[str]:
    if schedule.kind == "wsd" and not schedule.decay_tokens:
        yield f"{path}.decay_tokens: missing; kind wsd needs the length of its final decay (> 0)"
    if schedule.kind != "wsd" and schedule.decay_tokens:
        given = f"given {schedule.decay_tokens}, which kind {schedule.kind!r} does not use"
        yield f"{path}.decay_tokens: {given}; remove it or set kind: wsd"


def _checkpoint_problems(config: RunConfig) -> Iterator[str]:
    fallback = config.checkpoint.fallback_dir
    if fallback is not None and Path(os.path.abspath(fallback)).is_relative_to(os.path.abspath(config.run_dir)):
        yield (
            f"checkpoint.fallback_dir: given {fallback!r}, inside run_dir {config.run_dir!r}, which fails with it; "
            "give a folder elsewhere, best on another disk"
        )
    if config.checkpoint.every is None and config.health.spike.reaction == "rollback":
        yield "health.spike.reaction: given 'rollback', which needs checkpoints; set checkpoint.every, which is null"
    if not config.checkpoint.keep_best:
        return
    given = f"checkpoint.keep_best: given {config.checkpoint.keep_best}"
    if not config.data.validation:
        yield f"{given}, but there is no data.validation to tell the best by; add one, or set it to 0"
    elif config.checkpoint.every is None:
        yield f"{given}, but no checkpoints are saved: checkpoint.every is null; set it, or checkpoint.keep_best to 0"
    elif config.checkpoint.every % config.evaluation.every:
        yield (
            f"{given}, but not every checkpoint is evaluated: checkpoint.every {config.checkpoint.every} must be a "
            f"multiple of evaluation.every {config.evaluation.every}"
        )
    for index, stage in enumerate(config.stages):
        if not stage.evaluate:
            yield f"{given}, but not every checkpoint is evaluated: stages[{index}].evaluate is false; set it to true"
