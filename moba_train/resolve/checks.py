"""Checks of a recipe: combinations that cannot work, which no single key can know, found before any GPU is touched."""

import difflib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from moba_train.checkpoint.recipe import checkpoint_folders
from moba_train.config.layers import layer_ids
from moba_train.config.mesh import WorldSize, allowed_divisors
from moba_train.config.model import LayerRope, ModelConfig, RopeConfig
from moba_train.config.optim import OptimConfig, ScheduleConfig
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.config.stages import ALL_PARAMETERS, Stage, merge_rope
from moba_train.errors import named_layers
from moba_train.memory.devices import Device
from moba_train.model.build import build_attention, build_model
from moba_train.model.rope import longrope_problems
from moba_train.model.spec import ModelSpec, kind_of_parameter
from moba_train.optim.adamw import implementation_problem
from moba_train.optim.registry import OPTIMIZERS
from moba_train.optim.spec import is_trainable
from moba_train.parallel.float8 import exclude_problems, float8_problem, gpu_problem
from moba_train.registry import ADAPTERS, FEED_FORWARDS, OBJECTIVES
from moba_train.resolve.attention import attention_problems
from moba_train.resolve.data import corpus_problems, length_problems, tokenizer_problems, vocabulary_problems
from moba_train.resolve.evaluations import (
    evaluated_sequences,
    evaluation_problems,
    evaluation_settings,
    exit_data_problems,
    exit_problems,
    pipeline_evaluation_problems,
    sample_problems,
)
from moba_train.resolve.initial_weights import initial_problems, unread_folder
from moba_train.resolve.layout import (
    batch_problems,
    context_problems,
    gather_problems,
    micro_batch_problems,
    pipeline_problems,
    row_problems,
    stage_meshes,
    tensor_problems,
)
from moba_train.resolve.run import ResolvedRun
from moba_train.strict_json import NAMED_NUMBERS


def part_problems(
    config: RunConfig, world: WorldSize | None, device: Device | None, *, allow_idle: bool, training: bool
) -> list[str]:
    """Problems of the recipe's parts and of their combinations, each named by its key. Without any, its stages can be
    resolved. Arguments as in `resolve.run.resolve`."""
    model = config.model
    ranks_per_node = world.ranks_per_node if world is not None else None
    here = _type_here(device)
    problems = [
        *_model_problems(model, allow_idle),
        *_rope_problems(model.rope, model, "model.rope", allow_idle),
        *_stage_section_problems(config.stages),
        *_schedule_problems(config),
        *_precision_problems(config, here, device),
        *_optimizer_problems(config.optim, here if training else None),
        *OPTIMIZERS[config.optim.kind].problems(config),
        *_adapter_problems(config),
        *attention_problems(config, here, allow_idle=allow_idle, training=training),
        *length_problems(config.data, config.stages),
        *tensor_problems(config, ranks_per_node, training),
    ]
    if not allow_idle:
        problems += _memory_problems(config)
    if training:
        problems += _fallback_problems(config.run_dir, config.checkpoint.fallback_dir)
        problems += _save_problems(config)
        problems += pipeline_problems(config)
        if config.parallel.pp > 1:
            problems += pipeline_evaluation_problems(config)
    return problems


def stage_problems(
    config: RunConfig, run: ResolvedRun, world: WorldSize | None, device: Device | None, *, allow_idle: bool
) -> list[str]:
    """Problems of the stages of `run`, which is `config` resolved: context parallelism, evaluations, parameters.

    With `allow_idle` evaluations, criteria and objectives are not judged: a trained model needs none of them.
    """
    stages = run.stages
    settings = evaluation_settings(run)
    spec = run.setup.spec
    place = world.ranks_per_node if world is not None else None, _type_here(device)
    problems = [
        *context_problems(config, stages, *place),
        *row_problems(stages, [evaluated_sequences(run.evaluation, setting) for setting in settings]),
    ]
    if not allow_idle:
        problems += evaluation_problems(run.evaluation, settings)
        problems += exit_problems(config, settings)
        problems += _objective_problems(config, stages)
    return [
        *problems,
        *_layer_problems(config.model, stages),
        *_trainable_problems(spec, stages, () if allow_idle else config.optim.lr_factors),
        *(() if allow_idle else exclude_problems(spec, config.precision)),
    ]


