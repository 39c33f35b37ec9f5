"""Import of a Hugging Face folder as a checkpoint with a recipe to extend, and export of a checkpoint as such a folder.

Both hold one tensor, or one file of tensors, at a time, and leave no folder behind when they fail or are interrupted.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from moba_train.attention.kind import AttentionKind
from moba_train.checkpoint import publish
from moba_train.checkpoint.index import Part
from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.manifest import verify_checkpoint
from moba_train.checkpoint.writer import ShardFile, write_checkpoint
from moba_train.config.explain import given
from moba_train.config.load import dump_config
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.data.tokenizer import TOKENIZERS
from moba_train.errors import CheckpointError
from moba_train.foreign_files import folder_roots, working_roots
from moba_train.mechanisms.experts.upcycle import upcycled, upcycled_weight
from moba_train.model.build import build_attention
from moba_train.model.spec import ModelSpec, kind_of_parameter, kind_prefix
from moba_train.output_files import write_new
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.convert.adapters import MergedReader
from moba_train.tools.convert.hf_export import (
    check_new_folder,
    full_entry,
    hf_config,
    layer_entry,
    layer_problem,
    new_folder,
    published_entry,
    read_layers,
    write_safetensors,
)
from moba_train.tools.convert.hf_tokenizer import copy_tokenizer, export_tokenizer
from moba_train.tools.convert.model_card import CARD, model_card
from moba_train.tools.convert.with_code import code_config, code_families, code_problems, write_code
from moba_train.tools.hf.config import CONFIG, read_family, read_length, read_model_config
from moba_train.tools.hf.family import OF_FAMILIES, Family, family_of
from moba_train.tools.hf.mxfp4 import open_weights
from moba_train.tools.hf.weights import buffer_shapes, check_hf_weights, fused_tensors, parameter_shapes, places
from moba_train.tools.inference.corpus_marks import corpus_marks
from moba_train.tools.saved_recipe import SavedRun
from moba_train.tools.text_tokenizer import load_text_tokenizer

RECIPE = "recipe.yaml"


def import_from_hf(folder: Path, output: Path, experts: int | None = None, active: int | None = None) -> list[str]:
    """Write `output`: a checkpoint (float32, without optimizer state) of the model in `folder`, its tokenizer, and
    recipe.yaml, to be extended by a run. With `experts`, each layer gets this number of copies of its feed-forward, of
    which `active`, or 2, are active for a token (`mechanisms/experts/upcycle.py`). Returns the keys of config.json that
    nothing has read.

    Holds one parameter at a time. Raises CheckpointError when our Transformer does not implement the model, or `output`
    is not empty or cannot be written; DataError when the tokenizer cannot be loaded.
    """
    if experts is None and active is not None:
        raise CheckpointError(f"--active: given {active} without --experts; allowed: with it")
    model = read_model_config(folder)
    family, contents = read_family(folder)
    files = open_weights(folder)
    run = resolve_unchecked(imported_recipe(folder, output))
    kinds = build_attention(run.stages[0].attention, model.head_width)
    of_kinds = _kind_shapes(run.setup.spec, kinds)
    shapes = parameter_shapes(model) | buffer_shapes(model, family) | of_kinds
    check_hf_weights(shapes, files)
    place_of = places(contents, family, shapes)
    if experts is not None:
        model = upcycled(model, experts, active or 2)
        shapes = parameter_shapes(model) | of_kinds

    def read(name: str) -> Tensor:
        return place_of[name].read(files).float()

    def value(name: str) -> Tensor:
        return read(name) if experts is None else upcycled_weight(name, shapes[name], model, read)

    values = _recipe_values(folder, output, model)
    if tokenizer := _tokenizer(folder):
        load_text_tokenizer(folder / tokenizer, folder_roots(folder))
    with new_folder(output):
        copy_tokenizer(folder, output, folder_roots(folder))
        checkpoints = output / "checkpoints"
        checkpoints.mkdir()
        temporary = publish.make_temporary_folder(checkpoints, 0)
        _save_weights(temporary, shapes, value, dump_config(RunConfig.model_validate(values)))
        text = yaml.safe_dump(values, sort_keys=False)
        write_new(output / RECIPE, f"# From {folder}. Extend this; give data and stages of your own.\n{text}")
    return family.unread(contents)


def _save_weights(
    temporary: Path, shapes: Mapping[str, tuple[int, ...]], value: Callable[[str], Tensor], recipe: str
) -> None:
    """Write a checkpoint of step 0 with this recipe, as YAML, into `temporary`, and publish it. value: of the parameter
    of a name, float32."""
    parts = (Part(f"model.{name}", torch.float32, shape, (0,) * len(shape), shape) for name, shape in shapes.items())
    written = write_checkpoint(
        temporary,
        [ShardFile.from_parts("rank_0_0.safetensors", parts)],
        lambda part: value(part.name.removeprefix("model.")),
        {"progress": {"step": 0, "stage": 0}, "config": recipe},
    )
    publish.publish(temporary, 0, written)


def imported_recipe(folder: Path, output: Path) -> RunConfig:
    """Recipe of the model in `folder` with its tokenizer in `output`. Its corpora are placeholders.

    Raises CheckpointError when our Transformer does not implement the model.
    """
    return RunConfig.model_validate(_recipe_values(folder, output, read_model_config(folder)))


def _recipe_values(folder: Path, output: Path, model: ModelConfig) -> dict[str, Any]:
    """Contents of a recipe for `model`, that of `folder`, in `output`, with its tokenizer there, and placeholders for
    its corpora."""
    length = read_length(folder)
    # Also for ".", and with hyphens for characters that the name of a run may not have.
    name = re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(os.path.abspath(output))) or "imported"
    recipe: dict[str, Any] = {
        "name": name,
        "run_dir": f"runs/{name}",
        "init_from": str(output),
        "model": model.model_dump(exclude_defaults=True),
        "attention": read_layers(folder),
        "data": {"train": [{"path": str(output / "corpus")}]},
        "batch_tokens": length,
        "stages": [{"name": "imported", "seq_len": length, "tokens": length}],
    }
    if tokenizer := _tokenizer(folder):
        recipe["data"]["tokenizer"] = str(output / tokenizer)
    return recipe


def _tokenizer(folder: Path) -> str | None:
    """Name of the tokenizer's file in `folder`; None without one."""
    return next((name for name in TOKENIZERS if (folder / name).is_file()), None)


