"""Launches of kernels, and their repetition, which takes the host a third of the time.

A function of the backend launches kernels whose sizes and buffers follow from its layout and from the shapes of its
tensors; from layer to layer only addresses change. So the second call on a layout is recorded, and later ones allocate
and launch what it did (`replayed`): 1.44 to 1.14 ms of host time for a layer at 8K 512/3, 2.93 to 0.78 at 32K 128/8
(benchmarks/LOG.md, "Launches and host time").

A record holds allocations and launches alone. A function that does anything else with tensors, such as copying one that
is not contiguous, or that launches a kernel without `launch`, is not recorded for such tensors: it always runs as
written. MOBA_TRAIN_REPLAY=0 turns repetition off; docs/explanation/kernels.md says what it relies on.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from moba_train.attention.kernels.table import launcher_is_known
from moba_train.attention.layout import Layout
from moba_train.torch_private import TorchDispatchMode

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
# The first call compiles kernels and builds the layout's tables, whose launches later calls must not repeat: so the
# second one is recorded. It takes the host 1.5 ms more, which the fifth call has paid for (benchmarks/LOG.md, "Launches
# and host time").
_RECORD_NEXT = object()
REPLAY = os.environ.get("MOBA_TRAIN_REPLAY", "1") != "0"
"""Launches are recorded and repeated. Read once: a look at the environment at every call takes the host 1 us."""
# Backward passes run on autograd's threads: a recorder sees the launches of one thread only.
_thread = threading.local()

Function = TypeVar("Function", bound=Callable[..., Any])


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up; `triton.cdiv` takes the host 4 us, as it serves kernels too."""
    return -(-a // b)


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """`kernel[grid](**arguments)`, seen by a recorder."""
    compiled = kernel[grid](**arguments)
    if (recorder := _recorder()) is not None:
        recorder.launched(kernel, compiled, grid, arguments)


def replayed(function: Function) -> Function:
    """A `function` of tensors, tuples of tensors, one layout and plain options, whose second call is recorded.

    Its result is a tensor or a tuple of tensors, which it allocates. Records are kept with the layout: for equal
    options, and tensors of equal shapes, strides, dtypes and alignment.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        tensors, layout, plain = _sorted_out([*arguments, *options.values()])
        # A recorder of an outer function must see the launches, not that they are repeated.
        if plain is None or not REPLAY or _recorder() is not None:
            return function(*arguments, **options)
        records = layout.cached(("records", function), dict[Hashable, Any])
        addresses = [*map(Tensor.data_ptr, tensors)]
        # Triton compiles kernels by alignment; and a record knows which arguments are one tensor.
        pointers = [(address % 16 == 0, addresses.index(address)) for address in addresses]
        key = (*options, *plain, *pointers, *[(x.shape, x.stride(), x.dtype) for x in tensors])
        if key not in records:  # the first call, which may compile kernels and build tables
            records[key] = _RECORD_NEXT
            return function(*arguments, **options)
        record = records[key]
        if isinstance(record, _Record):
            return record.replay(tensors, addresses)
        if record is None:  # there can be none
            return function(*arguments, **options)
        with _Recorder(tensors) as recorder:
            result = function(*arguments, **options)
        records[key] = recorder.record(result)
        return result

    return cast(Function, call)


def _runner(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """`compiled[grid]`; of Triton 3.6, the function of its private launcher in which that ends, if no memory must be
    given to the kernel.

    That takes the host 2 us less a launch (224 to 174 us for the layer of 8K 512/3). It does not ask which device is
    the current one, and skips Triton's hooks, so Triton's own profiler does not see these launches.
    """
    launcher: Any = getattr(compiled, "run", None)
    if launcher is None or not launcher_is_known():
        return cast(Callable[..., None], compiled[grid])
    # Scratch memory is allocated at each launch by `compiled[grid]`; the private launcher would be given none.
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return cast(Callable[..., None], compiled[grid])
    # Found once: attention runs inside `on_the_device_of`, so a layout's later calls are on the same device.
    device = driver.active.get_current_device()
    flags = launcher.launch_cooperative_grid, launcher.launch_pdl
    # The Nones are the two kinds of scratch memory, excluded above, launch metadata, and the hooks, which are skipped.
    fixed = (compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None)

    def run(*arguments: Any) -> None:
        launcher.launch(*grid, driver.active.get_current_stream(device), *fixed, *arguments)

    return run


def _sorted_out(arguments: Iterable[Any]) -> tuple[list[Tensor], Layout, list[Hashable] | None]:
    """The tensors, the layout, and all else among a function's arguments; None for what no record can depend on."""
    tensors: list[Tensor] = []
    layouts: list[Layout] = []
    plain: list[Hashable] | None = []
    for given in arguments:
        if isinstance(given, Tensor):
            tensors.append(given)
        elif isinstance(given, Layout):
            layouts.append(given)
        elif isinstance(given, tuple) and given and isinstance(given[0], Tensor):
            tensors.extend(given)
        elif plain is not None:
            plain = [*plain, given] if given is None or isinstance(given, (int, float, str, tuple)) else None
    (layout,) = layouts
    return tensors, layout, plain


class _Allocation(NamedTuple):
    """A buffer, by the arguments of `torch.empty_strided`."""

    slot: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    zeros: bool

    def repeat(self, buffers: list[Tensor | None], addresses: list[int]) -> None:
        """Allocate it again."""
        buffer = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        buffers[self.slot] = buffer.zero_() if self.zeros else buffer
        addresses[self.slot] = buffer.data_ptr()


@dataclass
class _Launch:
    """A launch of a compiled kernel: its arguments, of which some are addresses in buffers."""

    run: Callable[..., None]
    arguments: list[Any]
    addresses: list[tuple[int, int, int]]
    """(index among the arguments, slot of the buffer, bytes into it)"""
    descriptors: list[tuple[Any, int]]
    """(descriptor among the arguments, slot of its buffer, which it has only while it is used)"""
    unused: list[int]
    """Slots of the buffers that nothing uses later."""

    def repeat(self, buffers: list[Tensor | None], addresses: list[int]) -> None:
        """Launch it again."""
        arguments = self.arguments.copy()
        for index, slot, offset in self.addresses:
            arguments[index] = addresses[slot] + offset
        for descriptor, slot in self.descriptors:
            descriptor.base = buffers[slot]
        self.run(*arguments)
        # A base that stayed would keep the call's tensor alive until the next one.
        for descriptor, _ in self.descriptors:
            descriptor.base = None
        # Given back in the order of the recorded call, or all buffers would be alive at once: 0.4 GiB more for
        # gradients in two passes at 128K 4096/12 (by count; benchmarks/LOG.md, "Launches and host time").
        for slot in self.unused:
            buffers[slot] = None


@dataclass(frozen=True)
class _Record:
    """The allocations and launches of a call, in order. Buffers have slots: first the given tensors, then those that
    it allocates."""

    steps: list[_Allocation | _Launch]
    allocated: int
    results: list[int]
    """Slots of what it returns."""
    is_tuple: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A record's descriptors serve one thread at a time."""

    def replay(self, tensors: list[Tensor], addresses: list[int]) -> Any:
        """The results of the recorded function for these tensors, at these addresses."""
        buffers: list[Tensor | None] = [*tensors, *[None] * self.allocated]
        addresses = [*addresses, *[0] * self.allocated]
        with self.lock:
            for step in self.steps:
                step.repeat(buffers, addresses)
        results = tuple([buffers[slot] for slot in self.results])
        return results if self.is_tuple else results[0]


class _Recorder(TorchDispatchMode):
    """Inside, on this thread: notes allocations and launches, and if there is anything else."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        # Reversed, so that of equal addresses the first slot stays: the key of a record says which arguments are one
        # tensor.
        self.given = {x.data_ptr(): slot for slot, x in reversed([*enumerate(tensors)])}
        self.storages = {*map(_storage, tensors)}
        self.given_slots = self.slots = len(tensors)
        self.steps: list[_Allocation | _Launch] = []
        self.unseen = 0
        self.complete = True
        self.allocations: dict[int, _Allocation] = {}
        """The newest at each address: one that was there before has been freed."""

    def __enter__(self) -> "_Recorder":
        super().__enter__()
        _thread.recorder = self
        # Triton calls the hook for every launch, `launched` counts down for those that come through `launch`: what is
        # left has gone past the recorder, and such a call is not repeated.
        knobs.runtime.launch_enter_hook.add(self._runs)
        return self

    def __exit__(self, *error: Any) -> None:
        knobs.runtime.launch_enter_hook.remove(self._runs)
        _thread.recorder = None
        super().__exit__(*error)

    def _runs(self, _metadata: Any) -> None:
        """Triton's hook: any thread launches a kernel, by whatever means."""
        self.unseen += _recorder() is self

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*arguments, **(named or {}))
        name = operator.overloadpacket.__name__
        if name in _EMPTY | _ZEROS:
            form = (result.shape, result.stride(), result.dtype, result.device)
            made = _Allocation(self.slots, *form, zeros=name in _ZEROS)
            self.slots += 1
            self.steps.append(made)
            self.allocations[_storage(result)] = made
        # A copy, a fill or arithmetic: it is not among the steps, so replaying would leave its result undefined.
        elif not operator.is_view:
            self.complete = False
        return result

    def launched(self, kernel: Any, compiled: Any, grid: tuple[int, ...], named: dict[str, Any]) -> None:
        """Note a launch."""
        if compiled is None:  # under Triton's interpreter
            self.complete = False
            return
        self.unseen -= 1
        arguments = [named[parameter.name] for parameter in kernel.params]  # not the compiler's options
        found = _Launch(_runner(compiled, (*grid, 1, 1)[:3]), arguments, [], [], [])
        for index, (parameter, given) in enumerate(zip(kernel.params, tuple(arguments), strict=True)):
            if parameter.is_constexpr or isinstance(given, (int, float)):
                continue
            base = getattr(given, "base", given)  # of a descriptor, Triton's or Gluon's
            if not isinstance(base, Tensor):
                self.complete = False
            elif (found_in := self._buffer(base)) is None:
                continue  # a table of the layout, which stays where it is
            elif base is given:
                found.addresses.append((index, *found_in))
                found.arguments[index] = None
            else:
                slot, offset = found_in
                # One that stays with the record: made again at each launch, descriptors took the host 0.27 of 0.90 ms
                # of a call at 8K 512/3 (benchmarks/LOG.md, "Launches and host time").
                descriptor = copy(given)  # the call may use it again
                descriptor.base = None
                found.descriptors.append((descriptor, slot))
                found.arguments[index] = descriptor
                # A replay gives the descriptor a whole buffer; a view into one could not be repeated.
                self.complete &= offset == 0
        self.steps.append(found)

    def _buffer(self, x: Tensor) -> tuple[int, int] | None:
        """Slot and offset in bytes of a tensor in one of the buffers; None: it is in none of them."""
        address = x.data_ptr()
        if address in self.given:
            return self.given[address], 0
        storage = _storage(x)
        self.complete &= storage not in self.storages  # a part of a given tensor
        made = self.allocations.get(storage)
        return None if made is None else (made.slot, address - storage)

    def record(self, result: Any) -> _Record | None:
        """The record of a call that returned `result`; None if there can be none."""
        is_tuple = isinstance(result, tuple)
        slots = []
        for x in result if is_tuple else (result,):
            made = self.allocations.get(_storage(x))
            # A view or a given tensor cannot be named by the slot of an allocation.
            if made is None or made[1:4] != (x.shape, x.stride(), x.dtype):
                return None
            slots.append(made.slot)
        if not self.complete or self.unseen > 0:
            return None
        self._find_unused(slots)
        return _Record(self.steps, self.slots - self.given_slots, slots, is_tuple)

    def _find_unused(self, results: list[int]) -> None:
        needed = {*range(self.given_slots), *results}
        for step in reversed(self.steps):
            if isinstance(step, _Launch):
                used = {slot for _, slot, *_ in (*step.addresses, *step.descriptors)}
                step.unused = sorted(used - needed)
                needed |= used


def _recorder() -> _Recorder | None:
    return getattr(_thread, "recorder", None)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
