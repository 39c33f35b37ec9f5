"""Bad GPUs and full disks, which are named before the run starts and while it runs.

Before the run each rank reads the state of its GPU, and a GPU that is known to be broken ends the run there. While the
run goes on, a thread of each rank checks again once a minute. A problem is reported when it appears and whenever it has
become twice as bad, not at every check. Reports of all ranks reach rank 0, which writes the logs, through the store.
"""

import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moba_train.config.health import NodeConfig
from moba_train.errors import BrokenNodeError
from moba_train.health.gpu import Gpu, GpuState, find_gpu
from moba_train.parallel.world import World, gather_over_ranks

EVERY_S = 60.0
"""Seconds between looks at GPUs and disks."""
FIRST_ANSWER_S = 60.0
"""Seconds that the start of a run waits for the state of a GPU: nvidia-smi may have to load the driver first."""

TEMPORARY_BYTES = 2**28
"""Free space that the folder for temporary files should have: torch and Triton compile there."""

CRC_ERRORS = 100
"""CRC errors of NVLinks that are no problem: a few are normal, and repeated transfers correct them."""

FORGOTTEN_S = 3600.0
"""Seconds after which a problem that has gone counts as a new one when it comes back."""

_REPORTS = "moba_train/node/reports"
"""Key of the texts of all other ranks for rank 0."""

logger = logging.getLogger(__name__)


class Problem(NamedTuple):
    """Something wrong with a node."""

    name: str
    """Equal for two reports of the same problem."""
    size: float
    """Severity, relative to other reports of the same problem."""
    text: str
    is_fault: bool = False
    """True if no run should start with it."""


class Disk(NamedTuple):
    """A folder that needs free space."""

    folder: Path
    needed: int
    """Bytes."""
    what: str = "one checkpoint"
    """User of the space, for messages."""


def disk_problem(disk: Disk) -> Problem | None:
    """Problem of the disk of a folder, which need not exist yet: too full, or not readable. None without one."""
    folder = disk.folder.absolute()
    try:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    except OSError as error:
        return Problem(f"no disk at {disk.folder}", 1, str(error))
    if free >= disk.needed:
        return None
    text = f"{_size(free)} free, {disk.what} needs {_size(disk.needed)}"
    return Problem(f"disk of {disk.folder}", disk.needed / max(1, free), text)


