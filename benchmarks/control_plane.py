"""Messages and seconds of a run's control plane by the number of ranks: start, step, save, heartbeats, load.

    python -m benchmarks.control_plane --output benchmarks/results/control-plane.json

A simulation: the ranks are threads that run the real code of the trainer over a store and collectives of this file, one
at a time, in the order of a clock that only messages and pauses move (10 us for a message, 100 us until it arrives, 20
us for a request at the store). Collectives send what gloo's send: a gather one message a rank to its root, a broadcast
along a binary tree. A rank may die at any of its calls, and nodes may lose the others. Creation of process groups is
torch's, which is not simulated: there every rank reads the addresses of all.
"""

import argparse
import heapq
import logging
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import moba_train.checkpoint.checkpointer as checkpointer_module
import moba_train.checkpoint.files as files_module
import moba_train.checkpoint.process_group as process_group_module
import moba_train.health.watch as watch_module
import moba_train.parallel.failures as failures_module
import moba_train.parallel.run_lock as run_lock_module
import moba_train.parallel.world as world_module
from benchmarks.record import markdown, save
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.load import load_checkpoint, newest_intact
from moba_train.checkpoint.retention import Retention
from moba_train.errors import CommunicationError
from moba_train.health.watch import Watch
from moba_train.parallel.failures import FailureReports
from moba_train.parallel.run_lock import run_folder_lock
from moba_train.parallel.world import World, any_rank, attempt_store, gather_over_ranks, sum_over_ranks

SEND_S = 10e-6
ARRIVE_S = 100e-6
TIMEOUT_S = 60.0
NODE = 8
"""Ranks of a node."""


class DiedError(BaseException):
    """The end of a rank that is killed; no code of the trainer catches it."""