def layout_problems(
    config: RunConfig,
    stages: Sequence[Stage],
    world: WorldSize | None,
    device: Device | None,
    *,
    allow_idle: bool,
    training: bool,
) -> list[str]:
    """Problems of meshes and batches, on the ranks of `world` if they are known.

    stages: none where the recipe has other problems, so that its micro-batches cannot be judged
    """
    model = config.model
    meshes, problems = stage_meshes(config.parallel, config.stages, world)
    for index, stage in enumerate(config.stages):
        if stage.rope is not None:
            rope = merge_rope(model.rope, stage.rope, stage.seq_len)
            problems += _rope_problems(rope, model, f"stages[{index}].rope", allow_idle)
        micro_batch_size = stage.micro_batch_size or config.micro_batch_size
        problems += batch_problems(index, stage, config.batch_tokens, micro_batch_size, meshes[index])
    ranks_per_node = world.ranks_per_node if world is not None else None
    here = _type_here(device)
    problems += gather_problems(config, meshes[0], ranks_per_node, here)
    problems += _feed_forward_problems(config, meshes[0].shards if meshes[0] is not None else None, here)
    if training and not problems:
        for resolved, mesh in zip(stages, meshes, strict=False):  # no stages: there are other problems
            problems += micro_batch_problems(resolved, mesh) if mesh is not None else ()
    return problems


def _adapter_problems(config: RunConfig, begins: bool = False) -> Iterator[str]:
    if (given := config.adapters.given) is not None:
        name, options = given
        if not begins:
            yield from ADAPTERS[name].problems(options, config)
        elif config.init_from is None:
            yield f"init_from: given null; adapters.{name} needs the model that it adapts"


def _feed_forward_problems(config: RunConfig, shards: int | None, here: str | None) -> Iterator[str]:
    """Registered feed-forwards that cannot be as asked. shards: ranks of dp_shard x cp; None: not known."""
    given = config.model.given_members
    for name, options in given.items():
        for problem in FEED_FORWARDS[name].parallel.problems(options, config, shards, here):
            yield problem.removeprefix(".") if problem.startswith(".") else f"model.{name}.{problem}"
    if config.parallel.ep > 1 and not any(map(config.model.feed_forward, range(config.model.layers))):
        yield f"parallel.ep: given {config.parallel.ep}, but the model has no experts; set 1, or give model.moe"


def files_problems(config: RunConfig, run: ResolvedRun | None, *, training: bool) -> list[str]:
    """Missing and unusable files: corpora, tokenizer, initial weights, folders, the packages of telemetry. run:
    `config` resolved; None where there are other problems."""
    fallback_dir = config.checkpoint.fallback_dir
    # Every start reads the base of adapters.
    begun = () if config.adapters.given is not None else checkpoint_folders(config.run_dir, fallback_dir)
    initial = unread_folder(config.init_from, begun)
    spec = run.setup.spec if run is not None else None
    corpora = list(corpus_problems(config))
    settings = evaluation_settings(run) if run is not None and not corpora else ()
    return [
        *corpora,
        *vocabulary_problems(config.data.tokenizer, config.model.vocab_size),
        *tokenizer_problems(config.data, config.stages),
        *exit_data_problems(config.evaluation, settings),
        *sample_problems(config.evaluation, settings),
        *(initial_problems(config.model, spec, initial) if initial is not None else ()),
        *_adapter_problems(config, begins=True),
        *_folder_problems(config.run_dir, fallback_dir),
        *(config.telemetry.member_problems("telemetry") if training else ()),
        *(config.checkpoint.member_problems("checkpoint") if training else ()),
    ]


def _type_here(device: Device | None) -> str | None:
    """Type of this machine's device, whose packages are looked for; None where the run trains elsewhere."""
    return device.type if device is not None and device.is_here else None


