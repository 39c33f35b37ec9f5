"""Initial weights of a new run, `init_from`: a Hugging Face folder or a checkpoint."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moba_train.attention.registry import KINDS
from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.publish import find_checkpoint, published
from moba_train.checkpoint.recipe import run_folder, saved_recipe, saved_stage, trained_tokenizer
from moba_train.checkpoint.state import load_model, parameter_sizes
from moba_train.config.attention import LayerAttention
from moba_train.config.explain import given
from moba_train.config.layers import layer_ids
from moba_train.config.model import LayerRope, ModelConfig
from moba_train.data.tokenizer import TOKENIZERS, tokenizer_hash
from moba_train.errors import CheckpointError
from moba_train.foreign_files import local_path
from moba_train.model.build import copy_full
from moba_train.model.spec import (
    ModelSpec,
    Shapes,
    describe_shapes,
    describe_sizes,
    different_shapes,
    kind_of_parameter,
    kind_prefix,
)
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import broadcast
from moba_train.registry import FEED_FORWARDS, WEIGHT_SOURCES
from moba_train.resolve.run import resolve_unchecked


class WeightSource(ABC):
    """Weights in a format that is not ours: a class and an entry point of the group `moba_train.weight_sources`."""

    @abstractmethod
    def matches(self, folder: Path) -> bool:
        """True if `folder` looks like a model in this format. The methods below raise CheckpointError where it is not
        one, or one that our Transformer cannot be."""

    @abstractmethod
    def model(self, folder: Path) -> ModelConfig:
        """The `model` section that describes the weights."""

    def length(self, folder: Path) -> int | None:
        """Tokens of the longest sequence that the weights were made for; None: unknown."""
        return None

    @abstractmethod
    def check(self, model: ModelConfig, folder: Path) -> None:
        """Compare the names and shapes in `folder` with those of the model."""

    @abstractmethod
    def load(self, model: Transformer, folder: Path) -> str:
        """Fill a model, sharded or not, and say in a phrase from what."""

    def kinds(self, folder: Path) -> Mapping[tuple[int, str], Shapes]:
        """Parameters of the attention kinds that `load` fills, by layer and kind."""
        return {}

    def warnings(self, folder: Path, layers: Sequence[LayerAttention]) -> Iterator[str]:
        """Sentences about a run that begins from `folder` with this attention in its layers."""
        return iter(())


def foreign_source(folder: Path) -> WeightSource | None:
    """The source of the weights in `folder`, if it looks like a model in a format that is not ours."""
    sources = (made() for made in WEIGHT_SOURCES.usable().values())
    return next((source for source in sources if source.matches(folder)), None)


def source_model(folder: Path) -> ModelConfig:
    """The model that `folder` holds, with the rotary embedding its weights were last trained with.

    `folder` is a Hugging Face model, a checkpoint of ours, or a run folder (its newest checkpoint). Raises UserError
    when it is none of these.
    """
    if source := foreign_source(folder):
        return source.model(folder)
    checkpoint, _held = find_checkpoint(folder)
    run = resolve_unchecked(saved_recipe(checkpoint))
    if run.setup.spec.adapters is not None:
        raise CheckpointError(f"{folder} holds adapters alone; merge them first: moba-train convert moba-to-hf")
    return run.setup.shape.model_copy(update={"rope": saved_stage(checkpoint, run.stages).rope})


def source_length(folder: Path) -> int | None:
    """Tokens of the longest sequence that the model in `folder` was made for; of a checkpoint, that of its stage and of
    those before with the same rotary embedding; None: unknown.

    Raises UserError as `source_model`.
    """
    if source := foreign_source(folder):
        return source.length(folder)
    checkpoint, _held = find_checkpoint(folder)
    stages = resolve_unchecked(saved_recipe(checkpoint)).stages
    saved = saved_stage(checkpoint, stages)
    return max(stage.seq_len for stage in stages[: saved.index + 1] if stage.rope == saved.rope)


def load_initial_weights(model: Transformer, folder: Path) -> str:
    """Fill `model`, sharded or not, from `folder` (see `source_model`). Called on all ranks; each reads its shards.

    Parameters of attention kinds that the folder's model does not have get what their kind derives from the layer's, or
    keep their initial values; those that `model` does not have are left out. Returns what was loaded, left out and
    begun again, as a sentence.

    Raises CheckpointError when the folder's model differs from `model`, or a byte of the checkpoint has changed since
    it was written.
    """
    foreign = foreign_source(folder)
    if foreign is None:
        folder, _held = find_checkpoint(folder)
        if dist.is_initialized():
            folder = broadcast(folder)  # where that run trains, ranks may find different ones
    if problems := list(model_differences(model.config, folder)):
        raise CheckpointError("\n".join(problems))
    adapters = model.adapters
    added = adapters.added if adapters is not None else frozenset()
    parameters = {name: size for name, size in parameter_sizes(model).items() if name not in added}
    own = {name for name in parameters if kind_of_parameter(name)}
    if foreign is not None:
        source = foreign.load(model, folder)
        filled = tuple(kind_prefix(*key) for key in foreign.kinds(folder))
        missing = {name for name in own if not name.startswith(filled)}
        left_out: set[str] = set()
    else:
        theirs = {kind_prefix(layer, kind) for layer, kind in _source_kinds(folder)}
        buffers = {name for name, _ in model.named_buffers()}  # those of which the checkpoint has none stay zero
        load_model(model, folder, optional=own | theirs | buffers, verify=True, without=added)
        source = f"the checkpoint {folder}"
        tensors = CheckpointReader(folder).tensors if own or theirs else {}
        saved = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
        missing = own - saved
        left_out = {name for name in saved - parameters.keys() if kind_of_parameter(name)}
    for name in sorted(missing):  # in one order on all ranks, which gather together
        kind = kind_of_parameter(name)
        layer, _, inside = name.partition(f".{kind}.")
        parameter = model.get_parameter(name)
        values = KINDS[kind].derived_values(inside, parameter.shape, model.config, model.get_submodule(layer))
        if values is not None:
            copy_full(parameter, values)
    if adapters is not None:
        adapters.begin()
    loaded = sum(size for name, size in parameters.items() if name not in missing)
    new: Counter[str] = Counter()
    for name in missing:
        new[kind_of_parameter(name)] += parameters[name]
    kept = f"; {describe_sizes(new)}, which are not there, begin again" if new else ""
    if left_out:
        kinds = ", ".join(sorted({kind_of_parameter(name) for name in left_out}))
        kept += f"; {len(left_out)} of attention kinds that no stage uses there ({kinds}) are left out"
    return f"{len(parameters) - len(missing)} tensors ({loaded:,} parameters) loaded from {source}{kept}"


def unread_folder(init_from: str | None, checkpoints: Sequence[Path]) -> Path | None:
    """The folder of `init_from` if a start of the run reads it.

    None where the recipe names none, where one of the folders `checkpoints` has a checkpoint of the run's own, and
    where they may have some that cannot be seen.
    """
    with suppress(UnreadableError):
        if init_from is not None and not any(map(published, checkpoints)):
            return local_path(init_from)
    return None


def left_out_kinds(spec: ModelSpec, folder: Path) -> dict[tuple[int, str], Shapes]:
    """Parameters of the attention kinds, by layer and kind, that the model in `folder` has and no stage uses; none
    where that is another model. Raises UserError as `source_model`."""
    if any(model_differences(spec.config, folder)):
        return {}
    return {key: shapes for key, shapes in _source_kinds(folder).items() if key not in spec.kind_shapes}


def initial_tokenizers(folder: Path) -> list[str]:
    """SHA-256 of the tokenizer of the model in `folder`, in each form that is known; none where it is not known. Raises
    UserError when the model cannot be read."""
    if foreign_source(folder) is None:
        checkpoint, _held = find_checkpoint(folder)
        if digest := trained_tokenizer(checkpoint):
            return [digest]
        folder = run_folder(checkpoint)  # of an imported model: its tokenizer lies there
    return [tokenizer_hash(folder / name) for name in TOKENIZERS if (folder / name).is_file()]


def _source_kinds(folder: Path) -> Mapping[tuple[int, str], Shapes]:
    """Parameters of the attention kinds of the model in `folder`, by layer and kind."""
    if source := foreign_source(folder):
        return source.kinds(folder)
    checkpoint, _held = find_checkpoint(folder)
    return resolve_unchecked(saved_recipe(checkpoint)).setup.spec.kind_shapes


def initial_problems(model: ModelConfig, spec: ModelSpec | None, folder: Path) -> Iterator[str]:
    """Problems of `init_from`, which names `folder`, in a run that has no checkpoints yet.

    spec: the model's parameters; None where the recipe has other problems, so that they are not known
    """
    if not folder.is_dir():
        yield (
            f"init_from: given {str(folder)!r}; there is no such folder (from {Path.cwd()}); allowed: a Hugging Face "
            "model that was downloaded before, a checkpoint or a run folder"
        )
        return
    try:
        differences = list(model_differences(model, folder))
        if len(differences) > 2 and foreign_source(folder):
            differences[-1] += (
                f"; `moba-train convert hf-to-moba {folder} OUTPUT` writes a recipe of this model to extend"
            )
        yield from differences
        if spec is not None and not differences:
            yield from _kind_differences(spec, folder)
        if (source := foreign_source(folder)) and not differences:
            source.check(model, folder)
    except CheckpointError as error:
        other = "" if foreign_source(folder) else "; nor is there a config.json, which a Hugging Face model has"
        yield f"init_from: {error}{other}"


def model_differences(model: ModelConfig, folder: Path) -> Iterator[str]:
    """Differences between the recipe's `model` and the model that `folder` holds, one text for each key."""
    ours = comparable(model)
    source = source_model(folder)
    theirs = comparable(source)
    for key in ours | theirs:
        value = theirs.get(key)
        if ours.get(key) != value:
            hint = "; a stage may change it, stages[i].rope" if key == "rope" else ""
            yield f"model.{key}: given {given(ours.get(key))}, but init_from ({folder}) has {given(value)}{hint}"
    kept = _buffers(model)
    yield from (
        f"model.{key}: init_from ({folder}) has {given(value)} and its buffers, which this recipe would drop; set that"
        for key, value in _buffers(source).items()
        if key not in kept
    )


