"""Weights of Hugging Face models: safetensors files, the place of each parameter in them, and loading.

The tensors are those of `model.transformer.Transformer` under other names. Some of ours are the rows of one of theirs,
and those of experts are stacks of many. Rotary embeddings pair the two halves of a head on both sides, so nothing is
permuted. A folder holds `model.safetensors`, or several files and `model.safetensors.index.json`, which names the file
of each tensor. A reader opens one file at a time and reads the bytes asked for.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from moba_train.config.attention import LayerAttention
from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError, ForeignFileError, named_layers
from moba_train.foreign_files import INDEX_BYTES, folder_roots, open_foreign, read_foreign_json
from moba_train.model.spec import kind_of_parameter
from moba_train.model.transformer import Transformer
from moba_train.resolve.initial_weights import WeightSource
from moba_train.tools.hf.config import CONFIG, is_hf_folder, read_family, read_model_config
from moba_train.tools.hf.family import NUMBER, Family
from moba_train.torch_private import local_shape_and_offset

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder:
    """Tensors of `folder` by their names. Raises CheckpointError when the folder cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._roots = folder_roots(folder)
        self._file_of = self._index() if (folder / INDEX).exists() else self._single()
        self._open: tuple[str, Any] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._file_of)

    def file_of(self, name: str) -> str:
        """Name of the file that holds tensor `name`. Reading in the order of files opens each of them once."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, from the file's header. Raises CheckpointError if its dtype is not floating-point."""
        header = self._slice(name)
        if header.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"{self.folder / self._file_of[name]}: {name} is {header.get_dtype()}, allowed: {', '.join(DTYPES)}; "
                "quantised weights must be converted first"
            )
        return tuple(header.get_shape())

    def read(self, name: str, part: Sequence[slice] = ()) -> Tensor:
        """The tensor on the CPU in the file's dtype, or the `part` of it: a slice for each leading dimension."""
        try:
            return self._slice(name)[tuple(part) or ...]
        except (SafetensorError, OSError) as error:
            raise self._unreadable(self._file_of[name], error) from error

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            try:
                self._open = file, self._open_file(file)
            except (SafetensorError, OSError) as error:
                raise self._unreadable(file, error) from error
        try:
            return self._open[1].get_slice(name)
        except SafetensorError as error:
            raise self._unreadable(file, error) from error

    def _open_file(self, file: str) -> Any:
        """The library's reader of `file`. Raises CheckpointError when it must not be read, OSError, SafetensorError."""
        try:
            with open_foreign(self.folder / file, None, self._roots) as stream:
                # The library takes a path and maps the file at once. This path is the open file, even if its name now
                # leads to another one.
                return safe_open(f"/dev/fd/{stream.fileno()}", framework="pt")
        except ForeignFileError as error:
            raise CheckpointError(str(error)) from None

    def _single(self) -> dict[str, str]:
        if not (self.folder / SINGLE).exists():
            raise CheckpointError(f"{self.folder}: has neither {SINGLE} nor {INDEX}")
        try:
            with self._open_file(SINGLE) as tensors:
                return dict.fromkeys(tensors.keys(), SINGLE)
        except (SafetensorError, OSError) as error:
            raise self._unreadable(SINGLE, error) from error

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            files = read_foreign_json(path, INDEX_BYTES, self._roots)["weight_map"]
            # A name with a path in it would lead out of the folder.
            strange = [file for file in files.values() if Path(file).name != file or not file.endswith(".safetensors")]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: is not an index of safetensors files ({error})") from error
        if strange:
            raise CheckpointError(
                f"{path}: names the file {given(strange[0])}, allowed: *.safetensors in the same folder"
            )
        missing = sorted({file for file in files.values() if not (self.folder / file).is_file()})
        if missing:
            raise CheckpointError(f"{path}: names {', '.join(missing[:20])}, not found in the folder")
        return dict(files)

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.folder / file}: cannot be read ({error}); get the file again")


_DERIVED = ("rotary_emb.inv_freq",)
"""Endings of tensors in old files that are not weights: their values follow from the config."""
_ROWS = 4096