def _trainable_problems(spec: ModelSpec, stages: Sequence[Stage], factors: Iterable[str]) -> Iterator[str]:
    """Patterns in `stages[i].trainable` and `optim.lr_factors` that no parameter of the model matches, and stages that
    would train nothing."""
    patterns = [("optim.lr_factors", pattern) for pattern in factors]
    if not patterns and all(stage.trainable == ALL_PARAMETERS for stage in stages):
        return
    with torch.device("meta"):
        names = [name for name, _ in build_model(spec).named_parameters() if name not in spec.base]
    for stage in stages:
        path = f"stages[{stage.index}].trainable"
        given = list(stage.trainable)
        used = [name for name in names if kind_of_parameter(name) in ("", *stage.kinds)]
        matched = [name for name in names if is_trainable(name, given)]
        trained = [name for name in matched if name in used]
        if matched and not trained:
            yield (
                f"{path}: given {given}, which names parameters of attention kinds that stage {stage.name!r} does not "
                "use, so nothing would be trained; change it or the stage's attention"
            )
        elif trained and not any(_learns(name, stage, spec.config.head_width) for name in trained):
            kinds = ", ".join(sorted({kind_of_parameter(name) for name in trained}))
            yield (
                f"{path}: given {given}, which names gates alone, and those of {kinds} do not learn as stage "
                f"{stage.name!r} uses them, so nothing would be trained; set train_gate: true or mode: warmup, or "
                "change it"
            )
        patterns += [(f"{path}[{place}]", pattern) for place, pattern in enumerate(given)]
    for path, pattern in patterns:
        if not any(is_trainable(name, [pattern]) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
            hint = f"; closest: {', '.join(close)}" if close else f"; they begin with {names[0]}, {names[1]}"
            yield f"{path}: given {pattern!r}, which no parameter's name matches{hint}"


def _learns(name: str, stage: Stage, head_width: int) -> bool:
    """True if the parameter gets gradients in a stage: those of an attention kind may not, as its options say."""
    if not (kind := kind_of_parameter(name)):
        return True
    layer = stage.attention[int(name.split(".")[1])]
    return layer.kind == kind and build_attention([layer], head_width)[0].facts.learns


def _folder_problems(run_dir: str, fallback_dir: str | None) -> Iterator[str]:
    """Files, and links that lead nowhere, where folders must be. Rights to write are tried when the run begins."""
    for key, given in (("run_dir", run_dir), ("checkpoint.fallback_dir", fallback_dir)):
        if given is None:
            continue
        nearest = next(path for path in (Path(given), *Path(given).absolute().parents) if os.path.lexists(path))
        if not os.path.isdir(nearest):
            kind, target = "file", ""
            if not os.path.exists(nearest):
                kind, target = "link", f" to {os.readlink(nearest)!r}, which is missing"
            what = f"is a {kind}{target}" if nearest == Path(given) else f"lies below the {kind} {nearest}{target}"
            yield f"{key}: given {given!r}, which {what}; allowed: a folder, which is made if need be"


def _model_problems(model: ModelConfig, allow_idle: bool) -> Iterator[str]:
    if not allow_idle and model.activation != "silu" and all(map(model.feed_forward, range(model.layers))):
        yield (
            f"model.activation: given {model.activation!r}, but all layers have experts, which compute silu or what "
            "model.moe.clamp says; set silu"
        )
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
    for name in ("sink_layers", "gate_layers", "bare_layers"):
        try:
            layer_ids(getattr(model, name), model.layers)
        except ValueError as error:
            yield f"model.{name}: {error}"


def _layer_problems(model: ModelConfig, stages: Sequence[Stage]) -> Iterator[str]:
    """Layers with a learned sink whose attention is more than one softmax, and layers without the projections that
    their kind needs, or with some that it does not."""
    for stage in stages:
        for layer, kind in enumerate(build_attention(stage.attention, model.head_width)):
            which = f"kind {kind.name!r} of stage {stage.name!r}"
            one = kind.facts.takes_sink and all(attention.facts.merges for attention in kind.attentions)
            if not one and model.has_sink(layer):
                yield (
                    f"model.sink_layers: gives layer {layer} a sink, which {which} cannot have; allowed: kinds "
                    "with one softmax, such as full, moba and window"
                )
            if kind.projects(kind.options) != (bare := model.is_bare(layer)):
                words = ("does not name", "has projections of its own")
                if bare:
                    words = ("names", "needs its projections; allowed: kinds with their own, such as gdn with heads")
                yield f"model.bare_layers: {words[0]} layer {layer}, where {which} {words[1]}"


def _precision_problems(config: RunConfig, here: str | None, device: Device | None) -> Iterator[str]:
    precision = config.precision
    if precision.linear == "bf16" and precision.compute == "fp32":
        yield "precision.linear: given 'bf16' with precision.compute: fp32; allowed: auto or fp8"
    if precision.linear != "fp8":
        return
    reason = float8_problem(precision, here)
    gpu = device.gpu if device is not None else None
    if not reason and gpu is not None and gpu.capability is not None:
        reason = gpu_problem(precision, gpu.name, gpu.capability)
    if reason:
        yield f"precision.linear: given 'fp8', which cannot run: {reason}; set auto"
    if precision.implementation == "transformer_engine":
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


def _optimizer_problems(optim: OptimConfig, here: str | None) -> Iterator[str]:
    key = f"optim.implementation: given {optim.implementation!r}"
    if optim.kind != "adamw" and optim.implementation != "torch":
        yield f"{key}, which is for optim.kind: adamw alone, with kind: {optim.kind}; set torch, or kind: adamw"
    elif reason := implementation_problem(optim, here):
        yield f"{key}, which cannot run: {reason}; set torch"


def _memory_problems(config: RunConfig) -> Iterator[str]:
    """Keys that limit what the recipe does not do."""
    memory, parallel, checkpointing = config.memory, config.parallel, config.activation_checkpointing
    keeps_weights = parallel.reshard_after_forward == "budget" and parallel.pp == 1
    if memory.gpu_gib is not None and checkpointing != "budget" and not keeps_weights:
        yield (
            f"memory.gpu_gib: given {memory.gpu_gib:g} with activation_checkpointing: {checkpointing}, which it does "
            "not change; allowed: null, or activation_checkpointing or parallel.reshard_after_forward: budget"
        )
    if memory.host_gib is not None and not config.activation_offload:
        yield (
            f"memory.host_gib: given {memory.host_gib:g} without activation_offload, which it limits; allowed: null, "
            "or activation_offload: true"
        )


def _rope_problems(rope: RopeConfig, model: ModelConfig, path: str, allow_idle: bool) -> Iterator[str]:
    try:
        ropes = rope.by_layer(model.layers)
    except ValueError as error:
        yield f"{path}.overrides: {error}"
        return
    common = LayerRope.model_validate(rope.model_dump(exclude={"overrides"}))
    for one in dict.fromkeys(ropes):
        own = [layer for layer, found in enumerate(ropes) if found == one]
        where = f"{path}." if one == common else f"{path}.overrides: {named_layers(own)}: "
        yield from (where + problem for problem in _layer_rope_problems(one, model.head_width, allow_idle))


def _layer_rope_problems(rope: LayerRope, width: int, allow_idle: bool) -> Iterator[str]:
    """Problems of a layer's embedding, by its keys."""
    if rope.kind == "nope":  # in some layers, where the other keys are the others'
        return
    turned = int(width * rope.fraction)
    if rope.fraction < 1 and (turned < 2 or turned % 2):
        yield (
            f"fraction: given {rope.fraction:g}, with which {turned} dimensions of a head of width {width} turn; "
            "allowed: an even number of them, at least 2"
        )
    if rope.factor != 1 and rope.kind not in ("pi", "yarn", "llama3", "longrope"):
        yield (
            f"factor: given {rope.factor:g}, which kind {rope.kind!r} does not use; set kind: pi, yarn, llama3 "
            "or longrope, or factor: 1"
        )
    if rope.factor == 1 and rope.kind in ("pi", "yarn", "llama3") and not allow_idle:
        yield (
            f"factor: given 1, with which kind {rope.kind!r} changes nothing; set the new length / the trained "
            "length, more than 1, or kind: none"
        )
    if rope.kind not in ("yarn", "llama3", "longrope"):
        return
    if rope.original_seq_len is None:
        yield f"original_seq_len: missing; kind {rope.kind} needs the length that was trained before"
    yield from longrope_problems(rope, width)
    if rope.kind != "longrope" and rope.fast_turns <= rope.beta_slow:
        yield f"beta_fast: given {rope.fast_turns:g}; allowed: more than beta_slow, {rope.beta_slow:g}"


def _stage_section_problems(stages: Sequence[StageConfig]) -> Iterator[str]:
    for name, count in Counter(stage.name for stage in stages).items():
        if count > 1:
            where = " and ".join(f"stages[{index}].name" for index, stage in enumerate(stages) if stage.name == name)
            yield f"{where}: given {name!r} {count} times; stage names must differ"
    for index, stage in enumerate(stages):
        if stage.name in NAMED_NUMBERS:
            yield f"stages[{index}].name: given {stage.name!r}, which logs write for a number; allowed: another name"
        if len(stage.given_members) > 1:
            yield f"stages[{index}].{' and '.join(stage.given_members)}: given together; allowed: one objective"


def _objective_problems(config: RunConfig, stages: Sequence[Stage]) -> Iterator[str]:
    for stage in stages:
        name, options = stage.objective or ("", None)
        for text in OBJECTIVES[name].problems(options, config, stage.attention) if name else ():
            yield f"stages[{stage.index}].{name}{text}"


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    run_schedule = config.optim.schedule
    spans = []
    for index, stage in enumerate(config.stages):
        batch = stage.batch_tokens or config.batch_tokens
        spans.append(-(-stage.tokens // batch) * batch)
        if stage.schedule is not None:
            path = f"stages[{index}].schedule"
            yield from _shape_problems(stage.schedule, path)
            yield from _span_problems(stage.schedule, path, spans[-1], f"stage {stage.name!r}")
        elif stage.lr is not None:
            # With an lr of its own the stage runs the recipe's schedule over its own tokens.
            where = f"stage {stage.name!r}, whose lr starts the schedule again"
            yield from _span_problems(run_schedule, "optim.schedule", spans[-1], where)
    yield from _shape_problems(run_schedule, "optim.schedule")
    yield from _span_problems(run_schedule, "optim.schedule", sum(spans), "the run")


def _span_problems(schedule: ScheduleConfig, path: str, span: int, name: str) -> Iterator[str]:
    parts = {"warmup_tokens": schedule.warmup_tokens, "decay_tokens": schedule.decay_tokens}
    given = [f"{key} {tokens}" for key, tokens in parts.items() if tokens]
    if sum(parts.values()) > span:
        yield f"{path}: {' + '.join(given)} do not fit in the {span} tokens of {name}; lower them"


def _shape_problems(schedule: ScheduleConfig, path: str) -> Iterator[str]:
    if schedule.kind == "wsd" and not schedule.decay_tokens:
        yield f"{path}.decay_tokens: missing; kind wsd needs the length of its final decay (> 0)"
    if schedule.kind != "wsd" and schedule.decay_tokens:
        given = f"given {schedule.decay_tokens}, which kind {schedule.kind!r} does not use"
        yield f"{path}.decay_tokens: {given}; remove it or set kind: wsd"


def _fallback_problems(run_dir: str, fallback_dir: str | None) -> Iterator[str]:
    if fallback_dir is not None and Path(os.path.abspath(fallback_dir)).is_relative_to(os.path.abspath(run_dir)):
        yield (
            f"checkpoint.fallback_dir: given {fallback_dir!r}, inside run_dir {run_dir!r}, which fails with it; "
            "give a folder elsewhere, best on another disk"
        )


def _save_problems(config: RunConfig) -> Iterator[str]:
    """Checkpoints that a reaction to spikes, copies elsewhere or the choice of the best ones needs and that are not
    saved, or not evaluated; an address whose newest copy a run would take instead of the one that it begins with."""
    checkpoint, every = config.checkpoint, config.checkpoint.every
    if every is None and config.health.spike.reaction == "rollback":
        yield "health.spike.reaction: given 'rollback', which needs checkpoints; set checkpoint.every, which is null"
    if every is None:
        for name, *_ in checkpoint.asked_for():
            yield f"checkpoint.{name}: given, but checkpoint.every is null; set it, or checkpoint.{name} to null"
    addresses = {name: getattr(setting, "address", "") for name, _, setting in checkpoint.asked_for()}
    source, copies = addresses.get("resume_from", ""), addresses.get("upload")
    if copies in (source, source.rpartition("/step_")[0]):
        yield f"checkpoint.upload: given {copies}, where checkpoint.resume_from reads; give another address"
    if not checkpoint.keep_best:
        return
    given = f"checkpoint.keep_best: given {checkpoint.keep_best}"
    if not config.data.validation:
        yield f"{given}, but there is no data.validation to tell the best by; add one, or set it to 0"
    elif every is None:
        yield f"{given}, but no checkpoints are saved: checkpoint.every is null; set it, or checkpoint.keep_best to 0"
    elif every % config.evaluation.every:
        yield (
            f"{given}, but not every checkpoint is evaluated: checkpoint.every {every} must be a multiple of "
            f"evaluation.every {config.evaluation.every}"
        )
    for index, stage in enumerate(config.stages):
        if not stage.evaluate:
            yield f"{given}, but not every checkpoint is evaluated: stages[{index}].evaluate is false; set it to true"
