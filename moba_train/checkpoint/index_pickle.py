"""The pickle of DCP's index, decoded by a machine that can do nothing else.

A pickle is a program for a stack machine. `pickle.Unpickler` in C lets four bytes claim 64 GB of memory, and the one in
Python hashes and prints whatever it is told to: for `t = (t, t)`, repeated 60 times, that takes centuries, and 100,000
tuples around each other overflow the C stack. This machine has the opcodes that an index is written with, knows the
classes of an index, and nothing nested is ever hashed, compared or printed. So time and memory are in proportion to the
length of the pickle, and it takes no longer than Python's own unpickler.
"""

import gc
import pickle
from collections.abc import Callable
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

from moba_train.checkpoint.coverage import Place

_LONGEST_TUPLE = 16
_DEEPEST_NESTING = 32

_RECORDS = {
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
}


def _enum_member(kind: object, name: str) -> _MEM_FORMAT_ENCODING:
    """Stands in for `getattr`, with which Python 3.11.2 stores a member of an enum; 3.11.7 stores its value."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise ValueError("an attribute of an unexpected object")
    return _MEM_FORMAT_ENCODING[name]


_GLOBALS: dict[str, Any] = {
    **{f"{record.__module__}.{record.__name__}": record for record in _RECORDS},
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    "builtins.getattr": _enum_member,
    "torch.Size": torch.Size,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _MEM_FORMAT_ENCODING,
    "torch.serialization._get_layout": _get_layout,
    "pathlib.PosixPath": Path,
    "pathlib._local.PosixPath": Path,  # its home in Python 3.13
}
_FUNCTIONS = (_enum_member, torch.Size, _get_layout, _MEM_FORMAT_ENCODING, Path)
_MEMOIZE = pickle.MEMOIZE[0]
_BINGET = pickle.BINGET[0]
_SCALARS = (str, int, type(None), torch.dtype, torch.layout, _MEM_FORMAT_ENCODING)


def decode_index(data: bytes) -> tuple[Any, list[Place]]:
    """The object that the pickle `data` holds, and the places of chunks in it. Attributes of the object may be missing
    or of any type. Raises ValueError when `data` is not a pickle of an index."""
    collecting = gc.isenabled()
    gc.disable()  # a million new objects, none of them garbage: collections take a third of the time
    try:
        return _run(data)
    finally:
        if collecting:
            gc.enable()


def _run(data: bytes) -> tuple[Any, list[Place]]:
    machine = _Machine()
    stack = machine.stack
    memo = machine.memo
    at = 0
    try:
        while not machine.stopped:
            opcode = data[at]
            at += 1
            if opcode == _MEMOIZE:  # these two are half of all opcodes
                memo[len(memo)] = stack[-1]
            elif opcode == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif opcode in _OPERATIONS:
                width, counts, run = _OPERATIONS[opcode]
                begin = at
                at += width
                argument = data[begin:at]
                if counts:  # the bytes of what follows
                    length = int.from_bytes(argument, "little")
                    argument = data[at : at + length]
                    at += length
                run(machine, argument)
            else:
                raise ValueError(f"opcode {opcode} has no place in a checkpoint's index")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"byte {at} of {len(data)}: {str(error)[:200]}") from error
    return stack[-1], machine.places


class _Machine:
    """Its methods are the opcodes of a pickle: what they do is in the module `pickletools` of Python."""

    def __init__(self) -> None:
        self.stopped = False
        self.stack: list[Any] = []
        self.places: list[Place] = []
        """The keys of dicts that are no strings, which in an index are chunks, with their values. They do not become
        keys here: hashes of tuples of numbers can be made to collide."""
        self.memo: dict[int, Any] = {}
        self._marks: list[int] = []

    def skip(self, _: bytes) -> None:
        """A protocol number or the length of a frame."""

    def stop(self, _: bytes) -> None:
        self.stopped = True

    def mark(self, _: bytes) -> None:
        if len(self._marks) >= _DEEPEST_NESTING:
            raise ValueError(f"more than {_DEEPEST_NESTING} levels of nesting")
        self._marks.append(len(self.stack))

    def put(self, number: bytes) -> None:
        self.memo[int.from_bytes(number, "little")] = self.stack[-1]

    def get(self, number: bytes) -> None:
        self.stack.append(self.memo[int.from_bytes(number, "little")])

    def integer(self, value: bytes) -> None:
        self.stack.append(int.from_bytes(value, "little"))

    def signed_integer(self, value: bytes) -> None:
        self.stack.append(int.from_bytes(value, "little", signed=True))

    def text(self, value: bytes) -> None:
        self.stack.append(value.decode("utf-8", "surrogatepass"))

    def global_name(self, _: bytes) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise ValueError("a class without a name")
        if f"{module}.{name}" not in _GLOBALS:
            raise ValueError(f"{module}.{name} has no place in a checkpoint's index")
        self.stack.append(_GLOBALS[f"{module}.{name}"])

    def tuple_since_mark(self, _: bytes) -> None:
        self._tuple(self._pop_since_mark())

    def tuple_of(self, count: int) -> None:
        values = self.stack[-count:]
        del self.stack[-count:]
        self._tuple(values)

    def _tuple(self, values: list[Any]) -> None:
        """A tuple of scalars and the enum; or of one such tuple, which is how the argument of torch.Size is stored."""
        inner = values[0] if len(values) == 1 and type(values[0]) is tuple else values
        if len(inner) > _LONGEST_TUPLE:
            raise ValueError(f"a tuple of {len(inner)} values, more than {_LONGEST_TUPLE}")
        for value in inner:
            if value is not _MEM_FORMAT_ENCODING and not isinstance(value, _SCALARS):
                raise ValueError("a tuple that is nested or holds objects")
        self.stack.append(tuple(values))

    def append(self, _: bytes) -> None:
        self._extend([self.stack.pop()])

    def append_since_mark(self, _: bytes) -> None:
        self._extend(self._pop_since_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("values for something that is not a list")
        self.stack[-1].extend(values)

    def set_item(self, _: bytes) -> None:
        value = self.stack.pop()
        self._set([self.stack.pop(), value])

    def set_since_mark(self, _: bytes) -> None:
        self._set(self._pop_since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise ValueError("a key for something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is str:
                target[key] = value
            else:
                if type(key) is not MetadataIndex:
                    raise ValueError(f"a key of type {type(key).__name__}")
                if type(key.fqn) is not str or not isinstance(key.offset, torch.Size | None):
                    raise ValueError("a chunk without the name of a tensor")
                self.places.append((key.fqn, key.offset or torch.Size(), value))

    def new_object(self, _: bytes) -> None:
        arguments = self.stack.pop()
        kind = self.stack.pop()
        if type(kind) is not type or kind not in _RECORDS or arguments != ():
            raise ValueError("an object of an unexpected kind")
        self.stack.append(object.__new__(kind))

    def call(self, _: bytes) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        if type(arguments) is not tuple or not any(function is known for known in _FUNCTIONS):
            raise ValueError("a call of an unexpected function")
        self.stack.append(function(*arguments))

    def set_state(self, _: bytes) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) not in _RECORDS:
            raise ValueError("state for an object of an unexpected kind")
        if type(target) is TensorProperties and type(state) is tuple:
            TensorProperties.__setstate__(target, state)
        else:
            if type(state) is not dict:
                raise ValueError("state of an unexpected kind")
            vars(target).update(state)

    def _pop_since_mark(self) -> list[Any]:
        begin = self._marks.pop()
        values = self.stack[begin:]
        del self.stack[begin:]
        return values


def _push(make: Callable[[], Any]) -> Callable[[_Machine, bytes], None]:
    return lambda machine, _: machine.stack.append(make())


_OPERATIONS: dict[int, tuple[int, bool, Callable[[_Machine, bytes], None]]] = {
    opcode[0]: operation
    for opcode, operation in {
        pickle.PROTO: (1, False, _Machine.skip),
        pickle.FRAME: (8, False, _Machine.skip),
        pickle.STOP: (0, False, _Machine.stop),
        pickle.MARK: (0, False, _Machine.mark),
        pickle.BINPUT: (1, False, _Machine.put),
        pickle.LONG_BINPUT: (4, False, _Machine.put),
        pickle.LONG_BINGET: (4, False, _Machine.get),
        pickle.NONE: (0, False, _push(lambda: None)),
        pickle.NEWTRUE: (0, False, _push(lambda: True)),
        pickle.NEWFALSE: (0, False, _push(lambda: False)),
        pickle.EMPTY_TUPLE: (0, False, _push(tuple)),
        pickle.EMPTY_LIST: (0, False, _push(list)),
        pickle.EMPTY_DICT: (0, False, _push(dict)),
        pickle.BININT1: (1, False, _Machine.integer),
        pickle.BININT2: (2, False, _Machine.integer),
        pickle.BININT: (4, False, _Machine.signed_integer),
        pickle.LONG1: (1, True, _Machine.signed_integer),
        pickle.SHORT_BINUNICODE: (1, True, _Machine.text),
        pickle.BINUNICODE: (4, True, _Machine.text),
        pickle.STACK_GLOBAL: (0, False, _Machine.global_name),
        pickle.TUPLE: (0, False, _Machine.tuple_since_mark),
        pickle.TUPLE1: (0, False, lambda machine, _: machine.tuple_of(1)),
        pickle.TUPLE2: (0, False, lambda machine, _: machine.tuple_of(2)),
        pickle.TUPLE3: (0, False, lambda machine, _: machine.tuple_of(3)),
        pickle.APPEND: (0, False, _Machine.append),
        pickle.APPENDS: (0, False, _Machine.append_since_mark),
        pickle.SETITEM: (0, False, _Machine.set_item),
        pickle.SETITEMS: (0, False, _Machine.set_since_mark),
        pickle.NEWOBJ: (0, False, _Machine.new_object),
        pickle.REDUCE: (0, False, _Machine.call),
        pickle.BUILD: (0, False, _Machine.set_state),
    }.items()
}
"""For each opcode that protocol 4 and 5 write for an index: the bytes of its argument, whether these are the length of
the argument proper, and what it does."""
