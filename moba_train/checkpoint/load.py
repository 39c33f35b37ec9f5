"""Loading a checkpoint into tensors that exist already, on any number of ranks and in any layout.

Nothing in a checkpoint can run code: `meta.json` and `manifest.json` are JSON, tensor data is read by
torch.distributed.checkpoint (DCP) with `torch.load(weights_only=True)`, and DCP's index `.metadata`, which is a pickle,
is read by `checkpoint.index`. Nothing in it can lead to a file outside the checkpoint.
"""

import logging
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from moba_train.checkpoint.files import UnreadableError, retried
from moba_train.checkpoint.index import read_index
from moba_train.checkpoint.manifest import check_sizes, read_meta, verify_checkpoint
from moba_train.checkpoint.publish import Accept, newest_first, set_aside
from moba_train.checkpoint.threads import evenly, in_threads
from moba_train.errors import CheckpointError
from moba_train.parallel.world import broadcast

T = TypeVar("T")

logger = logging.getLogger(__name__)


def load_checkpoint(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    optional: Collection[str] = (),
    reshapable: Collection[str] = (),
    elsewhere: Collection[str] = (),
    verify: bool = False,
) -> dict[str, Any]:
    """Fills `tensors` (plain tensors and DTensors, by name) in place from the checkpoint `path` and returns its meta.

    Each rank reads what its own shards need. Names, global shapes and dtypes must be those of the checkpoint; names
    that begin with one of the prefixes in `optional` may be missing on either side, those in `reshapable` may also have
    another shape there, and then stay as they are, and those in `elsewhere` are tensors that other ranks load. File
    sizes are always compared with the manifest, with `verify` hashes too.

    Called on every rank when there is a default process group. A problem on one rank raises CheckpointError, which
    names the tensor or file, on all ranks. Each looks at a part of the files, and if a rank could not read its shards,
    all together look for the damage.
    """
    index = _on_every_rank(path, lambda: _check(path, tensors, optional, reshapable, elsewhere, verify))
    try:
        _on_every_rank(path, lambda: _read(path, tensors, index))
    except CheckpointError:
        _on_every_rank(path, lambda: verify_checkpoint(path, *_own_part()))  # DCP does not say which file it was
        raise
    return _on_every_rank(path, lambda: read_meta(path))


class CheckpointReader:
    """Reads the tensors of a checkpoint one at a time, whole, on the CPU, without a model or other ranks.

    Raises CheckpointError, when made or at a `read`, if the checkpoint is damaged or its index has gaps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index = read_index(path, check_sizes(path))
        entries = self._index.state_dict_metadata
        self.tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def read(self, name: str) -> Tensor:
        """The tensor of that name, one of `tensors`."""
        entry = self.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            _read(self._path, {name: tensor}, self._index)
        except CheckpointError:
            verify_checkpoint(self._path)
            raise
        return tensor


def newest_intact(folder: Path, accept: Accept | None = None, *others: Path) -> Path | None:
    """The newest checkpoint in `folder` and the `others` with every byte as it was written and a meta that `accept`
    agrees to; None when they have no checkpoints.

    Called on every rank of the process group; each reads a part of the files, only of checkpoints that `accept` agrees
    to. Damaged checkpoints that are newer than the one found are reported and set aside, so that they are not found
    again. Raises CheckpointError when there are checkpoints, but all are damaged or refused by `accept`, and
    UnreadableError when one that may be wanted could not be read: taking an older one would lose steps for an error
    that may pass.
    """
    listing = broadcast(_on_every_rank(folder, lambda: newest_first(folder, *others)))
    damaged: dict[Path, str] = {}
    for path in listing:
        try:
            meta = _on_every_rank(path, partial(read_meta, path))
            if accept is not None and not accept(meta):
                continue
            _on_every_rank(path, partial(verify_checkpoint, path, *_own_part()))
        except UnreadableError:
            raise
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        if dist.get_rank() == 0:
            _set_aside(damaged)
        return path
    if listing:
        where = " and ".join(map(str, (folder, *others)))
        raise CheckpointError(
            f"none of the {len(listing)} checkpoints in {where} can be resumed from; put an intact one there, or "
            "set run_dir to a new folder to start afresh\n" + "\n".join(f"  - {text}" for text in damaged.values())
        )
    return None


def _set_aside(damaged: dict[Path, str]) -> None:
    for path, problem in damaged.items():
        try:
            where = f"It is now {set_aside(path).name}; delete it once you have looked at it."
        except OSError as error:
            where = f"It stays where it is ({error})."
        logger.warning("Passing over a damaged checkpoint and taking the one before. %s. %s", problem, where)


def _own_part() -> tuple[int, int]:
    """This rank and the number of ranks: which part of the files it looks at."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _check(
    path: Path,
    tensors: dict[str, Tensor],
    optional: Collection[str],
    reshapable: Collection[str],
    elsewhere: Collection[str],
    verify: bool,
) -> Metadata:
    files = (verify_checkpoint if verify else check_sizes)(path, *_own_part())
    index = read_index(path, files)
    saved = index.state_dict_metadata
    problems = [
        f"{name}: "
        + ("in the checkpoint, but not in the model or optimizer" if name in saved else "not in the checkpoint")
        for name in sorted((tensors.keys() ^ saved.keys()) - set(elsewhere))
        if not name.startswith((*optional, *reshapable))
    ]
    for name in sorted(tensors.keys() & saved.keys()):
        entry = saved[name]
        tensor = tensors[name]
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name}: not saved as a tensor")
        elif not _fits(entry, tensor) and not name.startswith(tuple(reshapable)):
            there = (entry.size, entry.properties.dtype)
            here = (tensor.shape, tensor.dtype)
            problems.append(f"{name}: saved as {_describe(*there)}, to be loaded as {_describe(*here)}")
    if problems:
        shown = problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20)
        raise CheckpointError(
            f"checkpoint {path} does not fit; use the recipe it was saved with:\n"
            + "\n".join(f"  - {p}" for p in shown)
        )
    return index


