"""Host memory that a GPU copies to and from while it computes: page-locked, and of just the size that is asked for.

torch's own (`pin_memory=True`) is rounded up to a power of two, and its small pages take longer to lock
(benchmarks/page_locked.py).
"""

import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor


class PageLockedMemory:
    """Allocates such memory; all of it is unlocked when this object goes."""

    def __init__(self) -> None:
        self._locked: list[Tensor] = []
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def empty(self, count: int, device: torch.device) -> Tensor:
        """`count` bytes, uint8, page-locked if `device` is a GPU."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer pages to lock; a fork would copy locked ones
            with suppress(OSError, AttributeError):
                memory.madvise(getattr(mmap, advice))
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), count, 0)))
            self._locked.append(buffer)
        return buffer

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Memory for a contiguous copy of `tensor`, with its shape and dtype."""
        return self.empty(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)


def _unlock(buffers: list[Tensor]) -> None:
    if buffers:
        torch.cuda.synchronize()
    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
