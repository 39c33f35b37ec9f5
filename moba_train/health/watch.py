"""Slow ranks (`Stragglers`), which metrics compare, and ranks that stall (`Watch`), which are named while others wait.

Slow ranks: all ranks meet once a step, in a collective on the host. The time from one meeting to the next, the step's
collectives included, shows slow data, disks and hosts. The time in attention, which holds no communication, shows slow
GPUs and unequal work.

Stalls: a thread of each rank publishes heartbeats with the phase that the training thread is in, and the time in it.
When the phase takes much longer than it lately did, the thread adds the training thread's stack and writes the rank's
flight record. Rank 0, or if it is silent one of the others, reads the heartbeats of all ranks and names the rank that
the others wait for: one whose heartbeat has stopped, otherwise the one that is behind. The timeout of the collectives
ends the run, see parallel/failures.py.
"""

import logging
import os
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.observer import Observer, observing
from moba_train.errors import ForeignFileError
from moba_train.output_files import make_folder, write_atomically
from moba_train.parallel.context import comm
from moba_train.parallel.failures import Heartbeat
from moba_train.parallel.world import World, flight_records, gather_over_ranks
from moba_train.torch_private import dump_flight_record


class AttentionTimer(Observer):
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


class Stragglers:
    """Compares the times of the ranks at every `every`-th step."""

    def __init__(self, every: int, device: torch.device) -> None:
        self._every = every
        self._device = device
        self._met: float | None = None
        self._step_s = 0.0
        self._timer: AttentionTimer | None = None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Measure the time between meetings. Encloses the collective of each step in which the ranks wait for each
        other."""
        if self._met is not None:
            self._step_s = time.perf_counter() - self._met
        yield
        self._met = time.perf_counter()

    @contextmanager
    def attention(self, step: int, engine: OperatorEngine) -> Iterator[None]:
        """Measure the time in attention. Encloses the forward and backward passes of `step`, whose attention `engine`
        runs."""
        if not self._due(step):
            yield
            return
        with observing(engine, AttentionTimer(self._device)) as self._timer:
            yield

    def metrics(self, step: int) -> dict[str, float]:
        """Comparison of the ranks' times; empty unless one is due at `step`. Called on all ranks.

        `straggler_step` and `straggler_attention` are the longest time over the mean of all ranks, `straggler_*_rank`
        is the rank that took it, and `attention_s` the mean time in attention, in seconds. The step's time is that of
        the step before.
        """
        if not self._due(step) or self._timer is None:
            return {}
        every = gather_over_ranks([self._step_s, self._timer.seconds()])
        metrics = {"attention_s": sum(attention_s for _, attention_s in every) / len(every)}
        if len(every) > 1:
            for name, times in zip(("step", "attention"), zip(*every, strict=True), strict=True):
                mean = sum(times) / len(times)
                metrics[f"straggler_{name}"] = max(times) / mean if mean else 1.0
                metrics[f"straggler_{name}_rank"] = float(times.index(max(times)))
        return metrics

    def _due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0


LEAST_S = 120.0
"""Seconds before any phase counts as stalled."""
FACTOR = 10.0
"""Times the median of a phase's recent times before it is called stalled."""
COMPARE_EVERY = 10
"""Logged steps between comparisons of the ranks."""
KNOWN_AFTER = 3
"""Completed times of a phase after which its duration counts as known."""
BEFORE_TIMEOUT = 0.8
"""Longest limit of a phase, as a share of the collectives' timeout: a stall is reported before it ends the run."""
_BETWEEN = "between phases"
_COMMUNICATION = (str(Path(dist.__file__).parent), comm.__file__)
"""Beginnings of the file names in which a rank that waits in a collective has its innermost frame."""
_READER = "moba_train/watch/reader"
"""Key of the rank that reads all heartbeats while rank 0 is silent."""
_FRAMES = 12
_MOST_NAMED = 8

logger = logging.getLogger(__name__)


def stalls_folder(run_dir: Path) -> Path:
    """Folder of a run for the flight records of stalled ranks."""
    return run_dir / "stalls"


class _Phase(NamedTuple):
    entered: int
    name: str
    step: int
    began: float
    limit_s: float