def _size(count: int) -> str:
    """Bytes in GiB, or in MiB if they are less than one GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def gpu_problems(now: GpuState, before: GpuState) -> list[Problem]:
    """Problems of a GPU in the state `now`. Errors of NVLinks, which count from the last reset, are problems only if
    they are more than `before`."""
    if now.lost:
        return [Problem("lost", 1, f"the driver cannot reach it: {now.lost}", is_fault=True)]
    found = []
    if now.uncorrected_ecc:
        text = f"{now.uncorrected_ecc} uncorrected ECC errors since it was last reset"
        found.append(Problem("ecc", now.uncorrected_ecc, text, is_fault=True))
    if now.remap_failed:
        text = "a broken memory row could not be remapped: the GPU must be replaced"
        found.append(Problem("remap_failed", 1, text, is_fault=True))
    if now.remap_pending:
        text = "broken memory rows wait for a reset of the GPU to be remapped"
        found.append(Problem("remap_pending", 1, text))
    if now.slowdowns:
        text = f"the hardware has lowered its clocks: {', '.join(now.slowdowns)}"
        found.append(Problem("slowdown", 1, text))
    if now.links < before.links:
        text = f"{now.links} NVLinks are active, {before.links} were when the run started"
        found.append(Problem("links", before.links - now.links, text))
    earlier = dict(before.link_errors)
    for kind, count in now.link_errors:
        new = count - earlier.get(kind, 0)
        if new > (CRC_ERRORS if kind == "CRC" else 0):
            text = f"{new} NVLink {kind} errors since the run started"
            found.append(Problem(f"link_{kind}", new, text))
    return found


def refuse_broken_gpus(config: NodeConfig, world: World) -> None:
    """Raise BrokenNodeError, on all ranks, when any rank's GPU is known to be broken. Called on all ranks together.

    A driver that does not answer in time is only a warning, because it may be slow rather than broken.
    """
    if config.on_fault == "warn":
        return
    limit_s = min(FIRST_ANSWER_S, world.timeout.total_seconds() / 2)  # the other ranks wait for this one's answer
    own = _within(limit_s, _own_faults, _uuid(world.device), _place(world))
    if faults := [fault for faults in gather_over_ranks(own) for fault in faults]:
        raise BrokenNodeError(
            "\n".join([*faults, "go on without this GPU, or set health.node.on_fault to warn to train on it as it is"])
        )


class NodeWatch:
    """Checks this rank's GPU and, on the first rank of a node, its folder for temporary files. Rank 0 also checks
    `disks`, which all nodes share. `report` gets the text about a problem of any rank, on rank 0, in the watching
    thread. Nothing waits for that thread.
    """

    def __init__(self, world: World, disks: Sequence[Disk], report: Callable[[str], None]) -> None:
        self._is_main = world.is_main
        self._place = _place(world)
        self._uuid = _uuid(world.device)
        self._disks = [*disks] if world.is_main else []
        if world.rank % world.ranks_per_node == 0:
            self._disks.append(Disk(Path(tempfile.gettempdir()), TEMPORARY_BYTES, "the compiler"))
        # A connection of its own: the training thread may be waiting for an answer on the world's.
        self._store: Any = world.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._received = 0
        self._report = report
        self._gpu: Gpu | None = None
        self._first: GpuState | None = None
        self._known = KnownProblems()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless a driver or a disk holds it."""
        self._closed.set()
        self._thread.join(1.0)

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except Exception as error:  # the store is gone: the run ends
                logger.info("%s: a check of the node failed: %r", self._place, error)
            self._closed.wait(EVERY_S)

    def _look(self) -> None:
        for problem in self._known.news([*self._disk_problems(), *self._gpu_problems()], time.monotonic()):
            text = f"{self._place}, {problem.text}"
            logger.warning("%s", text)
            if self._is_main:
                self._report(text)
            else:
                self._store.append(_REPORTS, f"{text}\0")
        if self._is_main and self._store.check([_REPORTS]):
            texts = self._store.get(_REPORTS).decode().split("\0")[:-1]
            for text in texts[self._received :]:
                self._report(text)
            self._received = len(texts)

    def _disk_problems(self) -> Iterator[Problem]:
        for disk in self._disks:
            if problem := disk_problem(disk):
                yield problem._replace(text=f"disk of {disk.folder}: {problem.text}")

    def _gpu_problems(self) -> Iterator[Problem]:
        if self._uuid is None:
            return
        try:
            self._gpu = self._gpu or find_gpu(self._uuid)
            if self._gpu is None:
                return
            state = self._gpu.read()
        except Exception as error:  # drivers raise anything
            yield Problem("unread", 1, f"GPU {self._uuid}: its state cannot be read: {error!r}")
            return
        self._first = self._first or state
        for problem in gpu_problems(state, self._first):
            yield problem._replace(text=f"{self._gpu.name}: {problem.text}")


class KnownProblems:
    """Problems that have been reported, which separate news from repetitions."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}

    def news(self, problems: Iterable[Problem], now: float) -> list[Problem]:
        """The present `problems` that are new or at least twice as bad as when they were last reported. `now`: seconds
        on any clock."""
        self._known = {name: known for name, known in self._known.items() if now - known[1] < FORGOTTEN_S}
        news = []
        for problem in problems:
            reported = self._known.get(problem.name, (0.0, now))[0]
            is_news = problem.size >= 2 * reported
            if is_news:
                news.append(problem)
            self._known[problem.name] = (problem.size if is_news else reported, now)
        return news


def _place(world: World) -> str:
    return f"host {socket.gethostname()}, rank {world.rank}"


def _uuid(device: torch.device) -> str | None:
    """UUID of a CUDA device as the driver writes it, for any CUDA_VISIBLE_DEVICES; None on a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def _own_faults(uuid: str | None, place: str) -> list[str]:
    gpu = find_gpu(uuid) if uuid else None
    if gpu is None:
        return []
    state = gpu.read()
    return [f"{place}, {gpu.name}: {problem.text}" for problem in gpu_problems(state, state) if problem.is_fault]


def _within(seconds: float, ask: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """Answer of `ask`, which runs in a thread; empty, with a warning, after an error or `seconds` without an answer."""
    answers: list[list[str]] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask(*arguments))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="node", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        why = repr(errors[0]) if errors else f"no answer in {seconds:g} s"
        logger.warning("the state of the GPU is not known, and the run starts without it: %s", why)
    return answers[0] if answers else []
