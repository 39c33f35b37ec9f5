"""Loading a checkpoint into tensors that exist already, on any number of ranks and in any layout.

Nothing in a checkpoint can run code: manifest, meta and index are JSON, and tensors are read as bytes from places that
the index names. Nothing in it can lead to a file outside the checkpoint.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.checkpoint.files import UnreadableError, evenly, in_threads, open_regular, retried
from moba_train.checkpoint.index import (
    Chunk,
    PackedTensor,
    Part,
    SavedTensor,
    Sizes,
    byte_view,
    own_parts,
    read_index,
)
from moba_train.checkpoint.manifest import check_sizes, read_meta, verify_checkpoint
from moba_train.checkpoint.publish import Accept, newest_first, set_aside
from moba_train.errors import CheckpointError
from moba_train.parallel.world import broadcast, gather

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
    all together look for the damage. Rank 0 alone reads the index, which is long where a checkpoint has many shards,
    and sends it to the others.
    """
    files, index = _index(path, verify)
    _on_every_rank(path, lambda: _check(path, tensors, index, optional, reshapable, elsewhere))
    present = {name: tensor for name, tensor in tensors.items() if name in index and _fits(index[name], tensor)}
    own = {part.name: index[part.name].overlapping(part, files) for part, _ in own_parts(present)}
    try:
        _on_every_rank(path, lambda: _read(path, present, own))
    except CheckpointError:
        _on_every_rank(path, lambda: verify_checkpoint(path, *_own_part()))  # a file may have changed meanwhile
        raise
    return _on_every_rank(path, lambda: read_meta(path))


class CheckpointReader:
    """Reads the tensors of a checkpoint one at a time, whole, on the CPU, without a model or other ranks.

    Raises CheckpointError, when made or at a `read`, if the checkpoint is damaged or its index has gaps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tensors = read_index(path, check_sizes(path))

    def read(self, name: str) -> Tensor:
        """The tensor of that name, one of `tensors`."""
        entry = self.tensors[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        try:
            _read(self._path, {name: tensor}, self.tensors)
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


def _index(path: Path, verify: bool) -> tuple[list[str], dict[str, PackedTensor]]:
    """The names of the checkpoint's files, by number, and its tensors, by name."""

    def read() -> tuple[list[str], dict[str, PackedTensor]]:
        files = (verify_checkpoint if verify else check_sizes)(path, *_own_part())
        if _own_part()[0] != 0:
            return [], {}
        numbers = {name: number for number, name in enumerate(files)}
        return list(files), {name: PackedTensor.pack(saved, numbers) for name, saved in read_index(path, files).items()}

    found = _on_every_rank(path, read)
    return broadcast(found) if dist.is_initialized() else found


def _check(
    path: Path,
    tensors: dict[str, Tensor],
    saved: Mapping[str, PackedTensor],
    optional: Collection[str],
    reshapable: Collection[str],
    elsewhere: Collection[str],
) -> None:
    problems = [
        f"{name}: "
        + ("in the checkpoint, but not in the model or optimizer" if name in saved else "not in the checkpoint")
        for name in sorted((tensors.keys() ^ saved.keys()) - set(elsewhere))
        if not name.startswith((*optional, *reshapable))
    ]
    for name in sorted(tensors.keys() & saved.keys()):
        if not _fits(saved[name], tensors[name]) and not name.startswith(tuple(reshapable)):
            there = _describe(saved[name].shape, saved[name].dtype)
            here = _describe(tensors[name].shape, tensors[name].dtype)
            problems.append(f"{name}: saved as {there}, to be loaded as {here}")
    if problems:
        shown = problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20)
        raise CheckpointError(
            f"checkpoint {path} does not fit; use the recipe it was saved with, and the version of "
            "moba_train if that recipe has keys that are gone:\n" + "\n".join(f"  - {p}" for p in shown)
        )


def _fits(saved: PackedTensor, tensor: Tensor) -> bool:
    return (saved.shape, saved.dtype) == (tuple(tensor.shape), tensor.dtype)


