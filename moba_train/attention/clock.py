"""How long attention computes, measured only while somebody asks.

What is timed is the local work (`summarize`, `plan`, `attend`, `attend_backward`), not the communication between. On a
GPU by pairs of events, which the GPU never waits for; on the CPU by the wall clock.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moba_train.attention.protocol import LocalAttention

_TIMED = ("summarize", "plan", "attend", "attend_backward")


class AttentionClock:
    """The calls of one measurement."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def seconds(self) -> float:
        """Of all calls together. Call when the GPU is known to be past them, or it is waited for."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000

    @contextmanager
    def call(self) -> Iterator[None]:
        """Times what happens within."""
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


_running: AttentionClock | None = None


@contextmanager
def attention_timed(device: torch.device) -> Iterator[AttentionClock]:
    """All attention that runs within, on any thread of this process, is timed by the clock given out."""
    global _running
    _running = AttentionClock(device)
    try:
        yield _running
    finally:
        _running = None


def on_the_clock(attention: LocalAttention) -> LocalAttention:
    """`attention` itself, or, while one measures, as something that times its calls."""
    return attention if _running is None else _Timed(attention, _running)  # type: ignore[return-value]  # by __getattr__


class _Timed:
    def __init__(self, attention: LocalAttention, clock: AttentionClock) -> None:
        self._attention, self._clock = attention, clock

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._attention, name)
        if name not in _TIMED:
            return value

        def timed(*arguments: Any) -> Any:
            with self._clock.call():
                return value(*arguments)

        return timed