class Place(NamedTuple):
    """Rows of a tensor of theirs that are a parameter of ours, or a stack of tensors, if the name numbers them."""

    name: str
    first_row: int
    rows: int

    @property
    def names(self) -> list[str]:
        """Names of their tensors."""
        return [self.name.format(row) for row in range(self.rows)] if NUMBER in self.name else [self.name]

    def needed(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Shapes, as far as these rows go, of their tensors for a parameter of ours of this shape."""
        own = () if NUMBER in self.name else (self.first_row + self.rows,)
        return dict.fromkeys(self.names, (*own, *shape[1:]))

    def read(self, files: SafetensorsFolder, own: Sequence[slice] = ()) -> Tensor:
        """The parameter on the CPU in the file's dtype, or these slices of it, one for each leading dimension."""
        first, *rest = own or [slice(0, self.rows)]
        if NUMBER in self.name:
            return torch.stack([files.read(name, rest) for name in self.names[first]])
        return files.read(self.name, [slice(self.first_row + first.start, self.first_row + first.stop), *rest])


def places(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Place of every parameter of a model, by our name, from the shapes of all of them in the model's order."""
    found: dict[str, Place] = {}
    used: Counter[str] = Counter()
    for ours, (rows, *_) in shapes.items():
        theirs = family.name(ours)
        found[ours] = Place(theirs, used[theirs], rows)
        used[theirs] += rows
    return found


@torch.no_grad()
def load_hf_weights(model: Transformer, folder: Path, with_kinds: bool = False) -> None:
    """Fill the parameters of a `Transformer`, plain tensors or DTensors, from the Hugging Face model in `folder`.

    Buffers keep their values, and so do parameters of attention kinds, unless the folder has them (`with_kinds`). Each
    rank reads the bytes of its shards alone, one parameter after the other, without communication. If a tied model
    comes with a copy of its embedding, each rank first reads both in full, to compare them. Raises CheckpointError with
    every tensor that is missing, superfluous or of another shape.
    """
    files = SafetensorsFolder(folder)
    state: dict[str, Any] = get_model_state_dict(model)
    # A stage of a pipeline has some of the names; the folder is checked against all of them, on every rank alike.
    shapes = parameter_shapes(model.config)
    if with_kinds:
        shapes |= {name: tuple(value.shape) for name, value in state.items() if kind_of_parameter(name)}
    check_hf_weights(shapes, files)
    found = places(read_family(folder)[0], shapes)
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

    def check(self, model: ModelConfig, folder: Path) -> None:
        """As `check_hf_weights`."""
        check_hf_weights(parameter_shapes(model), SafetensorsFolder(folder))

    def load(self, model: Transformer, folder: Path) -> str:
        """As `load_hf_weights`."""
        load_hf_weights(model, folder)
        return f"the Hugging Face model {folder}"

    def warnings(self, folder: Path, layers: Sequence[LayerAttention]) -> Iterator[str]:
        """Keys of config.json that nothing reads, and layers that do not have the windows of the model."""
        family, config = read_family(folder)
        if unread := family.unread(config):
            yield f"init_from: nothing reads {', '.join(unread)} of {folder / CONFIG}; compare the model's logits"
        others = []
        for layer, (own, window) in enumerate(zip(layers, family.attention(config), strict=False)):
            has = {"kind": own.kind, **own.options.model_dump()}
            others += [layer] * (has | window != has)
        if others:
            yield (
                f"init_from: {folder} was trained with windows of {config['sliding_window']} tokens in "
                f"{named_layers(others)}, where the first stage attends otherwise; set kind: window there to keep them"
            )


def check_hf_weights(shapes: Mapping[str, tuple[int, ...]], files: SafetensorsFolder) -> None:
    """Compare names and shapes of all parameters (ours) with the headers of `files`, and the embedding of a tied model
    with its copy, if `files` has one. Raises CheckpointError when they differ."""
    family, _ = read_family(files.folder)
    wanted: dict[str, tuple[int, ...]] = {}
    for ours, place in places(family, shapes).items():
        wanted |= place.needed(shapes[ours])
    output = family.name("output.weight")
    embedding = family.name("embedding.weight")
    problems = [f"{name}: missing" for name in sorted(wanted.keys() - files.names)]
    known = {*wanted}
    if "output.weight" not in shapes and output in files.names:  # tied, with a copy of its embedding
        known.add(output)
        # Software differs in which of two different ones it takes: transformers 5 the file's, 4 the embedding.
        if embedding in files.names and not _equal(files, output, embedding):
            problems.append(
                f"{output}: differs from {embedding}, although tie_word_embeddings is true in config.json; set it to "
                f"false to keep both, or remove {output}"
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
    """True if two matrices are equal; compares a part of their rows at a time."""
    if files.shape(one) != files.shape(other):
        return False
    parts = ([slice(first, first + _ROWS)] for first in range(0, files.shape(one)[0], _ROWS))
    return all(torch.equal(files.read(one, part).float(), files.read(other, part).float()) for part in parts)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the model, by our names."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}