class _Overlap(NamedTuple):
    """Intersection of a rank's part of a tensor with a chunk of it."""

    chunk: Chunk
    begin: Sizes
    """Offsets in the chunk."""
    target: Tensor
    """Box of the rank's part, a view."""

    @property
    def rows(self) -> Sizes:
        """Shape of what is read: all of the chunk's rows, along its first axis, that have a number of the box."""
        return (self.target.shape[0], *self.chunk.sizes[1:]) if self.chunk.sizes else ()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return math.prod(self.rows) * self.target.itemsize

    @property
    def is_direct(self) -> bool:
        """True if the rows can be read into the target."""
        return self.target.shape == self.rows and self.target.device.type == "cpu" and self.target.is_contiguous()


def _overlaps(part: Part, values: Tensor, chunks: Collection[Chunk]) -> list[_Overlap]:
    """`values`: the numbers of `part`, to be filled."""
    found = []
    for chunk in chunks:
        begin = tuple(map(max, part.offsets, chunk.offsets))
        ends = zip(part.offsets, part.sizes, chunk.offsets, chunk.sizes, strict=True)
        end = tuple(min(offset + size, other + other_size) for offset, size, other, other_size in ends)
        if all(b < e for b, e in zip(begin, end, strict=True)):
            box = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, part.offsets, strict=True))
            inside = tuple(b - o for b, o in zip(begin, chunk.offsets, strict=True))
            found.append(_Overlap(chunk, inside, values[box] if box else values))
    return found


def _read(path: Path, tensors: dict[str, Tensor], saved: Mapping[str, SavedTensor]) -> None:
    """Reads in several threads, each in the order of the files, and holds a chunk of a tensor for each in memory.

    Raises UnreadableError when the file system refuses, else a CheckpointError that holds if all hashes are right: the
    caller verifies them.
    """
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def read_some(overlaps: list[_Overlap]) -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # a new thread's is GPU 0
        largest = max((overlap.nbytes for overlap in overlaps if not overlap.is_direct), default=0)
        # One buffer for all of a thread's parts; with one each, a rank would hold its shards twice.
        buffer = torch.empty(largest, dtype=torch.uint8)
        for name, group in groupby(overlaps, key=lambda overlap: overlap.chunk.file):
            with open_regular(path / name) as stream:
                if stream.read(9)[8:] != b"{":  # a file that a power failure has left full of zeros
                    raise ValueError(f"{name} is not a safetensors file")
                for overlap in group:
                    _read_overlap(stream, overlap, buffer)

    def read() -> None:
        found: list[_Overlap] = []
        for part, values in own_parts(tensors):
            found += _overlaps(part, values, saved[part.name].chunks)
        # In the order of the files, so that each thread reads forward.
        parts = evenly(sorted(found, key=lambda overlap: overlap.chunk[:2]), lambda overlap: overlap.nbytes)
        in_threads(read_some, parts, len(parts))

    try:
        retried(read)
    except Exception as error:
        if isinstance(error, OSError):
            raise UnreadableError.from_problem(path, error) from error
        raise CheckpointError(f"checkpoint {path} cannot be read although its hashes are right: {error!r}") from error


def _read_overlap(stream: BufferedReader, overlap: _Overlap, buffer: Tensor) -> None:
    """Fills the target from a file, by way of `buffer` (bytes) if it has another layout or device than the file."""
    target = overlap.target
    rows = target if overlap.is_direct else buffer[: overlap.nbytes].view(target.dtype).view(overlap.rows)
    before = overlap.begin[0] * math.prod(overlap.rows[1:]) * target.itemsize if overlap.begin else 0
    stream.seek(overlap.chunk.begin + before)
    if stream.readinto(byte_view(rows)) < overlap.nbytes:
        raise EOFError(f"{overlap.chunk.file} ends within a tensor")
    if rows is not target:
        for axis, first in enumerate(overlap.begin[1:], start=1):
            rows = rows.narrow(axis, first, target.shape[axis])
        target.copy_(rows)


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
    if dist.is_initialized():
        found = sorted(filter(None, gather(error)), key=lambda error: isinstance(error, UnreadableError))
        error = broadcast(found[0] if found else None)
    if error is not None:
        raise error
    return result


def _describe(shape: Sizes, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
