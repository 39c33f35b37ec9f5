"""Initial weights of a new run, `init_from`: a Hugging Face folder or a checkpoint."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.publish import find_checkpoint, published
from moba_train.checkpoint.recipe import run_folder, saved_recipe, saved_stage, trained_tokenizer
from moba_train.checkpoint.state import load_model, parameter_sizes
from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.data.tokenizer import TOKENIZERS, tokenizer_hash
from moba_train.errors import CheckpointError
from moba_train.hf.config import CONFIG, read_model_config
from moba_train.hf.weights import SafetensorsFolder, check_hf_weights, load_hf_weights
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
from moba_train.registry import FEED_FORWARDS
from moba_train.resolve.run import resolve_unchecked


def is_hf_folder(folder: Path) -> bool:
    """True if `folder` looks like a Hugging Face model."""
    return (folder / CONFIG).is_file()


def source_model(folder: Path) -> ModelConfig:
    """The model that `folder` holds, with the rotary embedding its weights were last trained with.

    `folder` is a Hugging Face model, a checkpoint of ours, or a run folder (its newest checkpoint). Raises UserError
    when it is none of these.
    """
    if is_hf_folder(folder):
        return read_model_config(folder)
    checkpoint, _held = find_checkpoint(folder)
    run = resolve_unchecked(saved_recipe(checkpoint))
    return run.setup.shape.model_copy(update={"rope": saved_stage(checkpoint, run.stages).rope})


def load_initial_weights(model: Transformer, folder: Path) -> str:
    """Fill `model`, sharded or not, from `folder` (see `source_model`). Called on all ranks; each reads its shards.

    Parameters of attention kinds that the folder's model does not have keep their initial values; those that `model`
    does not have are left out. Returns what was loaded, left out and begun again, as a sentence.

    Raises CheckpointError when the folder's model differs from `model`, or a byte of the checkpoint has changed since
    it was written.
    """
    if not is_hf_folder(folder):
        folder, _held = find_checkpoint(folder)
        folder = broadcast(folder)  # where that run trains, ranks may find different ones
    if problems := list(model_differences(model.config, folder)):
        raise CheckpointError("\n".join(problems))
    parameters = parameter_sizes(model)
    own = {name for name in parameters if kind_of_parameter(name)}
    if is_hf_folder(folder):
        load_hf_weights(model, folder)
        source = f"the Hugging Face model {folder}"
        missing = own
        left_out: set[str] = set()
    else:
        theirs = {kind_prefix(layer, kind) for layer, kind in _source_kinds(folder)}
        load_model(model, folder, optional=own | theirs, verify=True)
        source = f"the checkpoint {folder}"
        tensors = CheckpointReader(folder).tensors if own or theirs else {}
        saved = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
        missing = own - saved
        left_out = {name for name in saved - parameters.keys() if kind_of_parameter(name)}
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
    if init_from is None:
        return None
    try:
        has_begun = any(map(published, checkpoints))
    except UnreadableError:
        has_begun = True
    return None if has_begun else Path(init_from)


def left_out_kinds(spec: ModelSpec, folder: Path) -> dict[tuple[int, str], Shapes]:
    """Parameters of the attention kinds, by layer and kind, that the model in `folder` has and no stage uses; none
    where that is another model. Raises UserError as `source_model`."""
    if any(model_differences(spec.config, folder)):
        return {}
    return {key: shapes for key, shapes in _source_kinds(folder).items() if key not in spec.kind_shapes}


def initial_tokenizers(folder: Path) -> list[str]:
    """SHA-256 of the tokenizer of the model in `folder`, in each form that is known; none where it is not known. Raises
    UserError when the model cannot be read."""
    if not is_hf_folder(folder):
        checkpoint, _held = find_checkpoint(folder)
        if digest := trained_tokenizer(checkpoint):
            return [digest]
        folder = run_folder(checkpoint)  # of an imported model: its tokenizer lies there
    return [tokenizer_hash(folder / name) for name in TOKENIZERS if (folder / name).is_file()]


def _source_kinds(folder: Path) -> Mapping[tuple[int, str], Shapes]:
    """Parameters of the attention kinds of the model in `folder`, by layer and kind."""
    if is_hf_folder(folder):
        return {}
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
        yield from differences
        if spec is not None and not differences:
            yield from _kind_differences(spec, folder)
        if is_hf_folder(folder) and not differences:
            check_hf_weights(model, SafetensorsFolder(folder))
    except CheckpointError as error:
        other = "" if is_hf_folder(folder) else f"; nor is there a {CONFIG}, which a Hugging Face model has"
        yield f"init_from: {error}{other}"


def model_differences(model: ModelConfig, folder: Path) -> Iterator[str]:
    """Differences between the recipe's `model` and the model that `folder` holds, one text for each key."""
    ours, theirs = _comparable(model), _comparable(source_model(folder))
    for key in ours | theirs:
        value = theirs.get(key)
        if ours.get(key) != value:
            hint = "; a stage may change it, stages[i].rope" if key == "rope" else ""
            yield f"model.{key}: given {given(ours.get(key))}, but init_from ({folder}) has {given(value)}{hint}"


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


def _comparable(model: ModelConfig) -> dict[str, object]:
    values = model.model_dump(exclude={"init_std"}) | {"head_dim": model.head_width}
    for name, options in model.given_feed_forwards.items():
        values[name] = FEED_FORWARDS[name].function(options)
    if all(map(model.feed_forward, range(model.layers))):
        del values["intermediate_size"]
    rope = model.rope.model_dump(exclude_defaults=True)
    if model.rope.kind in ("none", "abf"):
        rope = {"theta": model.rope.theta}  # two names for the same frequencies
    elif model.rope.kind != "pi":
        rope["beta_fast"] = model.rope.fast_turns
    return values | {"rope": rope}