class PhaseTimes:
    """Limits of the phases of a run: FACTOR x the median of a phase's last 64 times, not less than LEAST_S, not more
    than `most` seconds; `most` while the phase has completed fewer than 3 times."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=64))

    def add(self, phase: str, seconds: float) -> None:
        """Record that `phase` took `seconds`."""
        self._times[phase].append(seconds)

    def limit(self, phase: str) -> float:
        """Seconds after which `phase` counts as stalled."""
        times = self._times[phase]
        if len(times) < KNOWN_AFTER:
            return self._most
        return min(self._most, max(LEAST_S, FACTOR * statistics.median(times)))

    def forget(self) -> None:
        """Forget all times: at a switch of stage they change."""
        self._times.clear()


class Watch:
    """Watches the thread that constructs it. All ranks go through the same phases in the same order.

    `report` gets the text about a stall, on the rank that found it, in the watching thread.
    """

    def __init__(self, world: World, folder: Path, report: Callable[[str], None]) -> None:
        most = BEFORE_TIMEOUT * world.timeout.total_seconds()
        self._times = PhaseTimes(most)
        # A twentieth of the shortest limit: five heartbeats fit into the quarter after which a rank counts as silent.
        self._interval_s = min(5.0, min(LEAST_S, most) / 20)
        self._rank = world.rank
        self._size = world.size
        self._cuda = world.device.type == "cuda"
        # A connection of its own: the training thread may be waiting for an answer on the world's.
        self._store: dist.Store = world.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._folder = folder
        self._report = report
        self._watched = threading.get_ident()
        self._now = _Phase(0, _BETWEEN, 0, time.monotonic(), most)
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._reported = self._recorded = -1
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Inside, the training thread is in the phase `name`, after `step` complete steps; costs microseconds.

        Phases may be nested: at its end an inner phase gives way to the outer one. A phase that ends with an exception
        stays the current one, because the rank was in it.
        """
        outer = self._now.name
        self._enter(name, step)
        yield
        self._enter(outer, step)

    def _enter(self, phase: str, step: int) -> None:
        last = self._now
        now = time.monotonic()
        if last.name != _BETWEEN:  # its limit stays `most`, because anything may happen there
            self._times.add(last.name, now - last.began)
        self._now = _Phase(last.entered + 1, phase, step, now, self._times.limit(phase))

    def forget(self) -> None:
        """Forget the times of the phases, because from now on they take another time."""
        self._times.forget()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(self._interval_s + 1)

    def _work(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._look()
            except (RuntimeError, OSError) as error:  # the store is gone: the run ends
                logger.info("the watch ends: %s", error)
                return

    def _look(self) -> None:
        phase = self._now
        age = time.monotonic() - phase.began
        # The stack only from half of the limit on: reading it holds Python's lock.
        late = age > phase.limit_s / 2
        self._beats += 1
        stack, waits = _stack(self._watched) if late else ("", False)
        own = Heartbeat(self._beats, phase.entered, phase.name, phase.step, age, phase.limit_s, stack, waits)
        own.publish(self._store, self._rank)
        if not late:
            return
        self._name_who_stalls(phase, own)
        if age > phase.limit_s and self._recorded != phase.entered:
            # Last, because it hangs if the disk is what hangs.
            self._recorded = phase.entered
            _write_flight_record(self._folder, self._rank, self._cuda)

    def _name_who_stalls(self, phase: _Phase, own: Heartbeat) -> None:
        """Report a stall, if this is the rank that reads all heartbeats and its own phase is over its limit."""
        if not self._is_reader(phase.limit_s):
            return
        heartbeats = {rank: Heartbeat.latest(self._store, rank) for rank in range(self._size)}
        silent = [rank for rank in range(self._size) if rank != self._rank and self._silent(rank, phase.limit_s)]
        if own.age_s > phase.limit_s and self._reported != phase.entered and (to_blame := _behind(heartbeats, silent)):
            self._reported = phase.entered
            text = _describe(heartbeats, to_blame, silent, own, self._size, _flight_record_files(self._folder))
            logger.error("%s", text)
            self._report(text)

    def _is_reader(self, limit_s: float) -> bool:
        """True on the rank that reads the heartbeats of all: 0 or, while that is silent, the first that claims it. A
        late rank asks for two at most: if each asked for all before it, requests would grow with the square of the
        ranks, and each rank of a lost node would hold up the report by a quarter of the limit."""
        if self._rank == 0 or not self._silent(0, limit_s):
            return self._rank == 0
        own = str(self._rank)
        claimed = self._store.compare_set(_READER, "", own).decode()
        if claimed != own and self._silent(int(claimed), limit_s):
            claimed = self._store.compare_set(_READER, claimed, own).decode()
        return claimed == own

    def _silent(self, rank: int, limit_s: float) -> bool:
        """True if no heartbeat of `rank` came for a quarter of the limit, since this rank first read it."""
        heartbeat = Heartbeat.latest(self._store, rank)
        now = time.monotonic()
        count = heartbeat.count if heartbeat else 0
        if rank not in self._seen or self._seen[rank][0] != count:
            self._seen[rank] = count, now
        return now - self._seen[rank][1] > limit_s / 4


def _behind(heartbeats: dict[int, Heartbeat | None], silent: list[int]) -> list[int]:
    """Ranks that the others wait for: the silent ones; without any, those in the earliest phase if all of them are over
    their limit, and of several in the same phase those that do not wait in a collective."""
    if silent:
        return silent
    alive = {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat}
    least = min(heartbeat.entered for heartbeat in alive.values())
    last = {rank: heartbeat for rank, heartbeat in alive.items() if heartbeat.entered == least}
    if any(heartbeat.age_s <= heartbeat.limit_s for heartbeat in last.values()):
        return []  # one of them is within its limit: in a checkpoint, for example
    return [rank for rank, heartbeat in last.items() if not heartbeat.waits] or list(last)


def _describe(
    heartbeats: dict[int, Heartbeat | None],
    to_blame: list[int],
    silent: list[int],
    own: Heartbeat,
    size: int,
    records: str,
) -> str:
    lines = []
    for rank in to_blame[:_MOST_NAMED]:
        heartbeat = heartbeats[rank]
        if heartbeat is None:
            lines.append(f"rank {rank} of {size} stalls: it has never sent a heartbeat")
        elif rank in silent:
            lines.append(
                f"rank {rank} of {size} stalls in {heartbeat.phase!r} after step {heartbeat.step}: no heartbeat; its "
                "process is stopped or dead, holds Python's lock, or its node is gone"
            )
        else:
            lines.append(
                f"rank {rank} of {size} stalls in {heartbeat.phase!r} after step {heartbeat.step}: for "
                f"{heartbeat.age_s:.1f} s, limit {heartbeat.limit_s:.1f} s; it is at\n{heartbeat.stack}"
            )
    if len(to_blame) > _MOST_NAMED:
        lines.append(f"... and {len(to_blame) - _MOST_NAMED} more ranks")
    if len(to_blame) < size:
        lines.append(f"the others wait for {own.age_s:.1f} s, in {own.phase!r}")
    lines.append(f"flight records of the ranks that wait: {records} (torchfrtrace reads them)")
    return "\n".join(lines)


def _stack(thread: int) -> tuple[str, bool]:
    """Innermost frames of a thread, and True if it waits in a collective."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame) if frame else traceback.StackSummary()
    waits = bool(frames) and frames[-1].filename.startswith(_COMMUNICATION)
    return "".join(traceback.format_list(frames[-_FRAMES:])), waits


def _flight_record_files(folder: Path) -> str:
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE", str(flight_records(folder))) + "*"


def _write_flight_record(folder: Path, rank: int, cuda: bool) -> None:
    """Write the last collectives of this rank: NCCL's on a GPU, because NCCL itself writes them only at its own
    timeout, otherwise gloo's."""
    path = Path(_flight_record_files(folder)[:-1] + str(rank))
    try:
        make_folder(path.parent)
        write_atomically(path, dump_flight_record(cuda))
    except (OSError, ForeignFileError) as error:
        logger.warning("no flight record: %s", error)
