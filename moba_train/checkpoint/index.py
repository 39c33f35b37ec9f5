"""DCP's index of a checkpoint, `.metadata`: a pickle, read so that it can neither run code nor name other files.

A pickle is a program. This one may use only what DCP's index needs, and each instruction may only do what is bounded by
its own length: reading the index costs time and memory in proportion to its size, and its size is limited by that of
the tensors it describes.
"""

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from moba_train.checkpoint.coverage import Place, checked_storage
from moba_train.checkpoint.manifest import FileEntry, read_verified
from moba_train.errors import CheckpointError

INDEX = ".metadata"

_SMALLEST_LIMIT = 1 << 20
_LARGEST_LIMIT = 1 << 30
_LONGEST_TUPLE = 16
_DEEPEST_NESTING = 32

_RECORDS = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {record.__name__ for record in _RECORDS} | {"_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its home in Python 3.13
}


def read_index(path: Path, files: Mapping[str, FileEntry]) -> Metadata:
    """The index of checkpoint `path`, whose manifest lists `files`: the description of its tensors, and where each
    chunk of them is stored.

    Every number of every tensor is stored once, in these files (checkpoint/coverage.py). Raises CheckpointError when
    the file is damaged or not such an index, UnreadableError when it could not be read.
    """
    file = path / INDEX
    unpickler = _Unpickler(io.BytesIO(read_verified(path, INDEX, files, _limit(files))))
    try:
        index = unpickler.load()
    except Exception as error:  # a broken pickle raises nearly anything
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{file}: cannot be decoded ({text}); use another checkpoint of this run") from error
    if type(index) is not Metadata:
        raise CheckpointError(f"{file}: holds {type(index).__name__}, must hold DCP's Metadata")
    try:
        tensors = index.state_dict_metadata
        storage = checked_storage(tensors, unpickler.places, files)
    except Exception as error:  # attributes may be missing or of any type
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{file}: is not an index ({text}); use another checkpoint of this run") from error
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


def _limit(files: Mapping[str, FileEntry]) -> int:
    """Largest index in bytes: it describes a chunk in about 250 bytes, which DCP stores in at least 1,000."""
    others = sum(entry["size"] for name, entry in files.items() if name != INDEX)
    return min(max(others, _SMALLEST_LIMIT), _LARGEST_LIMIT)


_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.GLOBAL, pickle.STACK_GLOBAL),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
"""Opcodes that keep their meaning. With those that `_Unpickler` defines, these are what Python writes for an index with
protocol 2 and above; others would allocate as much as they claim (BYTEARRAY8)."""

_FUNCTIONS = (torch.Size, _get_layout, _MEM_FORMAT_ENCODING, type(Path()))
_SCALARS = (str, int, type(None), torch.dtype, torch.layout, _MEM_FORMAT_ENCODING)


def _refuse(unpickler: Any) -> None:
    raise pickle.UnpicklingError("it has an opcode that no index needs")


class _Unpickler(pickle._Unpickler):
    """An unpickler that knows the classes and opcodes of an index and no others. Python's own, not the one in C, where
    a single opcode of a hostile pickle can claim 64 GB of memory.

    Only strings become keys of dicts, and nothing nested is ever hashed, compared or printed: for `t = (t, t)`, repeated
    60 times, that takes centuries; 100,000 tuples around each other overflow the C stack; and hashes of tuples of
    numbers can be made to collide. The keys of an index that are not strings, each chunk's name and offset, are
    collected in `places` with their values.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    append: Any

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.places: list[Place] = []

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")
        return super().find_class(module, name)

    def _mark(self) -> None:
        _require(len(self.metastack) < _DEEPEST_NESTING, f"more than {_DEEPEST_NESTING} levels of nesting")
        self._run(pickle.MARK)

    def _since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.metastack.pop()
        self.append = self.stack.append
        return items

    def _tuple(self, opcode: bytes) -> None:
        """A tuple of scalars; or of one such tuple, which is how the argument of torch.Size is stored."""
        self._run(opcode)
        made = self.stack[-1]
        inner = made[0] if len(made) == 1 and type(made[0]) is tuple else made
        _require(len(inner) <= _LONGEST_TUPLE, f"a tuple of {len(inner)} values, more than {_LONGEST_TUPLE}")
        _require(all(isinstance(value, _SCALARS) for value in inner), "a tuple that is nested or holds objects")

    def _new_object(self) -> None:
        kind, arguments = self.stack[-2:]
        _require(any(kind is record for record in _RECORDS) and arguments == (), "an object of an unexpected kind")
        self._run(pickle.NEWOBJ)

    def _reduce(self) -> None:
        function, arguments = self.stack[-2:]
        _require(any(function is known for known in _FUNCTIONS), "a call of an unexpected function")
        _require(type(arguments) is tuple, "a call without arguments")
        self._run(pickle.REDUCE)

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        _require(type(target) in _RECORDS, "state for an object of an unexpected kind")
        if type(target) is TensorProperties and type(state) is tuple:
            TensorProperties.__setstate__(target, state)
        else:
            _require(type(state) is dict, "state of an unexpected kind")
            vars(target).update(state)

    def _append_one(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def _append_all(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        _require(type(self.stack[-1]) is list, "values for something that is not a list")
        self.stack[-1].extend(values)

    def _set_one(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._set(key, value)

    def _set_all(self) -> None:
        items = self._since_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        target = self.stack[-1]
        _require(type(target) is dict, "a key for something that is not a dict")
        if type(key) is MetadataIndex:
            _require(type(key.fqn) is str and type(key.offset) in (torch.Size, type(None)), "a chunk without a name")
            self.places.append((key.fqn, key.offset or torch.Size(), value))  # `key` may still be changed, these not
        else:
            _require(type(key) is str, f"a key of type {type(key).__name__}")
            target[key] = value

    def _run(self, opcode: bytes) -> None:
        pickle._Unpickler.dispatch[opcode[0]](self)

    dispatch = (
        dict.fromkeys(range(256), _refuse)
        | {opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES}
        | {
            pickle.MARK[0]: _mark,
            pickle.TUPLE[0]: lambda self: self._tuple(pickle.TUPLE),
            pickle.TUPLE1[0]: lambda self: self._tuple(pickle.TUPLE1),
            pickle.TUPLE2[0]: lambda self: self._tuple(pickle.TUPLE2),
            pickle.TUPLE3[0]: lambda self: self._tuple(pickle.TUPLE3),
            pickle.NEWOBJ[0]: _new_object,
            pickle.REDUCE[0]: _reduce,
            pickle.BUILD[0]: _build,
            pickle.APPEND[0]: _append_one,
            pickle.APPENDS[0]: _append_all,
            pickle.SETITEM[0]: _set_one,
            pickle.SETITEMS[0]: _set_all,
        }
    )


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise pickle.UnpicklingError(f"it has {otherwise}")
