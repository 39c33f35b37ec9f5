"""Saved tensors that wait for their backward pass in page-locked host memory, of just the size that they need.

torch's own (`pin_memory=True`) is rounded up to a power of two, and its small pages take longer to lock
(benchmarks/results/page-locked-h200.json).

Copies run on a stream of their own: out while the next block's forward pass computes, back while the backward pass of
the block after computes. Contents, dtype and strides come back as they were. On a CPU the same code makes plain copies.
"""

import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LONGEST_WAIT_S = 10.0
"""Longest wait for a GPU to become idle before memory is unlocked: a collective whose other ranks have gone never
ends."""


class PageLockedMemory:
    """Allocates such memory; all of it is unlocked when this object goes, or stays until the process ends if the GPU is
    not idle then."""

    def __init__(self) -> None:
        self._locked: list[tuple[Tensor, int]] = []
        # Not at exit: the process's memory goes anyway, and unlocking may wait for a GPU that never becomes idle.
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def empty(self, count: int, device: torch.device) -> Tensor:
        """`count` bytes, uint8, page-locked if `device` is a GPU. Raises OSError where there is no such memory, and
        torch.cuda.CudaError where it cannot be locked."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        # 16 GiB were locked in 4.4 s so, in 6.5 s as shared memory; 22.4 GiB for a save take 22.8 GiB and 4.4 to 5.4 s,
        # by torch's pin_memory 25.3 GiB and 12 s (benchmarks/results/page-locked-h200.json).
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer pages to lock; a fork would copy locked ones
            with suppress(OSError, AttributeError):
                memory.madvise(getattr(mmap, advice))
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), count, 0)))
            self._locked.append((buffer, torch.cuda.current_device()))
        return buffer

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Memory for a contiguous copy of `tensor`, with its shape and dtype, page-locked as by `empty`."""
        return self.empty(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)


def _unlock(buffers: list[tuple[Tensor, int]]) -> None:
    """Unlocks the pages of these buffers in another thread, as the driver waits for all work of the GPU first, which
    may never end. The caller waits for that at most LONGEST_WAIT_S."""
    idle = threading.Event()

    def work() -> None:
        while buffers:
            buffer, device = buffers.pop()
            torch.cuda.set_device(device)  # a new thread's is GPU 0, on which it would create a context
            torch.cuda.synchronize()
            idle.set()
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    if buffers:
        # A daemon, so that the process ends even if a collective whose ranks have gone keeps the GPU busy.
        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started
            work()
            return
        if idle.wait(LONGEST_WAIT_S):
            thread.join()


SMALLEST_BYTES = 2**20
"""Smaller tensors stay on a GPU: the start of a copy costs more than they take. On a CPU they travel as well."""