def _fits(entry: TensorStorageMetadata, tensor: Tensor) -> bool:
    return bool((entry.size, entry.properties.dtype) == (tensor.shape, tensor.dtype))


def _read(path: Path, tensors: dict[str, Tensor], index: Metadata) -> None:
    """Raises UnreadableError when the file system refuses, else a CheckpointError that holds if all hashes are right:
    the caller verifies them."""
    saved = {
        name: entry for name, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    present = {name: tensor for name, tensor in tensors.items() if name in saved and _fits(saved[name], tensor)}

    def read() -> None:
        try:
            with warnings.catch_warnings():
                # `no_dist`: reading needs no other rank, so ranks may ask for different tensors.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(present, storage_reader=_Reader(path, index), no_dist=True)
        except CheckpointException as error:
            cause, _ = error.failures[0]
            raise cause from None

    try:
        retried(read)
    except Exception as error:
        if isinstance(error, OSError):
            raise UnreadableError.from_problem(path, error) from error
        raise CheckpointError(f"checkpoint {path} cannot be read although its hashes are right: {error!r}") from error


def _on_every_rank(path: Path, action: Callable[[], T]) -> T:
    """Runs `action`, which reads `path`, and returns this rank's result.

    A CheckpointError or OSError on any rank becomes a CheckpointError on all ranks; damage that one rank has found
    outweighs what another could not read.
    """
    error: CheckpointError | None = None
    try:
        result = action()
    except CheckpointError as raised:
        error = raised
    except OSError as raised:
        error = UnreadableError.from_problem(path, raised)
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    if found := sorted(filter(None, errors), key=lambda error: isinstance(error, UnreadableError)):
        raise found[0]
    return result


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


class _Reader(dcp.FileSystemReader):
    """DCP's reader with an index that `checkpoint.index` has read, and several threads."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self) -> Metadata:  # it has no argument `rank`, so DCP never looks for an index of one rank
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: ReadItem) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        read = super().read_data

        def read_part(items: list[ReadItem]) -> None:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # a new thread's is GPU 0
            read(replace(plan, items=items), planner)

        parts = evenly(sorted(plan.items, key=place), lambda item: self.storage_data[item.storage_index].length)
        in_threads(read_part, parts, len(parts))
        done: Future[None] = Future()
        done.set_result(None)
        return done