class Simulation:
    """Ranks that run `program(rank, simulation)`, and their clock, store and collectives."""

    def __init__(
        self, size: int, request_s: float = 20e-6, dies: tuple[int, int] | None = None, lost: range = range(0)
    ) -> None:
        """request_s: time that the store takes for a request
        dies: a rank, and the number of its call to store or collectives in which it is killed
        lost: ranks that no message of the others reaches once they have joined, nor theirs the others
        """
        self.size = size
        self.request_s = request_s
        self.dies = dies
        self.lost = lost
        self.is_cut = False
        self.now = [0.0] * size
        self.messages: Counter[str] = Counter()
        """Messages of all ranks, by phase; a request to the store is one, its answer none."""
        self.most: Counter[tuple[str, int]] = Counter()
        """Messages that a rank has sent, by phase and rank."""
        self.seconds: dict[str, float] = {}
        """Time of the slowest rank in a phase, by phase."""
        self.ended: dict[int, BaseException | None] = {}
        self.hangs: list[int] = []
        self.current = 0
        self.first_calls: list[dict[str, int]] = [{} for _ in range(size)]
        """Number of a rank's first call in each phase, by rank."""
        self._calls: Counter[int] = Counter()
        self._phase = ["start"] * size
        self._queue: list[tuple[float, int, int]] = []
        self._numbers = iter(range(1 << 60))
        self._batons = [threading.Semaphore(0) for _ in range(size)]
        self._finished = threading.Event()
        self._waiting: dict[int, tuple[tuple[int, int], set[int]]] = {}
        self._planned: dict[int, int] = {}
        self._data: dict[str, bytes] = {}
        self._store_free = 0.0
        self._group_calls: Counter[tuple[int, int]] = Counter()
        self._arrived: dict[tuple[int, int], dict[int, tuple[float, Any]]] = {}
        self._groups: Counter[int] = Counter()

    def run(self, program: Callable[[int, "Simulation"], None]) -> None:
        """Run the program on all ranks until each has ended, or none can go on (`hangs`)."""
        threads = [threading.Thread(target=self._rank, args=(rank, program), daemon=True) for rank in range(self.size)]
        for rank, thread in enumerate(threads):
            self._plan(rank, 0.0)
            thread.start()
        with self._installed():
            self._next()
            self._finished.wait()

    def _rank(self, rank: int, program: Callable[[int, "Simulation"], None]) -> None:
        self._batons[rank].acquire()
        error: BaseException | None = None
        try:
            program(rank, self)
        except BaseException as raised:
            error = raised
        self.ended[rank] = error
        self._wake_all()
        self._next()

    def _wake_all(self) -> None:
        """Wake all that wait, because the current rank has ended."""
        for rank in [*self._waiting]:
            self._plan(rank, max(self.now[rank], self.now[self.current] + ARRIVE_S))

    def _plan(self, rank: int, at: float) -> None:
        """Let `rank` go on at this time, and not when it was to go on before."""
        self._waiting.pop(rank, None)
        self._planned[rank] = next(self._numbers)
        heapq.heappush(self._queue, (at, self._planned[rank], rank))

    def _next(self) -> None:
        """Let the rank go on that is first by its clock."""
        while self._queue:
            at, number, rank = heapq.heappop(self._queue)
            if self._planned[rank] == number and rank not in self.ended:
                self.now[rank] = max(self.now[rank], at)
                self.current = rank
                self._waiting.pop(rank, None)
                self._batons[rank].release()
                return
        self.hangs = [rank for rank in range(self.size) if rank not in self.ended]
        self._finished.set()

    def _until(self, at: float, key: tuple[int, int] | None = None, missing: Collection[int] = ()) -> None:
        """Let other ranks go on until `at` or, for a collective `key`, until the `missing` ranks have sent their part,
        or a rank has ended."""
        rank = self.current
        self._plan(rank, at)
        if key is not None:
            self._waiting[rank] = key, {*missing}
        self._next()
        self._batons[rank].acquire()

    def sleep(self, seconds: float) -> None:
        """`time.sleep`."""
        self._until(self.now[self.current] + max(seconds, 1e-6))

    def monotonic(self) -> float:
        """`time.monotonic` and `time.perf_counter`."""
        return self.now[self.current]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what the current rank does inside as part of this phase."""
        rank = self.current
        outer = self._phase[rank]
        self._phase[rank] = name
        began = self.now[rank]
        yield
        self._phase[rank] = outer
        self.seconds[name] = max(self.seconds.get(name, 0.0), self.now[rank] - began)

    def cut(self) -> None:
        """The lost nodes do not reach the others from now on."""
        self.is_cut = True

    def _is_apart(self, one: int, other: int) -> bool:
        return self.is_cut and (one in self.lost) != (other in self.lost)

    def _call(self, messages: int) -> int:
        """Count a call of the current rank, which sends so many messages. Returns the rank."""
        rank = self.current
        self._calls[rank] += 1
        if self.dies == (rank, self._calls[rank]):
            raise DiedError
        phase = self._phase[rank]
        self.first_calls[rank].setdefault(phase, self._calls[rank])
        self.messages[phase] += messages
        self.most[phase, rank] += messages
        self.now[rank] += SEND_S * messages
        return rank

    def request(self, action: Callable[[], Any]) -> Any:
        """One request to the store, which answers one after the other and is on the first node."""
        rank = self._call(1)
        if self._is_apart(rank, 0):
            self._until(self.now[rank] + TIMEOUT_S)
            raise dist.DistStoreError("wait timeout")
        self._until(self.now[rank] + ARRIVE_S)
        self._store_free = max(self._store_free, self.now[rank]) + self.request_s
        answer = action()
        self._until(self._store_free + ARRIVE_S)
        return answer

    def _wait_for(self, key: tuple[int, int], others: list[int]) -> None:
        """Wait until all of these ranks have sent what belongs to the collective `key`."""
        rank = self.current
        deadline = self.now[rank] + TIMEOUT_S
        while True:
            arrived = self._arrived.setdefault(key, {})
            missing = [each for each in others if each not in arrived or self._is_apart(rank, each)]
            if not missing:
                self.now[rank] = max(self.now[rank], *(arrived[each][0] for each in others))
                return
            if any(each in self.ended for each in missing if not self._is_apart(rank, each)):
                raise CommunicationError("connection closed by peer")
            if self.now[rank] >= deadline:
                raise CommunicationError("timed out")
            self._until(deadline, key, missing)

    def _send(self, key: tuple[int, int], value: Any, at: float) -> None:
        self._arrived.setdefault(key, {})[self.current] = at, value
        for rank, (awaited, missing) in [*self._waiting.items()]:
            if awaited == key and not self._is_apart(rank, self.current):
                missing.discard(self.current)
                if not missing:
                    self._plan(rank, max(self.now[rank], at))

    def gather(self, own: Tensor, every: list[Tensor] | None = None, dst: int = 0, group: Any = None) -> None:
        """`dist.gather` to rank 0."""
        rank = self._call(0 if self.current == dst else 1)
        key = self._key(group)
        if rank != dst:
            self._send(key, own.clone(), self.now[rank] + ARRIVE_S)
            return
        others = [each for each in range(self.size) if each != dst]
        assert every is not None
        self._wait_for(key, others) if others else None
        self.now[rank] += SEND_S * len(others)  # one after the other
        every[dst].copy_(own)
        for each in others:
            every[each].copy_(self._arrived[key][each][1])

    def _broadcast(self, value: Any, group: Any, broadcasts: int = 1) -> Any:
        depth = (self.size - 1).bit_length()
        rank = self._call(broadcasts * (depth if self.current == 0 else _children(self.current, self.size)))
        key = self._key(group)
        if rank == 0:
            self._send(key, value, self.now[0] + broadcasts * depth * ARRIVE_S)
            return value
        self._wait_for(key, [0])
        return self._arrived[key][0][1]

    def broadcast(self, tensor: Tensor, src: int = 0, group: Any = None) -> None:
        """`dist.broadcast` from rank 0."""
        assert src == 0
        tensor.copy_(self._broadcast(tensor.clone(), group))

    def broadcast_object_list(self, values: list[Any], src: int = 0, group: Any = None) -> None:
        """`dist.broadcast_object_list` from rank 0: its size, then the object."""
        values[:] = self._broadcast(list(values), group, 2)

    def scatter_object_list(
        self, own: list[Any], values: list[Any] | None = None, src: int = 0, group: Any = None
    ) -> None:
        """`dist.scatter_object_list` from rank 0: the longest size, the sizes, and the objects."""
        own[0] = self._broadcast(values, group, 3)[self.current]

    def _key(self, group: Any) -> tuple[int, int]:
        number = group or 0
        self._group_calls[number, self.current] += 1
        return number, self._group_calls[number, self.current]

    def new_group(self, *_: Any, **__: Any) -> int:
        """`dist.new_group` of all ranks, in one order."""
        self._groups[self.current] += 1
        return self._groups[self.current]

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """This clock, and these functions as those of torch.distributed."""
        clock = SimpleNamespace(sleep=self.sleep, monotonic=self.monotonic, perf_counter=self.monotonic)
        own: dict[str, Any] = {
            "get_rank": lambda group=None: self.current,
            "get_world_size": lambda group=None: self.size,
            "is_initialized": lambda: True,
            "destroy_process_group": lambda group=None: None,
            "PrefixStore": PrefixedStore,
        }
        own |= {name: getattr(self, name) for name in ("gather", "broadcast", "broadcast_object_list")}
        own |= {name: getattr(self, name) for name in ("scatter_object_list", "new_group")}
        timed = (world_module, failures_module, run_lock_module, process_group_module, checkpointer_module)
        threads = SimpleNamespace(Thread=InlineThread, get_ident=lambda: 0, Event=threading.Event)
        locks = SimpleNamespace(lockf=lambda *_: None, LOCK_EX=0, LOCK_NB=0)
        with ExitStack() as stack:
            stack.enter_context(patch.multiple(dist, **own))
            for module in (*timed, watch_module, files_module):
                stack.enter_context(patch.object(module, "time", clock))
            for module in (checkpointer_module, watch_module):
                stack.enter_context(patch.object(module, "threading", threads))
            stack.enter_context(patch.object(watch_module, "_stack", lambda _thread: ("", True)))
            stack.enter_context(patch.object(watch_module, "_write_flight_record", lambda *_: None))
            stack.enter_context(patch.object(run_lock_module, "fcntl", locks))
            yield


def _children(rank: int, size: int) -> int:
    """Ranks that this one sends a broadcast on to, in a binomial tree."""
    lowest = rank & -rank
    return sum(rank + (1 << bit) < size for bit in range(lowest.bit_length() - 1))


class InlineThread:
    """A thread of the trainer: the save of a checkpoint runs at once; others are called by the program."""

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", daemon: bool = False
    ) -> None:
        self._work = (target, args) if name.startswith("checkpoint") else None

    def start(self) -> None:
        if self._work is not None:
            self._work[0](*self._work[1])

    def join(self, _timeout_s: float | None = None) -> None:
        """It has ended."""


class SimulatedStore:
    """The store of a simulation."""

    def __init__(self, simulation: Simulation, path: str = "") -> None:
        self._simulation = simulation
        self._path = path

    def _request(self, action: Callable[[dict[str, bytes]], Any]) -> Any:
        return self._simulation.request(lambda: action(self._simulation._data))

    def _key(self, key: str) -> str:
        return f"{self._path}/{key}"

    def set(self, key: str, value: str) -> None:
        self._request(lambda data: data.__setitem__(self._key(key), value.encode()))

    def get(self, key: str) -> bytes:
        return self._request(lambda data: data[self._key(key)])

    def check(self, keys: list[str]) -> bool:
        return self._request(lambda data: all(self._key(key) in data for key in keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._request(lambda data: [data[self._key(key)] for key in keys])

    def append(self, key: str, value: str) -> None:
        self._request(lambda data: data.__setitem__(self._key(key), data.get(self._key(key), b"") + value.encode()))

    def add(self, key: str, count: int) -> int:
        def add(data: dict[str, bytes]) -> int:
            total = int(data.get(self._key(key), b"0")) + count
            data[self._key(key)] = str(total).encode()
            return total

        return self._request(add)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        def swap(data: dict[str, bytes]) -> bytes:
            if data.get(self._key(key), b"").decode() == expected:
                data[self._key(key)] = desired.encode()
            return data[self._key(key)]

        return self._request(swap)

    def clone(self) -> "SimulatedStore":
        return self


class PrefixedStore(SimulatedStore):
    """`dist.PrefixStore`."""

    def __init__(self, prefix: str, underlying_store: SimulatedStore) -> None:
        super().__init__(underlying_store._simulation, f"{underlying_store._path}/{prefix}")
        self.underlying_store = underlying_store


def life(folder: Path, late_s: float = 0.0) -> Callable[[int, Simulation], None]:
    """The program of a rank, with a run folder: it joins, loads, makes steps and saves; heartbeats go on meanwhile.

    late_s: seconds by which the last rank starts later
    """

    def program(rank: int, simulation: Simulation) -> None:
        timeout = timedelta(seconds=TIMEOUT_S)
        if rank == simulation.size - 1 and late_s:
            simulation.sleep(late_s)
        with simulation.phase("join"):
            store: Any = attempt_store(SimulatedStore(simulation), rank, simulation.size, timeout)  # type: ignore[arg-type]
        failures = FailureReports(store, rank, simulation.size, timeout)
        world = World(rank, simulation.size, torch.device("cpu"), NODE, timeout, store)
        try:
            _train(world, simulation, folder)
        except Exception as error:
            with simulation.phase("failure"):
                error.add_note(failures.report(error))
            raise

    return program


def _train(world: World, simulation: Simulation, folder: Path) -> None:
    with ExitStack() as stack:
        with simulation.phase("start"):
            gather_over_ranks(world.device)
            any_rank(False)
            lock = stack.enter_context(run_folder_lock(folder, world))
            checkpointer = Checkpointer(folder / "checkpoints", Retention(2), check_lock=lock.check)
            newest_intact(folder / "checkpoints")
            tensors = {f"weight.{world.rank}": torch.full((4,), float(world.rank)), "same": torch.ones(3)}
            checkpointer.reserve(tensors)
        watch = Watch(world, folder / "stalls", lambda _text: None)
        simulation.cut()
        for step, name in ((1, "first save"), (2, "save")):
            with simulation.phase(name):
                checkpointer.save(step, tensors, {"progress": {"step": step}})
            _raise_lost(checkpointer)
            with simulation.phase("step"):
                sum_over_ranks([1.0, 2.0])
            with simulation.phase("heartbeat"):
                watch._look()
        with simulation.phase("load"):
            load_checkpoint(folder / "checkpoints" / "step_00000002", tensors, optional=["weight."])


def _raise_lost(checkpointer: Checkpointer) -> None:
    """In a run, a rank that is lost ends the next step; here the save that it is missed in."""
    if checkpointer.last_error is not None:
        sum_over_ranks([0.0])
        raise CommunicationError(checkpointer.last_error)


def measure(size: int, late_s: float = 30.0) -> list[dict[str, Any]]:
    """Messages of all ranks and of the rank after 0 that sends most, and seconds, in each phase."""
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(size)
        simulation.run(life(Path(folder) / "run", late_s))
    errors = {str(error) for error in simulation.ended.values() if error is not None}
    assert not errors, errors
    assert not simulation.hangs
    return [
        {
            "ranks": size,
            "phase": phase,
            "messages": simulation.messages[phase],
            "most_of_others": max(simulation.most[phase, rank] for rank in range(1, size)),
            "seconds": round(simulation.seconds[phase] - (late_s if phase == "join" else 0.0), 4),
        }
        for phase in ("join", "start", "first save", "save", "step", "heartbeat", "load")
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Messages of all ranks (of the busiest but rank 0), and simulated seconds."""
    sizes = sorted({row["ranks"] for row in rows})
    lines = [["phase", *(f"{size} ranks" for size in sizes)]]
    for phase in dict.fromkeys(row["phase"] for row in rows):
        found = {row["ranks"]: row for row in rows if row["phase"] == phase}
        cells = (found[size] for size in sizes)
        lines.append(
            [
                phase,
                *(f"{row['messages']:,} ({row['most_of_others']}), {row['seconds'] * 1000:.1f} ms" for row in cells),
            ]
        )
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [row for size in args.ranks for row in measure(size)]
    print(table(rows))
    if args.output is not None:
        save(args.output, {"late_s": 30.0, "send_s": SEND_S, "arrive_s": ARRIVE_S}, rows)


if __name__ == "__main__":
    main()
