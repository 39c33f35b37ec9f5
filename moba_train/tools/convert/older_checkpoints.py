"""Conversion of checkpoints of the version before, format 1, which torch.distributed.checkpoint wrote: an index and
tensors in pickles.

Nothing else reads such a file, and nothing in one can run code here: whatever a pickled index names becomes an inert
`_Record`, and tensors are read by `torch.load(weights_only=True)`. Time and memory are not limited, though: a pickle of
a few bytes can claim all of it. So convert only checkpoints of your own.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moba_train.checkpoint import publish
from moba_train.checkpoint.files import open_regular
from moba_train.checkpoint.index import Part
from moba_train.checkpoint.manifest import (
    MANIFEST,
    PICKLED_VERSION,
    FileEntry,
    format_version,
    read_meta,
    read_verified,
    verify_checkpoint,
)
from moba_train.checkpoint.writer import ShardFile, write_checkpoint
from moba_train.errors import CheckpointError, UserError

_INDEX = ".metadata"


def convert_checkpoints(path: Path) -> Iterator[Path]:
    """Converts checkpoints in place, the oldest first, and yields each: all of a run folder or of a folder of
    checkpoints, or `path` itself if it is one. Those of the present format stay as they are.

    The tensors keep their bits and the meta its values. Every byte is compared with the manifest first; the new files
    lie beside the old ones until they are complete, so that an interruption loses nothing. Raises CheckpointError when
    a checkpoint is damaged or there is none.
    """
    publish.restore(path)
    if (path / MANIFEST).is_file():
        found = [path]
    else:
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        publish.clean_up(folder)
        found = [checkpoint for _, checkpoint in publish.published(folder)]
    if not found:
        raise CheckpointError(f"{path}: neither a checkpoint nor a folder with checkpoints (step_...)")
    for checkpoint in found:
        if format_version(checkpoint) == PICKLED_VERSION:
            _convert(checkpoint)
            yield checkpoint


def _convert(path: Path) -> None:
    files = verify_checkpoint(path, version=PICKLED_VERSION)
    meta = read_meta(path, PICKLED_VERSION)
    step = publish.saved_step(meta) or 0
    try:
        temporary = publish.make_temporary_folder(path.parent, step)
        try:
            publish.install(temporary, path, step, _write_converted(path, files, temporary, meta))
        except BaseException:  # Ctrl-C too
            publish.remove(temporary)
            raise
    except UserError:
        raise
    except Exception as error:  # the disk is full; or a pickle that can have anything in it
        raise CheckpointError(f"{path}: cannot be converted ({error!r}); it stays as it is") from error


def _write_converted(
    path: Path, files: Mapping[str, FileEntry], folder: Path, meta: dict[str, Any]
) -> dict[str, FileEntry]:
    """Writes checkpoint `path` into `folder`, a file for each of its files, and a tensor at a time."""
    index = _Unpickler(io.BytesIO(read_verified(path, _INDEX, files, files[_INDEX]["size"]))).load().state
    stored = {(key.state["fqn"], key.state["offset"]): place.state for key, place in index["storage_data"].items()}
    parts: dict[str, list[Part]] = {}
    for name, tensor in index["state_dict_metadata"].items():
        dtype = tensor.state["properties"].state[0]
        for chunk in tensor.state["chunks"]:
            part = Part(name, dtype, tensor.state["size"], chunk.state["offsets"], chunk.state["sizes"])
            if part.nbytes:
                parts.setdefault(stored[name, part.offsets]["relative_path"], []).append(part)

    def value_of(part: Part) -> Tensor:
        place = stored[part.name, part.offsets]
        with open_regular(path / place["relative_path"]) as stream:
            stream.seek(place["offset"])
            content = io.BytesIO(stream.read(place["length"]))
        tensor: Tensor = torch.load(content, map_location="cpu", weights_only=True)
        return tensor

    shards = [
        ShardFile.from_parts(f"rank{file.removesuffix('.distcp').removeprefix('_')}.safetensors", some)
        for file, some in sorted(parts.items())
    ]
    return write_checkpoint(folder, shards, value_of, meta)


class _Record:
    """Inert object that replaces any class or function that a pickle names."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler that imports nothing: torch's dtypes and tuples for its sizes are all that a pickle can name."""

    def find_class(self, module: str, name: str) -> Any:
        """The object that `module.name` stands for."""
        if (module, name) == ("torch", "Size"):
            return tuple
        found = getattr(torch, name, None) if module == "torch" else None
        return found if isinstance(found, torch.dtype) else _Record
