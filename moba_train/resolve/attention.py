"""Problems of the attention of a recipe's layers; each kind is asked for its own."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

import torch

from moba_train.attention.kind import StageContext
from moba_train.attention.registry import KINDS
from moba_train.config.attention import AttentionConfig, LayerAttention, merge_attention, resolve_layers
from moba_train.config.layers import layer_ids
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import merge_parallel
from moba_train.errors import ConfigError, named_layers
from moba_train.model.spec import describe_shapes

_THESE_LAYERS = "in these layers"
"""Stands for the layers in a kind's problem until all layers with that problem are known."""


def attention_problems(config: RunConfig, device: str | None, *, allow_idle: bool, training: bool) -> Iterator[str]:
    """Unknown kinds, layers and options of the recipe's attention and of the stages' own, and limits of the kinds on
    `device`; with `allow_idle` without options that no layer reads, without `training` only what evaluation needs."""
    model, recipe = config.model, config.attention
    try:
        resolve_layers(recipe, model.layers)
        recipe_problems: list[str] = []
    except ConfigError as error:
        recipe_problems = error.problems
    yield from (f"attention.{problem}" for problem in recipe_problems)
    used: dict[int, set[str]] = defaultdict(set)
    all_resolved = not recipe_problems
    shapes: dict[tuple[str, int], tuple[str, dict[str, torch.Size]]] = {}
    for index, stage in enumerate(config.stages):
        merged = merge_attention(recipe, stage.attention)
        try:
            layers = resolve_layers(merged, model.layers)
        except ConfigError as error:
            all_resolved = False
            inherited = set(recipe_problems)
            yield from (f"stages[{index}].attention.{text}" for text in error.problems if text not in inherited)
        else:
            parallel = merge_parallel(config.parallel, stage.parallel)
            sizes = stage.seq_len, parallel.cp, parallel.tp
            context = StageContext(model, *sizes, config.deterministic, device, _THESE_LAYERS, training)
            yield from _kind_problems(context, layers, index)
            yield from _parameter_problems(model, config.parallel.tp, stage.name, layers, index, shapes)
            for layer, attention in enumerate(layers):
                used[layer].add(attention.kind)
            if stage.attention is not None and not allow_idle:
                own = {layer: {attention.kind} for layer, attention in enumerate(layers)}
                yield from _unused_options(stage.attention, own, f"stages[{index}].attention", "in this stage")
    if all_resolved and not allow_idle:
        yield from _unused_options(recipe, used, "attention", "in all stages")


def _unused_options(given: AttentionConfig, used: Mapping[int, Set[str]], path: str, where: str) -> Iterator[str]:
    """Options in the `overrides` of a layer that none of the kinds it has in these stages (`used`) knows.

    Those that are null are no problem: so a recipe takes back what it extends."""
    for layer, override in given.overrides.items():
        layers = layer_ids([layer] if isinstance(layer, int) else layer, 1 + max(used, default=0))
        kinds = sorted(set().union(*(used.get(number, ()) for number in layers)))
        known = {"kind"}.union(*(KINDS[kind].Options.model_fields for kind in kinds))
        for key, value in (override or {}).items():
            if kinds and key not in known and value is not None:
                yield (
                    f"{path}.overrides.{layer}.{key}: given {value!r}, but layer {layer} is "
                    f"{' or '.join(map(repr, kinds))} {where}, which has no such option; remove it (null, if an "
                    "extended recipe gives it) or set kind"
                )


def _kind_problems(context: StageContext, layers: Sequence[LayerAttention], index: int) -> Iterator[str]:
    groups: dict[LayerAttention, list[int]] = {}
    for layer, attention in enumerate(layers):
        groups.setdefault(attention, []).append(layer)
    layers_of: dict[str, list[int]] = {}
    for attention, ids in groups.items():
        for problem in KINDS[attention.kind].problems(attention.options, context):
            section = "" if problem.startswith("parallel.") else f"attention.{attention.kind}."
            layers_of.setdefault(f"stages[{index}].{section}{problem}", []).extend(ids)
    for text, ids in layers_of.items():  # said once, also where the layers have different options
        yield text.replace(_THESE_LAYERS, f"in {named_layers(ids)}")


def _parameter_problems(
    model: ModelConfig,
    tp: int,
    name: str,
    layers: Sequence[LayerAttention],
    index: int,
    shapes: dict[tuple[str, int], tuple[str, dict[str, torch.Size]]],
) -> Iterator[str]:
    """Parameters of a kind that would have another shape than in an earlier stage, or that tensor parallelism cannot
    cut. name: of the stage. `shapes`: by kind and layer, the stage that used it first and the shapes there; extended
    here."""
    reported: set[str] = set()
    for layer, attention in enumerate(layers):
        with torch.device("meta"):
            module = KINDS[attention.kind].parameters(attention.options, model, layer)
        if attention.kind in reported:
            continue
        here = {name: parameter.shape for name, parameter in module.named_parameters()} if module else {}
        first, before = shapes.setdefault((attention.kind, layer), (name, here))
        if here != before:
            reported.add(attention.kind)
            yield (
                f"stages[{index}].attention.{attention.kind}: gives layer {layer} parameters {describe_shapes(here)}, "
                f"but in stage {first!r} they are {describe_shapes(before)}; the options that shape them must be the "
                "same in all stages"
            )
        elif here and tp > 1 and not hasattr(module, "tensor_style"):
            reported.add(attention.kind)
            yield (
                f"parallel.tp: given {tp}, but kind {attention.kind!r} in stage {name!r} has "
                "parameters of its own, which tensor parallelism does not cut; set tp: 1"
            )
