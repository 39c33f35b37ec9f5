"""Which rank is the slowest, and by how much.

All ranks meet once a step, in a collective on the host. The time from one meeting to the next, the step's collectives
included, shows slow data, disks and hosts; the time in attention, which holds no communication, shows slow GPUs and
unequal work.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moba_train.attention.observer import AttentionTimer
from moba_train.attention.operators import OperatorEngine
from moba_train.parallel.world import values_of_ranks


class Stragglers:
    """Compares the times of the ranks at every `every`-th step (0: never)."""

    def __init__(self, every: int, device: torch.device) -> None:
        self._every = every
        self._device = device
        self._met: float | None = None
        self._step_s = 0.0
        self._timer: AttentionTimer | None = None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around the collective of each step in which the ranks wait for each other."""
        if self._met is not None:
            self._step_s = time.perf_counter() - self._met
        yield
        self._met = time.perf_counter()

    @contextmanager
    def attention(self, step: int, engine: OperatorEngine) -> Iterator[None]:
        """Around the forward and backward passes of `step`, whose attention `engine` runs."""
        if not self._due(step):
            yield
            return
        with engine.observe(AttentionTimer(self._device)) as self._timer:
            yield

    def metrics(self, step: int) -> dict[str, float]:
        """Comparison of the ranks' times; empty unless one is due at `step`. Called on all ranks.

        `straggler_step` and `straggler_attention` are the longest time over the mean of all ranks, `straggler_*_rank`
        the rank that took it, and `attention_s` the mean time in attention. The step's time is that of the step before.
        """
        if not self._due(step) or self._timer is None:
            return {}
        every = values_of_ranks([self._step_s, self._timer.seconds()])
        metrics = {"attention_s": sum(attention_s for _, attention_s in every) / len(every)}
        if len(every) > 1:
            for name, times in zip(("step", "attention"), zip(*every, strict=True), strict=True):
                mean = sum(times) / len(times)
                metrics[f"straggler_{name}"] = max(times) / mean if mean else 1.0
                metrics[f"straggler_{name}_rank"] = float(times.index(max(times)))
        return metrics

    def _due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0
