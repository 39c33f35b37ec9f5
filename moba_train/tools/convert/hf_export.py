"""The files of an exported Hugging Face folder: `config.json`, with each layer's attention, and weights.

A writer holds the tensors of one file. A folder is not left behind when its conversion fails or is interrupted.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moba_train.attention.kind import AttentionKind, parameter_count
from moba_train.config.explain import given
from moba_train.config.model import LayerRope, ModelConfig, RopeConfig
from moba_train.errors import CheckpointError
from moba_train.model.build import build_attention
from moba_train.output_files import write_new
from moba_train.registry import MODEL_FAMILIES
from moba_train.resolve.initial_weights import comparable
from moba_train.tools.hf.config import moba_layers, parse_layer, read_family, read_model_config
from moba_train.tools.hf.family import Family
from moba_train.tools.hf.files import INDEX, SINGLE
from moba_train.tools.hf.rope import ROPE_KEYS

_BACKENDS_OF_PARTS: dict[str, Any] = {"parts": {"__all__": {"options": {"backend"}}}}
"""Options of `by_group` that say how its parts are computed."""


def hf_rope(rope: LayerRope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a `config.json`. With yarn, transformers before 5 also goes by `hf_length`."""
    if rope.kind in ("none", "abf", "nope"):
        return {"rope_theta": rope.theta, "rope_scaling": None}
    rope_type = "linear" if rope.kind == "pi" else rope.kind
    values = rope.model_dump() | {"beta_fast": rope.fast_turns}
    scaling = {theirs: values[ours] for ours, theirs in ROPE_KEYS[rope_type].items()}
    if scaling.get("truncate"):
        del scaling["truncate"]  # the default, which older releases of transformers do not know
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope_type} | scaling}


def rope_section(rope: LayerRope) -> dict[str, Any]:
    """`rope` as transformers 5 reads it in `rope_parameters`."""
    found = hf_rope(rope)
    return {"rope_type": "default", "rope_theta": found["rope_theta"], **(found["rope_scaling"] or {})}


def hf_length(rope: RopeConfig, trained: int) -> int:
    """`max_position_embeddings` of a `config.json`, for a model whose last stage was `trained` tokens long.

    With yarn and longrope it is the length that the model is extended to, if that is more: transformers 4 takes this
    number over `original_max_position_embeddings` as the factor, and with a smaller number would rotate by other
    angles. A model that was trained on longer sequences gets a larger factor from transformers 4 in any case.
    """
    if rope.kind not in ("yarn", "longrope") or rope.original_seq_len is None:
        return trained
    return max(trained, round(rope.factor * rope.original_seq_len))


def hf_config(
    model: ModelConfig,
    rope: RopeConfig,
    max_length: int,
    dtype: str,
    attention: Sequence[Mapping[str, Any]] = (),
    families: Sequence[str] = (),
) -> dict[str, Any]:
    """Contents of `config.json` for `model` with `rope`, trained on sequences of `max_length` tokens.

    attention: of each layer, as `Family.attention` returns it; full in all layers if empty. The family is the first
    whose config says all of the model and of its attention, or else all of the model; one of `families`, or of those
    that need not be asked for.

    Raises CheckpointError for a shape that no Hugging Face architecture has, or the only one that is allowed.
    """
    model = model.model_copy(update={"rope": rope})
    layers = list(attention) or [{}] * model.layers
    partly: dict[str, Any] | None = None
    wanted = comparable(model)
    differing: dict[str, dict[str, object]] = {}
    for model_type, made in MODEL_FAMILIES.usable().items():
        family: Family = made()
        if model_type not in families if families else family.asked_for:
            continue
        try:
            contents = {
                "architectures": [family.architecture],
                "model_type": model_type,
                **{theirs: getattr(model, ours) for ours, theirs in family.same.items()},
                "head_dim": model.head_width,
                "max_position_embeddings": hf_length(rope, max_length),
                "pad_token_id": None,  # that of the tokenizer, if there is one; defaults may be beyond the vocabulary
                **({} if family.own_ropes else hf_rope(rope)),
                **family.written(model, layers),
                # Newer releases of transformers read the first, older ones the second.
                "dtype": dtype,
                "torch_dtype": dtype,
            }
            read = family.completed(contents)
            again = comparable(ModelConfig.model_validate(family.values(read)))
        except (CheckpointError, ValidationError) as error:
            if isinstance(error, CheckpointError) and len(families) == 1:
                raise CheckpointError(f"{model_type}: {error}") from None
            continue
        keys = [key for key in wanted | again if again.get(key) != wanted.get(key)]
        if not keys and family.heads_divide_width and model.hidden_size % model.heads:
            keys = ["heads"]
        differing[model_type] = {key: again.get(key) for key in keys}
        if not differing[model_type]:
            if family.attention(read) == layers:
                return contents
            if model.bare_layers == "none":  # the kinds of others have weights
                partly = partly or contents
    if partly is not None:
        return partly
    if not differing:
        raise CheckpointError("model.rope: no Hugging Face architecture has this rotary embedding")
    nearest = min(differing, key=lambda name: len(differing[name]))
    if [*differing[nearest]] == ["heads"]:
        raise CheckpointError(
            f"model.heads: given {model.heads}; allowed in an export as {MODEL_FAMILIES[nearest].architecture}: a "
            f"divisor of model.hidden_size ({model.hidden_size}), as transformers refuses other models of this kind"
        )
    found = sorted(differing[nearest].items())
    raise CheckpointError(
        f"{', '.join(f'model.{key}' for key, _ in found)}: no Hugging Face architecture has these values together; "
        f"{nearest} comes nearest, where "
        + ", ".join(f"{key} is {given(value)}, not {given(wanted.get(key))}" for key, value in found)
        + "; --with-code exports other models with their code"
    )