def buffer_bytes(count: int) -> int:
    """Bytes of the buffer for `count` bytes, an eighth or a page of 4 KiB more at most: few different sizes, as the
    tables of attention have another size with each batch's documents."""
    step = 1 << max(12, count.bit_length() - 4)
    return -(-count // step) * step


class HostMemory:
    """Host memory for the tensors that blocks save, with the streams and buffers of their copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = torch.get_device_module(device)
        # One stream for both directions: a buffer may be written again as soon as the copy from it has been asked for.
        self._copies = self._streams.Stream()
        self._smallest = SMALLEST_BYTES if device.type == "cuda" else 0
        self._buffers: dict[int, list[Tensor]] = defaultdict(list)
        self._sending: deque[tuple[Any, list[Tensor]]] = deque()
        self._last_pass: weakref.ref[_Pass] | None = None
        self._memory = PageLockedMemory()

    @contextmanager
    def holding_rows(self, rows: int, others: Iterable[Tensor]) -> Iterator[None]:
        """Inside, one block's forward pass on `rows` tokens runs: what it saves goes to the host, if it has an element
        for each token at least.

        others: tensors that exist anyway, such as weights; they and their views stay where they are.
        """
        # Of the newest block the copies are still under way, beside this block.
        self._settle(unsettled=1)
        own = _Pass(self, self._last_pass() if self._last_pass is not None else None)
        self._last_pass = weakref.ref(own)
        # Weights are there anyway, and sending them would take the link's time for nothing.
        excluded = {_address(part) for tensor in others for part in _plain_parts(tensor)}
        sent: list[Tensor] = []

        def pack(tensor: Tensor) -> "Tensor | _Sent":
            if not self._travels(tensor, rows) or _address(tensor) in excluded:
                return tensor
            sent.append(tensor)
            return own.send(tensor)

        with saved_tensors_hooks(pack, lambda packed: packed.fetch() if isinstance(packed, _Sent) else packed):
            yield
        self._sending.append((self._mark(), sent))

    def copy_out(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """A buffer that `tensor` is being copied to, and its copy in there."""
        size = buffer_bytes(tensor.nbytes)
        buffer = self._buffers[size].pop() if self._buffers[size] else self._memory.empty(size, self._device)
        copy = buffer[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        # The tensor must have been computed; the copy waits on its stream, not the host.
        self._copies.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copies):
            copy.copy_(tensor, non_blocking=True)
        return buffer, copy

    def copy_back(self, copies: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Tensors on the device that these copies are being copied to, and the event after which they are there."""
        self._settle(unsettled=0)
        found = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._device) for x in copies]
        self._copies.wait_stream(self._streams.current_stream())  # their memory may still be in use
        with self._streams.stream(self._copies):
            for tensor, copy in zip(found, copies, strict=True):
                tensor.copy_(copy, non_blocking=True)
        return found, self._mark()

    def wait_for(self, event: Any) -> None:
        """Let the computation wait for an event of the copies."""
        self._streams.current_stream().wait_event(event)

    def reuse(self, buffer: Tensor) -> None:
        """Take back a buffer; copies from it that are under way come before those to it, on the same stream."""
        self._buffers[buffer.nbytes].append(buffer)

    def _mark(self) -> Any:
        event = self._streams.Event()
        event.record(self._copies)
        return event

    def _settle(self, unsettled: int) -> None:
        """Free the tensors that were sent, except those of the last `unsettled` blocks, once their copies are
        complete."""
        while len(self._sending) > unsettled:
            copied, sent = self._sending.popleft()
            self.wait_for(copied)
            sent.clear()  # autograd holds the hook that filled the list, and so the list, until the backward pass

    def _travels(self, tensor: Tensor, rows: int) -> bool:
        if type(tensor) is not Tensor or tensor.device.type != self._device.type or tensor.numel() < rows:
            return False
        owns_its_memory = tensor.untyped_storage().nbytes() == tensor.nbytes
        return owns_its_memory and tensor.nbytes >= self._smallest


class _Pass:
    """The tensors that one forward pass of a block has sent, and where they are."""

    def __init__(self, memory: HostMemory, before: "_Pass | None") -> None:
        self.memory = memory
        # Weak, as is every reference from pass to pass: else all passes of a step would be a chain that keeps each
        # other. When a list held the sent tensors, 256K ended out of memory at 75.8 GiB, 51.5 predicted
        # (benchmarks/LOG.md, "Long sequences").
        self._before = weakref.ref(before) if before is not None else None
        self._sent: list[weakref.ref[_Sent]] = []
        self._arrival: Any = None

    def send(self, tensor: Tensor) -> "_Sent":
        sent = _Sent(self, tensor)
        self._sent.append(weakref.ref(sent))
        return sent

    def arrived(self) -> None:
        """Have everything on the device, and the block before, whose backward pass comes next, on its way."""
        self.fetch()
        before = self._before() if self._before is not None else None
        if before is not None:
            # One block ahead, so that the copy is hidden behind this block's backward pass.
            before.fetch()
        self.memory.wait_for(self._arrival)

    def fetch(self) -> None:
        """Begin to copy everything back, once."""
        if self._arrival is not None:
            return
        waiting = [sent for reference in self._sent if (sent := reference()) is not None]
        tensors, self._arrival = self.memory.copy_back([sent.copy for sent in waiting])
        for sent, tensor in zip(waiting, tensors, strict=True):
            sent.on_device = tensor


class _Sent:
    """One saved tensor; autograd holds it as long as it may need it."""

    def __init__(self, own_pass: _Pass, tensor: Tensor) -> None:
        self._pass = own_pass
        buffer, self.copy = own_pass.memory.copy_out(tensor)
        self.on_device: Tensor | None = None
        # When autograd lets go of the tensor, also if its backward pass never comes, as after an error.
        weakref.finalize(self, own_pass.memory.reuse, buffer).atexit = False

    def fetch(self) -> Tensor:
        """The tensor, on the device again."""
        self._pass.arrived()
        if self.on_device is None:  # asked for once more, as with retain_graph
            (again,), arrival = self._pass.memory.copy_back([self.copy])
            self._pass.memory.wait_for(arrival)
            return again
        found, self.on_device = self.on_device, None
        return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor consists of: a DTensor's local one, an FP8 weight's data."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a DTensor's mesh is a part as well
            yield from _plain_parts(part)
