"""Observers of a run's steps: the clock that times them, stalled ranks, stragglers, broken GPUs and full disks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moba_train.health.node import Disk, NodeWatch
from moba_train.health.watch import Stragglers, Watch, stalls_folder
from moba_train.memory.weights import checkpoint_bytes
from moba_train.parallel.world import World
from moba_train.resolve.run import ResolvedRun


class StepClock:
    """Times the steps of a run.

    A step begins where the step before was measured, so that its logging and what the GPU still had to do count. After
    anything that is no part of a step (the beginning of a stage, a save, an evaluation, a batch without loss), it
    begins when the rank begins to wait for the step's data.
    """

    def __init__(self) -> None:
        self._measured_at: float | None = None
        """`time.perf_counter()` at which the last step was measured; None after an interruption."""
        self._began = 0.0
        self.waited_s = 0.0
        """Seconds that the current step waited for its data."""

    def interrupt(self) -> None:
        """Note that something is done that is no part of a step."""
        self._measured_at = None

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the wait for the data of the next step, which begins here or where the one before was measured."""
        asked = time.perf_counter()
        yield
        # From 21 to 26 November a step began after the log had waited for the update, and lacked 28 to 38 ms of the
        # 8B's step at 8K (benchmarks/LOG.md, "The clock of a step").
        self._began = asked if self._measured_at is None else self._measured_at
        self.waited_s = time.perf_counter() - asked

    def measure(self) -> float:
        """Seconds of the current step, which ends here."""
        self._measured_at = time.perf_counter()
        return self._measured_at - self._began

    @property
    def elapsed_s(self) -> float:
        """Seconds since the current step began, with what has followed it."""
        return time.perf_counter() - self._began


class Monitors:
    """Watches this rank while the run goes on, in threads of its own; made and closed on all ranks together."""

    def __init__(
        self,
        run: ResolvedRun,
        world: World,
        stalled: Callable[[str], None],
        node_problem: Callable[[str], None],
    ) -> None:
        """stalled, node_problem: get the text about a stall, or about a GPU or a disk, in the watching thread."""
        health = run.health
        self.watch = Watch(health.watch, world, stalls_folder(run.folders.run), stalled)
        folders = [run.folders.run, *([Path(run.checkpoint.fallback_dir)] if run.checkpoint.fallback_dir else [])]
        needed = checkpoint_bytes(run.setup.spec, run.optim.kind) if run.memory.saves else 0
        self._node = NodeWatch(health.node, world, [Disk(folder, needed) for folder in folders], node_problem)
        self.stragglers = Stragglers(health.watch.compare_every * run.telemetry.log_every, world.device)

    def close(self) -> None:
        """End the threads."""
        self._node.close()
        self.watch.close()
