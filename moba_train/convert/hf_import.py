"""Import of a Hugging Face folder as a checkpoint, a tensor at a time, with a recipe to extend."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from moba_train.checkpoint import publish
from moba_train.checkpoint.index import Part
from moba_train.checkpoint.writer import ShardFile, write_checkpoint
from moba_train.config.explain import given
from moba_train.config.load import dump_config
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.convert.hf_config import CONFIG, read_config, read_layers, read_model_config
from moba_train.convert.hf_names import hf_name
from moba_train.convert.hf_weights import check_hf_weights, parameter_shapes
from moba_train.convert.new_folder import new_folder
from moba_train.convert.safetensors_folder import SafetensorsFolder
from moba_train.data.tokenizer import TOKENIZERS, copy_tokenizer, load_text_tokenizer
from moba_train.errors import CheckpointError
from moba_train.foreign_files import folder_roots

RECIPE = "recipe.yaml"
LONGEST = 1 << 40
"""Longest sequence that a config.json may give, in tokens."""


def import_from_hf(folder: Path, output: Path) -> None:
    """Write `output`: a checkpoint (float32, without optimizer state) of the model in `folder`, its tokenizer, and
    recipe.yaml, to be extended by a run.

    Holds one tensor at a time. Raises CheckpointError when our Transformer does not implement the model, or `output`
    is not empty or cannot be written; DataError when the tokenizer cannot be loaded.
    """
    model = read_model_config(folder)
    shapes = parameter_shapes(model)
    files = SafetensorsFolder(folder)
    check_hf_weights(shapes, files)
    length = _length(folder)
    layers = read_layers(folder)
    values = _recipe_values(folder, output, model, layers, length)
    if tokenizer := _tokenizer(folder):
        load_text_tokenizer(folder / tokenizer, folder_roots(folder))
    with new_folder(output):
        copy_tokenizer(folder, output, folder_roots(folder))
        checkpoints = output / "checkpoints"
        checkpoints.mkdir()
        _save_weights(publish.make_temporary_folder(checkpoints, 0), shapes, files, RunConfig.model_validate(values))
        text = yaml.safe_dump(values, sort_keys=False)
        (output / RECIPE).write_text(f"# From {folder}. Extend this; give data and stages of your own.\n{text}")


def _save_weights(
    temporary: Path, shapes: Mapping[str, tuple[int, ...]], files: SafetensorsFolder, config: RunConfig
) -> None:
    """Write a checkpoint of step 0 into `temporary`, and publish it."""
    parts = (Part(f"model.{name}", torch.float32, shape, (0,) * len(shape), shape) for name, shape in shapes.items())
    written = write_checkpoint(
        temporary,
        [ShardFile.from_parts("rank_0_0.safetensors", parts)],
        lambda part: files.read(hf_name(part.name.removeprefix("model."))).float(),
        {"progress": {"step": 0, "stage": 0}, "config": dump_config(config)},
    )
    publish.publish(temporary, 0, written)


def _length(folder: Path) -> int:
    """Sequence length of the model in `folder`."""
    length = read_config(folder).get("max_position_embeddings", 4096)
    if type(length) is not int or not 1 <= length <= LONGEST:
        raise CheckpointError(
            f"{folder / CONFIG}: max_position_embeddings is {given(length)}; allowed: integer >= 1 and <= {LONGEST}"
        )
    return length


def imported_recipe(folder: Path, output: Path) -> RunConfig:
    """The recipe of the model in `folder` with its tokenizer in `output`. Its corpora are placeholders.

    Raises CheckpointError when our Transformer does not implement the model.
    """
    values = _recipe_values(folder, output, read_model_config(folder), read_layers(folder), _length(folder))
    return RunConfig.model_validate(values)


def _recipe_values(
    folder: Path, output: Path, model: ModelConfig, layers: dict[str, Any], length: int
) -> dict[str, Any]:
    """What a recipe says about the model of `folder` in `output`, with its tokenizer there, and placeholders for its
    corpora."""
    # Of ".", too, and with hyphens for what the name of a folder may have and that of a run may not.
    name = re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(os.path.abspath(output))) or "imported"
    recipe: dict[str, Any] = {
        "name": name,
        "run_dir": f"runs/{name}",
        "init_from": str(output),
        "model": model.model_dump(exclude_defaults=True),
        "attention": layers,
        "data": {"train": [{"path": str(output / "corpus")}]},
        "batch_tokens": length,
        "stages": [{"name": "imported", "seq_len": length, "tokens": length}],
    }
    if tokenizer := _tokenizer(folder):
        recipe["data"]["tokenizer"] = str(output / tokenizer)
    return recipe


def _tokenizer(folder: Path) -> str | None:
    """Name of the tokenizer's file in `folder`; None: there is none."""
    return next((name for name in TOKENIZERS if (folder / name).is_file()), None)
