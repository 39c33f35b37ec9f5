"""Observers of an engine: what attention does, looked at from outside (`OperatorEngine.observe`).

An observer sees each of the local functions (`summarize`, `select`, `attend`, `attend_backward`) as it runs, each
selection once it is made, and the log-sum-exp of each forward pass. Communication between them is not seen.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from moba_train.attention.protocol import Layout, LocalAttention, Selection


class AttentionObserver:
    """Base class: an observer that does nothing."""

    def around(self, function: str) -> AbstractContextManager[None]:
        """The context in which the local function of this name runs."""
        return nullcontext()

    def selected(self, attention: LocalAttention, selection: Selection, layout: Layout) -> None:
        """Called after `attention` made a selection for the queries of `layout`."""

    def attended(self, lse_HT: Tensor) -> None:
        """Called after a forward pass with its log-sum-exp, over all keys that the queries attend to."""


class AttentionTimer(AttentionObserver):
    """Adds up how long the local functions take: by pairs of CUDA events on a GPU, by the wall clock on the CPU.

    The GPU never waits for an event.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def seconds(self) -> float:
        """Seconds of all calls together. Waits for the GPU unless it is past them."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000

    @contextmanager
    def around(self, function: str) -> Iterator[None]:
        """Times what runs inside."""
        if not self._cuda:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))