def _buffers(model: ModelConfig) -> dict[str, Any]:
    """Keys of `model` that give its feed-forwards buffers, with their values."""
    return {
        f"{name}.{key}": value
        for name, options in model.given_members.items()
        for key, value in FEED_FORWARDS[name].adding_buffers(options).items()
    }


def _kind_differences(spec: ModelSpec, folder: Path) -> Iterator[str]:
    """Attention kinds whose parameters have other shapes in the recipe than in `folder`, one text for each kind."""
    reported: set[str] = set()
    for (layer, kind), shapes in _source_kinds(folder).items():
        theirs, ours = different_shapes(shapes, spec.kind_shapes.get((layer, kind), shapes))
        if (theirs or ours) and kind not in reported:
            reported.add(kind)
            yield (
                f"attention.{kind}: gives layer {layer} parameters {describe_shapes(ours)}, but in init_from "
                f"({folder}) they are {describe_shapes(theirs)}; the options that shape them must be those of that run"
            )


def comparable(model: ModelConfig) -> dict[str, object]:
    """Values of a `model` section that are equal where two models compute the same."""
    values = model.model_dump(exclude={"init_std"}) | {"head_dim": model.head_width}
    for name, options in model.given_members.items():
        del values[name]  # its keys stand by themselves, so that messages name them
        values |= {f"{name}.{key}": value for key, value in FEED_FORWARDS[name].function(options).items()}
        values[f"{name}.layers"] = sorted(layer_ids(options.model_dump()["layers"], model.layers))
    if all(map(model.feed_forward, range(model.layers))):
        del values["intermediate_size"]
    values["attention_scale"] = model.attention_scale or model.head_width**-0.5
    for key in ("sink_layers", "gate_layers", "bare_layers"):
        values[key] = sorted(layer_ids(values[key], model.layers))
    first, *rest = map(_angles, model.rope.by_layer(model.layers))
    return values | {"rope": first | {layer: angles for layer, angles in enumerate(rest, 1) if angles != first}}


def _angles(rope: LayerRope) -> dict[Any, object]:
    """Keys that determine a layer's angles, equal for equal angles."""
    if rope.kind == "nope":
        return {"kind": "nope"}
    found = rope.model_dump(include={*LayerRope.model_fields} - {"seq_len"}, exclude_defaults=True)
    if rope.kind in ("none", "abf"):  # two names for the same frequencies
        return {"theta": rope.theta, "fraction": rope.fraction}
    return found if rope.kind in ("pi", "longrope") else found | {"beta_fast": rope.fast_turns}
