"""Weights of Hugging Face models: safetensors files, the place of each parameter in them, and loading.

The tensors are those of `model.transformer.Transformer` under other names. Some of ours are some rows of one of theirs
(`family.Fused`), and those of experts may be stacks of many. Rotary embeddings pair the two halves of a head on both
sides. Files: files.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError, named_layers
from moba_train.model.spec import Shapes, kind_of_parameter, kind_prefix, model_spec
from moba_train.model.transformer import Transformer
from moba_train.resolve.initial_weights import WeightSource
from moba_train.tools.hf.config import (
    CONFIG,
    is_hf_folder,
    moba_layers,
    parse_layer,
    read_family,
    read_length,
    read_model_config,
)
from moba_train.tools.hf.family import NUMBER, Family, Fused
from moba_train.tools.hf.files import SafetensorsFolder
from moba_train.tools.hf.mxfp4 import open_weights
from moba_train.torch_private import local_shape_and_offset

_DERIVED = ("rotary_emb.inv_freq",)
"""Endings of tensors in old files that are not weights: their values follow from the config."""
_ROWS = 4096


class Place(NamedTuple):
    """Rows of a tensor of theirs that are a parameter of ours, or a stack of tensors, if the name numbers them."""

    name: str
    shape: tuple[int, ...]
    """Shape of the parameter."""
    fused: Fused
    groups: int
    """Groups of rows of the tensor; each has some of the parameter."""
    first: int
    """Row in each group, where those of the parameter begin."""
    period: int
    """Rows of each group."""

    @property
    def names(self) -> list[str]:
        """Names of their tensors."""
        return [self.name.format(row) for row in range(self.shape[0])] if NUMBER in self.name else [self.name]

    @property
    def needed(self) -> dict[str, tuple[int, ...]]:
        """Shapes of their tensors."""
        if NUMBER in self.name:
            return dict.fromkeys(self.names, self.shape[1:])
        shape = [*self.shape]
        shape[self.fused.dim] = self.groups * self.period
        return {self.name: self.fused.theirs(shape, 1)}

    def read(self, files: SafetensorsFolder, own: Sequence[slice] = ()) -> Tensor:
        """The parameter on the CPU in the file's dtype, or these slices of it, one for each leading dimension."""
        part = [*own, *map(slice, self.shape[len(own) :])]
        first, *rest = part
        if NUMBER in self.name:
            return torch.stack([files.read(name, rest) for name in self.names[first]])
        rows = slice(part[self.fused.dim].start or 0, part[self.fused.dim].stop)
        width = self.shape[self.fused.dim] // self.groups
        # All of the groups that have some of these rows; without groups, no other rows.
        start = rows.start // width
        stop = -(-rows.stop // width)
        alone = self.groups == 1
        part[self.fused.dim] = (
            slice(self.first + rows.start, self.first + rows.stop)
            if alone
            else slice(start * self.period, stop * self.period)
        )
        found = self.fused.to_ours(files.read(self.name, self.fused.theirs(part, slice(0, 1))))
        if alone:
            return found
        in_groups = found.unflatten(self.fused.dim, (stop - start, self.period))
        all_rows = in_groups.narrow(self.fused.dim + 1, self.first, width).flatten(self.fused.dim, self.fused.dim + 1)
        return all_rows.narrow(self.fused.dim, rows.start - start * width, rows.stop - rows.start)


def places(config: Mapping[str, Any], family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Place of every parameter of a model, by our name, from the shapes of all of them in the model's order. config:
    contents of config.json."""
    of_theirs: dict[str, list[str]] = {}
    for ours in shapes:
        of_theirs.setdefault(family.name(ours), []).append(ours)
    found: dict[str, Place] = {}
    for theirs, parts in of_theirs.items():
        fused = family.fused_as(theirs)
        rows = [shapes[ours][fused.dim] for ours in parts]
        groups = 1 if fused.groups is None else config[fused.groups]
        first = 0
        for ours, own in zip(parts, rows, strict=True):
            found[ours] = Place(theirs, shapes[ours], fused, groups, first, sum(rows) // groups)
            first += own // groups
    return {ours: found[ours] for ours in shapes}


def fused_tensors(
    place_of: Mapping[str, Place], names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of theirs, with their names, that hold the parameters of these names of ours. read: gives a
    parameter."""
    of_theirs: dict[str, list[str]] = {}
    for ours in names:
        of_theirs.setdefault(place_of[ours].name, []).append(ours)
    for theirs, parts in of_theirs.items():
        place = place_of[parts[0]]
        if NUMBER in theirs:
            yield from zip(place.names, read(parts[0]), strict=True)
            continue
        dim = place.fused.dim
        in_groups = [read(ours).unflatten(dim, (place.groups, -1)) for ours in parts]
        yield theirs, place.fused.to_theirs(torch.cat(in_groups, dim + 1).flatten(dim, dim + 1))


@torch.no_grad()
def load_hf_weights(model: Transformer, folder: Path, with_kinds: bool = False) -> None:
    """Fill the parameters of a `Transformer`, plain tensors or DTensors, from the Hugging Face model in `folder`.

    Buffers keep their values, unless the family has them, and so do parameters of attention kinds, unless the folder
    has them (`with_kinds`). Each rank reads the bytes of its shards alone, one parameter after the other, without
    communication. If a tied model comes with a copy of its embedding, each rank first reads both in full, to compare
    them. Raises CheckpointError with every tensor that is missing, superfluous or of another shape.
    """
    files = open_weights(folder)
    state: dict[str, Any] = get_model_state_dict(model)
    # A stage of a pipeline has some of the names; the folder is checked against all of them, on every rank alike.
    family, contents = read_family(folder)
    shapes = parameter_shapes(model.config) | buffer_shapes(read_model_config(folder), family)
    shapes |= kind_shapes(model.config, folder)
    if with_kinds:
        shapes |= {name: tuple(value.shape) for name, value in state.items() if kind_of_parameter(name)}
    check_hf_weights(shapes, files)
    found = places(contents, family, shapes)
    here = [(state[name], place) for name, place in found.items() if name in state]
    for parameter, place in sorted(here, key=lambda item: files.file_of(item[1].names[0])):
        if isinstance(parameter, DTensor):
            shape, offset = local_shape_and_offset(parameter.shape, parameter.device_mesh, parameter.placements)
            part = [slice(first, first + size) for first, size in zip(offset, shape, strict=True)]
            if parameter.to_local().numel():
                parameter.to_local().copy_(place.read(files, part))
        else:
            parameter.copy_(place.read(files))


class HuggingFace(WeightSource):
    """A folder as transformers saves a model."""

    def matches(self, folder: Path) -> bool:
        """True if there is a config.json."""
        return is_hf_folder(folder)

    def model(self, folder: Path) -> ModelConfig:
        """As `read_model_config`."""
        return read_model_config(folder)

    def length(self, folder: Path) -> int:
        """As `read_length`."""
        return read_length(folder)

    def check(self, model: ModelConfig, folder: Path) -> None:
        """As `check_hf_weights`."""
        buffers = buffer_shapes(read_model_config(folder), read_family(folder)[0])
        check_hf_weights(parameter_shapes(model) | buffers | kind_shapes(model, folder), open_weights(folder))

    def kinds(self, folder: Path) -> Mapping[tuple[int, str], Shapes]:
        """Parameters of the attention kinds that the architecture or our export has."""
        return _kinds(read_model_config(folder), folder)

    def load(self, model: Transformer, folder: Path) -> str:
        """As `load_hf_weights`."""
        load_hf_weights(model, folder)
        return f"the Hugging Face model {folder}"

    def warnings(self, folder: Path, layers: Sequence[LayerAttention]) -> Iterator[str]:
        """Keys of config.json that nothing reads, and layers that do not have the windows of the model."""
        family, config = read_family(folder)
        if aside := sorted(name for name in open_weights(folder).names if name.startswith(family.left_aside)):
            yield f"init_from: {len(aside)} tensors of {folder} are left aside, {aside[0]} and so on"
        if unread := family.unread(config):
            yield f"init_from: nothing reads {', '.join(unread)} of {folder / CONFIG}; compare the model's logits"
        others: dict[tuple[str, str], list[int]] = {}
        for layer, (own, entry) in enumerate(zip(layers, family.attention(config), strict=False)):
            has = {"kind": own.kind, **own.options.model_dump()}
            if "window" in entry and has | entry != has:  # of other kinds the weights tell
                words = f"scores below {entry['cap']:g}" if "cap" in entry else f"windows of {entry['window']} tokens"
                others.setdefault((words, entry["kind"]), []).append(layer)
        for (words, kind), found in others.items():
            yield (
                f"init_from: {folder} was trained with {words} in {named_layers(found)}, where the first stage attends "
                f"otherwise; set kind: {kind} there to keep them"
            )


def check_hf_weights(shapes: Mapping[str, tuple[int, ...]], files: SafetensorsFolder) -> None:
    """Compare names and shapes of all parameters (ours) with the headers of `files`, and the embedding of a tied model
    with its copy, if `files` has one. Raises CheckpointError when they differ."""
    family, contents = read_family(files.folder)
    stored = files.names
    wanted: dict[str, tuple[int, ...]] = {}
    for place in places(contents, family, shapes).values():
        wanted |= place.needed
    output = family.name("output.weight")
    embedding = family.name("embedding.weight")
    problems = [f"{name}: missing" for name in sorted(wanted.keys() - stored)]
    known = {*wanted}
    if "output.weight" not in shapes and output in stored:  # tied, with a copy of its embedding
        known.add(output)
        # Software differs in which of two different ones it takes: transformers 5 the file's, 4 the embedding.
        if embedding in stored and not _equal(files, output, embedding):
            problems.append(
                f"{output}: differs from {embedding}, although tie_word_embeddings is true in config.json; set it to "
                f"false to keep both, or remove {output}"
            )
    problems += [
        f"{name}: the model of config.json has no such tensor"
        for name in sorted(stored - known)
        if not name.endswith(_DERIVED) and not name.startswith(family.left_aside)
    ]
    problems += [
        f"{name}: has shape {list(files.shape(name))}, the model of config.json has {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in stored and files.shape(name) != shape
    ]
    if problems:
        shown = problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20)
        raise CheckpointError(
            f"{files.folder}: the weights are not those of its config.json, as this version of moba_train "
            "reads it:\n" + "\n".join(f"  - {p}" for p in shown)
        )


def _equal(files: SafetensorsFolder, one: str, other: str) -> bool:
    """True if two matrices are equal; compares a part of their rows at a time."""
    if files.shape(one) != files.shape(other):
        return False
    parts = ([slice(first, first + _ROWS)] for first in range(0, files.shape(one)[0], _ROWS))
    return all(torch.equal(files.read(one, part).float(), files.read(other, part).float()) for part in parts)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model, by our names."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}


def buffer_shapes(model: ModelConfig, family: Family) -> dict[str, tuple[int, ...]]:
    """Shape of every buffer of the model that files of the family have, by our names."""
    if not family.is_ours:
        return {}
    with torch.device("meta"):
        made = Transformer(model)
    saved = made.state_dict()
    return {name: tuple(buffer.shape) for name, buffer in made.named_buffers() if name in saved}


def kind_shapes(model: ModelConfig, folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the attention kinds of the model in `folder`, by our names."""
    return {
        f"{kind_prefix(*key)}{name}": tuple(shape)
        for key, shapes in _kinds(model, folder).items()
        for name, shape in shapes.items()
    }


def _kinds(model: ModelConfig, folder: Path) -> Mapping[tuple[int, str], Shapes]:
    family, contents = read_family(folder)
    layers = [LayerAttention("full", KINDS["full"].Options())] * model.layers
    entries = moba_layers(contents, folder, model.layers) if family.is_ours else family.attention(contents)
    for layer, entry in zip(range(model.layers), entries, strict=False):
        if family.is_ours or model.is_bare(layer):
            layers[layer] = parse_layer(entry, f"attention of layer {layer}")
    return model_spec(model, [layers]).kind_shapes