def export_to_hf(
    saved: SavedRun,
    output: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    with_code: bool = False,
    model_type: str | None = None,
) -> list[str]:
    """Write `output`, a Hugging Face folder with the model of a checkpoint.

    Holds the tensors of one file of at most `shard_bytes`, and one parameter. RoPE, sequence length and attention are
    those of the stage that the checkpoint was saved in. config.json keeps the attention of every layer under `moba`;
    software that ignores the entry sees an ordinary model with full attention, or with the windows of its family. With
    `with_code` the folder also has the parameters of the attention kinds and the code that runs them in transformers.
    With `model_type` it is a model of this published family, attention and its parameters included.
    The tokenizer's files are those that transformers expects; README.md is a model card. Returns a warning for each
    thing that is left out.

    Raises CheckpointError when `output` is not empty or cannot be written, no Hugging Face architecture has the model's
    shape or, where it is asked for, its attention, an attention kind would lose something or the code cannot run it, a
    tensor is missing in the checkpoint, or a byte of it has changed since it was written.
    """
    if with_code and model_type is not None:
        raise CheckpointError(f"--as: given {model_type!r} with --with-code; allowed: one of the two")
    checkpoint = saved.path
    config = saved.config
    stage = saved.stage
    kinds = build_attention(stage.attention, config.model.head_width)
    whole = with_code or model_type is not None
    own = [layer_entry(kind) if kind.name in OF_FAMILIES or kind.projects(kind.options) else {} for kind in kinds]
    attention = [] if with_code else own
    # Without code, kinds with parameters are those of an architecture that has them, or there is a problem.
    of_kinds = _kind_shapes(saved.spec, kinds)
    families = code_families(bool(of_kinds)) if with_code else ()
    if model_type is not None:
        family_of(model_type)
        families = (model_type,)
        attention = [published_entry(kind) for kind in kinds]
    dtype_name = str(dtype).removeprefix("torch.")
    contents = hf_config(config.model, stage.rope, stage.seq_len, dtype_name, attention, families)
    family = family_of(contents["model_type"])
    problems = _export_problems(saved.spec, kinds, whole)
    if model_type is not None:
        problems += _attention_problems(family, contents, attention)
    if with_code:
        problems += code_problems(kinds, stage.rope.by_layer(config.model.layers))
    if problems:
        raise CheckpointError(f"{checkpoint} cannot be exported: {'; '.join(problems)}")
    layers = [full_entry(kind) if whole else layer_entry(kind) for kind in kinds]
    contents["moba"] = contents.get("moba", {}) | {"layers": layers}
    if with_code:
        contents |= code_config(family)
    buffers = buffer_shapes(config.model, family)
    shapes = parameter_shapes(config.model) | buffers | of_kinds
    check_new_folder(output)
    verify_checkpoint(checkpoint)
    reader = _reader(checkpoint, shapes) if saved.spec.adapters is None else MergedReader(saved)
    roots = working_roots()
    marks = corpus_marks(saved, roots)
    tokenizer = export_tokenizer(config.data.tokenizer, marks, contents["model_type"], stage.seq_len, roots)
    contents |= tokenizer.ids
    with new_folder(output):
        for name, content in tokenizer.files.items():
            write_new(output / name, content)
        if with_code:
            write_code(output)
        elsewhere = [] if with_code else family.attention(family.completed(contents))
        write_new(output / CARD, model_card(saved, kinds, dtype_name, with_code, family.needs_code, elsewhere))
        place_of = places(contents, family, shapes)
        write_safetensors(output, fused_tensors(place_of, shapes, _reads(reader, dtype, buffers)), shard_bytes)
        if isinstance(reader, MergedReader):
            reader.check()
        # Written last: a folder without it is not read as a model.
        write_new(output / CONFIG, json.dumps(contents, indent=2) + "\n")
    return [*tokenizer.warnings, *family.cautions(contents)]


