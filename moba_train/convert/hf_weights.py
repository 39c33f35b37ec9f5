"""Weights from a Hugging Face folder into a model that exists, sharded or not, a tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moba_train.config.model import ModelConfig
from moba_train.convert.hf_names import hf_name
from moba_train.convert.safetensors_folder import SafetensorsFolder
from moba_train.errors import CheckpointError
from moba_train.model.build import kind_of_parameter
from moba_train.model.transformer import Transformer

_DERIVED = ("rotary_emb.inv_freq",)
"""Endings of tensors in old files that are not weights: their values follow from the config."""
_OUTPUT = hf_name("output.weight")
_EMBEDDING = hf_name("embedding.weight")
_ROWS = 4096


@torch.no_grad()
def load_hf_weights(model: nn.Module, folder: Path) -> None:
    """Fill the parameters of a `Transformer`, plain tensors or DTensors, from the Hugging Face model in `folder`.

    Parameters of attention kinds, which no such model has, keep their values. Each rank reads the bytes of its own
    shards only, one tensor after the other, without communication; of a tied model that comes with a copy of its
    embedding, both in full first, to compare them.
    Raises CheckpointError with every tensor that is missing, superfluous or of another shape.
    """
    state: dict[str, Any] = get_model_state_dict(model)
    parameters = {name: value for name, value in state.items() if not kind_of_parameter(name)}
    files = SafetensorsFolder(folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if isinstance(model, Transformer) and not model.is_whole:
        shapes = parameter_shapes(model.config)
    check_hf_weights(shapes, files)
    for name, parameter in sorted(parameters.items(), key=lambda item: files.file_of(hf_name(item[0]))):
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            part = [slice(first, first + size) for first, size in zip(offset, shape, strict=True)]
            if parameter.to_local().numel():
                parameter.to_local().copy_(files.read(hf_name(name), part))
        else:
            parameter.copy_(files.read(hf_name(name)))


def check_hf_weights(shapes: Mapping[str, tuple[int, ...]], files: SafetensorsFolder) -> None:
    """Compare names and shapes of all parameters (ours) with the headers of `files`, and the embedding of a tied model
    with its copy, where `files` has one; raises CheckpointError."""
    wanted = {hf_name(name): shape for name, shape in shapes.items()}
    problems = [f"{name}: missing" for name in sorted(wanted.keys() - files.names)]
    known = {*wanted}
    if "output.weight" not in shapes and _OUTPUT in files.names:  # tied: it may come with a copy of its embedding
        known.add(_OUTPUT)
        # Software differs in which of two different ones it takes: transformers 5 the file's, 4 the embedding.
        if _EMBEDDING in files.names and not _equal(files, _OUTPUT, _EMBEDDING):
            problems.append(
                f"{_OUTPUT}: differs from {_EMBEDDING}, although tie_word_embeddings is true in config.json; set it to "
                f"false to keep both, or remove {_OUTPUT}"
            )
    problems += [
        f"{name}: the model of config.json has no such tensor"
        for name in sorted(files.names - known)
        if not name.endswith(_DERIVED)
    ]
    problems += [
        f"{name}: has shape {list(files.shape(name))}, the model of config.json has {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in files.names and files.shape(name) != shape
    ]
    if problems:
        shown = problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20)
        raise CheckpointError(
            f"{files.folder}: the weights are not those of its config.json:\n" + "\n".join(f"  - {p}" for p in shown)
        )


def _equal(files: SafetensorsFolder, one: str, other: str) -> bool:
    """Whether two matrices are equal, a part of their rows at a time."""
    if files.shape(one) != files.shape(other):
        return False
    parts = ([slice(first, first + _ROWS)] for first in range(0, files.shape(one)[0], _ROWS))
    return all(torch.equal(files.read(one, part).float(), files.read(other, part).float()) for part in parts)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model, by our names."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}
