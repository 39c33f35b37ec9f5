"""Loading a checkpoint into tensors that exist already, on any number of ranks and in any layout.

Nothing in a checkpoint can run code: `meta.json` and `manifest.json` are JSON, tensor data is read by
torch.distributed.checkpoint (DCP) with `torch.load(weights_only=True)`, and DCP's index `.metadata`, which is a pickle,
goes through an unpickler that knows the index's own classes and nothing else.
"""

import pickle
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moba_train.checkpoint.publish import check_sizes, read_meta, verify_checkpoint
from moba_train.errors import CheckpointError

T = TypeVar("T")

_INDEX = ".metadata"
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its home in Python 3.13
}


def load_checkpoint(
    path: Path, tensors: dict[str, Tensor], *, optional: Collection[str] = (), verify: bool = False
) -> dict[str, Any]:
    """Fills `tensors` (plain ones and DTensors, by name) in place from the checkpoint `path` and returns its meta.

    Each rank reads what its own shards need. Names, global shapes and dtypes must be those of the checkpoint; names
    that begin with one of the prefixes in `optional` may be missing on either side. File sizes are always compared with
    the manifest, hashes too with `verify`.

    Called on every rank when there is a default process group. What is wrong on one rank raises CheckpointError, naming
    the tensor or file, on all of them.
    """
    index = _on_every_rank(lambda: _check(path, tensors, optional, verify))
    _on_every_rank(lambda: _read(path, tensors, index))
    return read_meta(path)


class CheckpointReader:
    """A checkpoint's tensors one at a time, whole, on the CPU, without a model or other ranks.

    Raises CheckpointError, when made or at a `read`, if the checkpoint is damaged.
    """

    def __init__(self, path: Path) -> None:
        check_sizes(path)
        self._path, self._index = path, _read_index(path)
        entries = self._index.state_dict_metadata
        self.tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def read(self, name: str) -> Tensor:
        """The tensor of that name, one of `tensors`."""
        entry = self.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        _read(self._path, {name: tensor}, self._index)
        return tensor


def _check(path: Path, tensors: dict[str, Tensor], optional: Collection[str], verify: bool) -> Metadata:
    if verify:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        verify_checkpoint(path, rank, ranks)
    else:
        check_sizes(path)
    index = _read_index(path)
    saved = index.state_dict_metadata
    problems = [
        f"{name}: "
        + ("in the checkpoint, but not in the model or optimizer" if name in saved else "not in the checkpoint")
        for name in sorted(tensors.keys() ^ saved.keys())
        if not name.startswith(tuple(optional))
    ]
    for name in sorted(tensors.keys() & saved.keys()):
        entry, tensor = saved[name], tensors[name]
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name}: not saved as a tensor")
        elif (entry.size, entry.properties.dtype) != (tensor.shape, tensor.dtype):
            there, here = (entry.size, entry.properties.dtype), (tensor.shape, tensor.dtype)
            problems.append(f"{name}: saved as {_describe(*there)}, to be loaded as {_describe(*here)}")
    if problems:
        shown = problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20)
        raise CheckpointError(
            f"checkpoint {path} does not fit; use the recipe it was saved with:\n"
            + "\n".join(f"  - {p}" for p in shown)
        )
    return index


def _read(path: Path, tensors: dict[str, Tensor], index: Metadata) -> None:
    present = {name: tensor for name, tensor in tensors.items() if name in index.state_dict_metadata}
    try:
        with warnings.catch_warnings():
            # `no_dist`: reading needs nothing from other ranks, so ranks may ask for different tensors.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(present, storage_reader=_Reader(path, index), no_dist=True)
    except CheckpointException as error:
        verify_checkpoint(path)  # DCP does not say which file it was
        cause, _ = error.failures[0]
        raise CheckpointError(f"checkpoint {path} cannot be read although its hashes are right: {cause!r}") from cause


def _on_every_rank(action: Callable[[], T]) -> T:
    """Runs `action`; a CheckpointError on any rank is raised on all."""
    problem = None
    try:
        result = action()
    except CheckpointError as error:
        problem = str(error)
    problems: list[str | None] = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for text in problems:
        if text is not None:
            raise CheckpointError(text)
    return result


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


class _Reader(dcp.FileSystemReader):
    """DCP's reader, given an index that was read safely."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self) -> Metadata:  # without `rank`, DCP never looks for another index
        return self._index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")
        return super().find_class(module, name)


def _read_index(path: Path) -> Metadata:
    file = path / _INDEX
    try:
        with file.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise CheckpointError(f"{file}: cannot be read ({error!r}); use another checkpoint of this run") from error
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{file}: holds {type(index).__name__}, must hold DCP's Metadata")
    return index