def _kind_shapes(spec: ModelSpec, kinds: Sequence[AttentionKind]) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of each layer's attention kind, by our names."""
    return {
        f"{kind_prefix(layer, kind)}{name}": tuple(shape)
        for (layer, kind), shapes in spec.kind_shapes.items()
        if kind == kinds[layer].name
        for name, shape in shapes.items()
    }


def _attention_problems(
    family: Family, contents: Mapping[str, Any], attention: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """The first layer whose attention the family's config cannot say."""
    said = family.attention(family.completed(contents))
    for layer, (own, found) in enumerate(zip(attention, said, strict=True)):
        for key in [key for key in {**own, **found} if own.get(key) != found.get(key)][:1]:
            yield (
                f"attention of layer {layer}: {key} is {given(own.get(key))}; {contents['model_type']} has "
                f"{given(found.get(key))}"
            )
            return


def _export_problems(spec: ModelSpec, kinds: Sequence[AttentionKind], whole: bool) -> list[str]:
    """Losses of an export: those of the `kinds` of the stage, and parameters of kinds that only other stages use."""
    problems = {} if whole else dict.fromkeys(layer_problem(kind, spec.config) for kind in kinds)
    active = {kind.name for kind in kinds}
    left: Counter[str] = Counter()
    for (_, name), shapes in spec.kind_shapes.items():
        left[name] += len(shapes)
    for name, tensors in left.items():
        if name not in active:
            problems[f"kind {name!r} of another stage left {tensors} parameter tensors in the model"] = None
    return [problem for problem in problems if problem]


def _reader(checkpoint: Path, shapes: Mapping[str, tuple[int, ...]]) -> CheckpointReader:
    """Reader of a checkpoint that has parameters of these shapes. Raises CheckpointError when one is missing or has
    another shape."""
    reader = CheckpointReader(checkpoint)
    problems = []
    for name, shape in shapes.items():
        saved = reader.tensors.get(f"model.{name}")
        if saved is None:
            problems.append(f"{name} is not in its index")
        elif (saved.shape, saved.dtype) != (shape, torch.float32):
            problems.append(f"{name} is {list(saved.shape)} {saved.dtype}, must be {list(shape)} float32")
    for name in reader.tensors:
        ours = name.removeprefix("model.")
        is_buffer = ours != name and ours not in shapes and not kind_of_parameter(ours)
        if is_buffer and reader.read(name).any():  # as the biases of the choice of experts
            problems.append(f"{ours} is not zero, and ordinary models lack it; add --with-code")
    if problems:
        raise CheckpointError(f"{checkpoint} cannot be exported: {'; '.join(problems[:20])}; use another checkpoint")
    return reader


def _reads(reader: CheckpointReader, dtype: torch.dtype, buffers: Container[str]) -> Callable[[str], Tensor]:
    """Reader of a parameter in this dtype by its name, and of buffers as they are. Raises CheckpointError for values
    beyond the dtype's range."""

    def read(name: str) -> Tensor:
        value = reader.read(f"model.{name}")
        if name in buffers:  # biases of the choice of experts: their differences are less than a step of 16 bits
            return value
        found = value.to(dtype)
        if found.isinf().any() and not value.isinf().any():
            most = torch.finfo(dtype).max
            raise CheckpointError(
                f"--dtype {str(dtype).removeprefix('torch.')}: {name} has values up to {value.abs().max():g}; allowed: "
                f"at most {most:g}; take bfloat16 or float32"
            )
        return found

    return read
