"""`config.json` of a Hugging Face model as our `model` section; the families (family.py) know their keys."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.base import SAVED
from moba_train.config.explain import explain, given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.foreign_files import folder_roots, read_foreign_json
from moba_train.model.rope import longrope_problems
from moba_train.tools.hf.family import Family, family_of

CONFIG = "config.json"
LONGEST = 1 << 40
"""Longest sequence that a config.json may give, in tokens."""


def is_hf_folder(folder: Path) -> bool:
    """True if `folder` looks like a Hugging Face model."""
    return (folder / CONFIG).is_file()


def read_family(folder: Path) -> tuple[Family, dict[str, Any]]:
    """The family of the model in `folder`, and the contents of its config.json, `Family.completed`.

    Raises CheckpointError unless it is a Hugging Face model of a type that our Transformer implements.
    """
    path = folder / CONFIG
    if not path.exists():
        raise CheckpointError(f"{folder}: not a Hugging Face model: there is no {CONFIG}")
    try:
        config = read_foreign_json(path, roots=folder_roots(folder))
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError("there is no model_type")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a Hugging Face model's config ({error})") from error
    try:
        family = family_of(config["model_type"])
        return family, family.completed(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_length(folder: Path) -> int:
    """Tokens of the longest sequence of the model in `folder`. Raises CheckpointError as `read_family`, and where it is
    none."""
    length = read_family(folder)[1]["max_position_embeddings"]
    if type(length) is not int or not 1 <= length <= LONGEST:
        raise CheckpointError(
            f"{folder / CONFIG}: max_position_embeddings is {given(length)}; allowed: integer >= 1 and <= {LONGEST}"
        )
    return length


def read_model_config(folder: Path) -> ModelConfig:
    """The `model` section for the Hugging Face model in `folder`.

    Raises CheckpointError, naming the key, for a model that our Transformer does not implement.
    """
    path = folder / CONFIG
    family, config = read_family(folder)
    try:
        # First the numbers, within their bounds: families make lists of this length.
        numbers = ModelConfig.model_validate({ours: config[theirs] for ours, theirs in family.same.items()})
        for ours, key in family.same.items():  # pydantic takes 2.0 and "2" for whole numbers, and families do not
            if type(getattr(numbers, ours)) is int and type(config[key]) is not int:
                raise CheckpointError(f"{key} is {given(config[key])}, allowed: integer")
        model = ModelConfig.model_validate(family.values(config), context=SAVED)
        if model.head_width < 1:
            raise CheckpointError(f"num_attention_heads is {model.heads}, allowed: at most hidden_size")
        for layer, entry in enumerate(family.attention(config)):
            parse_layer(entry or {"kind": "full"}, f"attention of layer {layer}")
        ropes = dict.fromkeys(model.rope.by_layer(model.layers))
        if problems := [f"model.rope.{text}" for rope in ropes for text in longrope_problems(rope, model.head_width)]:
            raise CheckpointError("; ".join(problems))
        return model
    except ValidationError as error:
        raise CheckpointError(f"{path}: {'; '.join(explain(error, ModelConfig, family.same))}") from None
    except (ArithmeticError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_layer(entry: dict[str, Any], where: str = f"{CONFIG}: moba.layers") -> LayerAttention:
    """Attention of a layer from its entry, the kind and its options. Raises CheckpointError, which names the place, for
    other entries."""
    try:
        options = KINDS[entry["kind"]].Options
        values = {key: value for key, value in entry.items() if key != "kind"}
        return LayerAttention(entry["kind"], options.model_validate(values, context=SAVED))
    except ValidationError as error:
        raise CheckpointError(f"{where}: {'; '.join(explain(error, options))}") from None
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: {given(entry)} is no entry of the kinds {', '.join(KINDS)}") from error


def moba_layers(config: dict[str, Any], folder: Path, layers: int) -> list[Any]:
    """Entries of the layers in `moba` of config.json in `folder`, for `parse_layer`; none in models of others. Raises
    CheckpointError where it is no list, or has more than `layers`, those of the model."""
    moba = config.get("moba") or {}
    entries = moba.get("layers", []) if isinstance(moba, dict) else None
    if not isinstance(entries, list) or len(entries) > layers:
        raise CheckpointError(
            f"{folder / CONFIG}: moba is {given(moba)}; allowed: {{'layers': a list of at most {layers} entries}}"
        )
    return entries