def read_layers(folder: Path) -> dict[str, Any]:
    """`attention` section of a recipe: the layers in config.json's entry `moba`, others as their family attends.

    The section's default is the attention of most layers, so that a recipe that extends it can give them another kind.
    """
    model = read_model_config(folder)
    family, config = read_family(folder)
    entries = moba_layers(config, folder, model.layers)
    rest = family.attention(config)[len(entries) :]
    entries = [*entries, *(entry or {"kind": "full"} for entry in rest)]
    layers = [full_entry(kind) for kind in build_attention(map(parse_layer, entries), model.head_width)]
    common = max(layers, key=layers.count)
    options = {key: value for key, value in common.items() if key != "kind"}
    overrides = {layer: entry for layer, entry in enumerate(layers) if entry != common}
    return {"default": common["kind"], "overrides": overrides} | ({common["kind"]: options} if options else {})


def layer_entry(kind: AttentionKind) -> dict[str, Any]:
    """A layer's entry in an exported config.json, as JSON values: what decides which keys it attends to."""
    left_out = dict.fromkeys(kind.facts.not_exported, True)
    return {"kind": kind.name, **kind.options.model_dump(mode="json", exclude=left_out | _BACKENDS_OF_PARTS)}


def full_entry(kind: AttentionKind) -> dict[str, Any]:
    """`layer_entry` with the options that give the kind parameters: of an export that has these."""
    return {"kind": kind.name, **kind.options.model_dump(mode="json", exclude={"backend": True} | _BACKENDS_OF_PARTS)}


def published_entry(kind: AttentionKind) -> dict[str, Any]:
    """A layer's attention as `Family.attention` returns it: nothing for full attention, and nothing of training."""
    entry = {key: value for key, value in full_entry(kind).items() if not key.startswith(("train_gate", "kl_"))}
    if "index_dim" in entry:
        entry["index_dim"] = entry["index_dim"] or kind.head_dim
    return {} if kind.name == "full" else entry


def layer_problem(kind: AttentionKind, model: ModelConfig) -> str:
    """Reason why a layer cannot be exported without loss: its kind has parameters. Empty if it has none, or those of a
    bare layer, for which `hf_config` finds an architecture or none."""
    count = parameter_count(kind, model)
    if not count or kind.projects(kind.options):
        return ""
    return f"kind {kind.name!r} has {count} parameters in a layer, which ordinary models lack; add --with-code"


def write_safetensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write `tensors` (names and CPU tensors) into files of at most `shard_bytes`; a larger tensor has its own file.

    `tensors` is consumed as it is written: no more than a file's worth is held. One file is `model.safetensors`,
    several get an index.
    """
    files: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    total = 0

    def write() -> None:
        # Final names contain the number of files, which is known only at the end.
        file = folder / _part(len(files))
        save_file(waiting, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors makes files that only their owner can read
        files.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and _bytes(tensor) + sum(map(_bytes, waiting.values())) > shard_bytes:
            write()
        waiting[name] = tensor.contiguous()
        total += _bytes(tensor)
    write()
    if len(files) == 1:
        (folder / _part(0)).rename(folder / SINGLE)
        return
    final = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for number, file in enumerate(final):
        (folder / _part(number)).rename(folder / file)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in zip(final, files, strict=True) for name in names},
    }
    write_new(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def check_new_folder(output: Path) -> None:
    """Raise CheckpointError when `output` is a file, or a folder that is not empty."""
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output}: is a file; give a new folder")
    if output.exists() and any(output.iterdir()):
        raise CheckpointError(f"{output}: is not empty; give a new folder")


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[None]:
    """Make `output`. When anything is raised inside, also by Ctrl-C, remove all that was written into it.

    Raises CheckpointError as `check_new_folder`, and when something cannot be written.
    """
    check_new_folder(output)
    existed = output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        _empty(output, existed)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{output}: cannot be written ({error})") from error
        raise


def _empty(output: Path, keep: bool) -> None:
    """Remove the contents of `output`, and `output` unless `keep`, as far as that is possible."""
    with contextlib.suppress(OSError):
        for path in output.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if not keep:
            output.rmdir()
