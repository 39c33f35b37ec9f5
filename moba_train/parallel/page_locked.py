"""Host memory that a GPU copies to and from while it computes: page-locked, and of just the size that is asked for.

torch's own (`pin_memory=True`) is rounded up to a power of two, and its small pages take longer to lock
(benchmarks/page_locked.py).
"""

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

LONGEST_WAIT_S = 10.0
"""For a GPU to become idle before memory is unlocked: a collective whose other ranks have gone never ends."""


class PageLockedMemory:
    """Allocates such memory; all of it is unlocked when this object goes, or stays until the process ends if the GPU is
    not idle then."""

    def __init__(self) -> None:
        self._locked: list[tuple[Tensor, int]] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def empty(self, count: int, device: torch.device) -> Tensor:
        """`count` bytes, uint8, page-locked if `device` is a GPU. Raises OSError where there is no such memory, and
        torch.cuda.CudaError where it cannot be locked."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
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
    """By a thread of its own, as the driver waits for all work of the GPU first, and nobody may wait for ever."""
    idle = threading.Event()

    def work() -> None:
        while buffers:
            buffer, device = buffers.pop()
            torch.cuda.set_device(device)  # a new thread's is GPU 0, on which it would create a context
            torch.cuda.synchronize()
            idle.set()
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    if buffers:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        if idle.wait(LONGEST_WAIT_S):
            thread.join()
