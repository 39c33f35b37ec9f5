"""Copies of a run's tensors in CPU memory, made while training goes on, and a search for NaN and infinite values.

A background thread issues the copies, because a GPU's queue holds about a thousand, and issuing more blocks. They are
made while the next forward and backward pass run, and only the update of the weights waits for them
(`Stager.before_update`).
"""

import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from moba_train.optim.gradients import local_part
from moba_train.parallel.offload import PageLockedMemory
from moba_train.torch_private import foreach_norm


class Stager:
    """Copies this rank's part of each tensor into host memory of the same size, which is page-locked for tensors on a
    GPU, and kept from one save to the next.

    `begin` and `before_update` are called by the training thread, `stage` by the thread of a save.
    """

    def __init__(self) -> None:
        # With copies from the training thread a save of 1,166 tensors stalled it for 161 ms of a step of 1.07 s: the
        # queue takes about a thousand (benchmarks/results/checkpoint-stall-8b-h200-x2.json).
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._copied: torch.cuda.Event | None = None
        self._issued = threading.Event()
        self._issued.set()
        self._memory = PageLockedMemory()
        self._copies: dict[str, Tensor] = {}

    def reserve(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Allocates and returns the memory for the copies of `tensors`."""
        self._copies = {name: self._memory_for(name, local_part(tensor)) for name, tensor in tensors.items()}
        return self._copies

    def begin(self) -> torch.cuda.Event | None:
        """Announces copies of the tensors as they are now; the result is for `stage`."""
        self._issued.clear()
        return torch.cuda.current_stream().record_event() if self._stream is not None else None

    def stage(
        self, tensors: Mapping[str, Tensor], ready: torch.cuda.Event | None
    ) -> tuple[dict[str, Tensor], list[str], float]:
        """Returns copies of this rank's parts as they were at `ready`, the names of those that are not finite, and the
        seconds that looking for them took."""
        try:
            if self._stream is not None:
                # A new thread's current device is GPU 0. Leaving a stream context returns to it, which creates a
                # context on GPU 0, and for seconds no other thread of the process can launch anything: the step after a
                # save took 3.4 s, not 1.1 (benchmarks/results/checkpoint-stall-8b-h200-x4-contexts.json,
                # checkpoint-stall-8b-h200-x4.json).
                torch.cuda.set_device(self._stream.device)
            with torch.cuda.stream(self._stream):
                if ready is not None:
                    ready.wait()
                parts = {name: local_part(tensor) for name, tensor in tensors.items()}
                copies = self.reserve(parts)
                check = FiniteCheck(parts)
                for name, part in parts.items():
                    copies[name].copy_(part, non_blocking=True)
                copied = self._copied = self._stream.record_event() if self._stream is not None else None
        finally:
            # Also after an error, or the training thread would wait for ever.
            self._issued.set()
        if copied is not None:
            # This thread waits, not the training thread.
            copied.synchronize()
        return copies, *check.result(copies)

    def before_update(self) -> None:
        """Orders the copies that `begin` announced before the update: on a CPU, waits until they are made; on a GPU,
        waits until they are issued, and the current stream waits for them."""
        self._issued.wait()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def free(self) -> None:
        """Lets go of the memory; a save that still reads it keeps it until then."""
        self._copies = {}

    def _memory_for(self, name: str, part: Tensor) -> Tensor:
        """Memory for a copy of `part`: that of the last copy if shape and dtype fit."""
        memory = self._copies.get(name)
        if memory is None or memory.shape != part.shape or memory.dtype != part.dtype:
            memory = self._memory.empty_like(part)
        return memory


class FiniteCheck:
    """Search for NaN and infinite values: in tensors on a GPU where they are, of the others in the copies.

    It takes one pass over memory and no large temporaries; `isfinite().all()` writes a tensor of bools first and takes
    eighteen times as long as the extrema on one core of a CPU. Made on the stream that copies the tensors; nothing
    waits for the GPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        some = {name: x for name, x in tensors.items() if x.is_floating_point() and x.numel()}
        self._names = [name for name, x in some.items() if x.itemsize > 1]  # of narrower numbers there are no extrema
        self._on_gpu = [name for name in self._names if tensors[name].is_cuda]
        self._flags = torch.empty(0, dtype=torch.bool)
        self._timed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if self._on_gpu:
            self._timed = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._timed[0].record()
            # The largest magnitude, which NaN passes through. A sum of squares would overflow for finite values.
            largest = foreach_norm([tensors[name] for name in self._on_gpu], float("inf"))
            finite = torch.stack(largest).isfinite()
            self._flags = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
            self._flags.copy_(finite, non_blocking=True)
            self._timed[1].record()

    def result(self, copies: Mapping[str, Tensor]) -> tuple[list[str], float]:
        """Names of the tensors that are not finite, and the seconds that looking for them took. To be called once the
        GPU has made the `copies`."""
        began = time.perf_counter()
        finite = dict(zip(self._on_gpu, self._flags.tolist(), strict=True))
        on_host = [name for name in self._names if name not in finite]
        if on_host:
            # NaN passes through the extrema as well, and they need no mask of a tensor's size (1.3 ms for the quick
            # start's model, benchmarks/results/finite-check-cpu.json).
            extrema = [extremum for name in on_host for extremum in torch.aminmax(copies[name])]
            flags = torch.stack(extrema).isfinite().view(-1, 2).all(dim=1)
            finite |= zip(on_host, flags.tolist(), strict=True)
        seconds = time.perf_counter() - began
        if self._timed is not None:
            seconds += self._timed[0].elapsed_time(self._timed[1]) / 1000
        return [name for name in self._names if not finite[name]], seconds
