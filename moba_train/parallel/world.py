"""This process among all ranks: rank, device, default process group, and small collectives on host values.

torchrun describes the world in environment variables; without them it has one rank, this process.

Each restart attempt of torchrun has its own key-value store, so that ranks do not read what dead ranks left behind.

torchrun (2.11 to 2.13) hands the same store to every attempt, and process groups read the addresses of their ranks from
it. A restarted rank that is faster than another reads the address of the other's dead predecessor and fails, in every
attempt again. TORCHELASTIC_RESTART_COUNT does not identify the attempt: it may differ between nodes.
"""

import os
import pickle
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.errors import CommunicationError, EndedElsewhereError, LaunchError, UserError, named_ranks, refuse
from moba_train.parallel.failures import FailureReports, was_waiting
from moba_train.torch_private import set_allocator_settings

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's variables, the second its older name."""


def grow_segments() -> None:
    """Let the allocator's segments grow and shrink, for the rest of the process, unless the environment sets it.

    With segments of fixed size, memory that is free in pieces is of no use to a larger tensor: near the end of a GPU's
    memory the allocator then waits for the GPU and gives all free pieces back, again and again, or the run ends with
    gigabytes free (docs/how-to/out-of-memory.md). Segments that exist stay as they are.
    """
    if not any(name in os.environ for name in _SETTINGS):
        # By a call: the environment variable comes too late in a running process. 16 layers at 128K on two H100 were
        # idle for 0.02 s of a step so, 0.15 s with one retry a step (benchmarks/LOG.md, "Long sequences").
        set_allocator_settings("expandable_segments:True")


_POLL_S = 0.05


def attempt_store(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A view of `store` whose keys belong to this restart attempt alone; called on every rank.

    Rank 0 of an attempt publishes a new random name, the attempt's. Every other rank confirms the name that it reads
    with one of its own, again when it reads another one. When all ranks have confirmed its name, rank 0 answers each
    name that it finds: a rank of an earlier attempt that has not died yet gets no answer once its successor has
    confirmed. A rank makes requests in a number that grows with the logarithm of the time for which it waits, however
    many ranks there are. Raises CommunicationError when that is longer than `timeout`; rank 0 names the missing ranks.
    Raises EndedElsewhereError when a rank has been refused (`refuse_everywhere`).
    """
    attempt = _lead(store, size, timeout) if rank == 0 else _follow(store, rank, timeout)
    return dist.PrefixStore(f"moba_train/attempt/{attempt}", store)


def _lead(store: dist.Store, size: int, timeout: timedelta) -> str:
    attempt = uuid.uuid4().hex
    store.set(_ATTEMPT, attempt)
    confirmed = [_confirmed(attempt, rank) for rank in range(1, size)]
    for _ in _until(store, timeout):
        if store.check(confirmed):
            for name in store.multi_get(confirmed):
                store.set(_go(attempt, name.decode()), "")
            return attempt
    missing = [rank for rank, key in enumerate(confirmed, 1) if not store.check([key])]
    raise CommunicationError(
        f"{named_ranks(missing)} of {size} did not start within "
        f"{timeout.total_seconds():g} s (parallel.timeout); look at their output"
    )


def _follow(store: dist.Store, rank: int, timeout: timedelta) -> str:
    name = uuid.uuid4().hex
    confirmed = ""
    for _ in _until(store, timeout):
        if store.check([_ATTEMPT]) and (attempt := store.get(_ATTEMPT).decode()) != confirmed:
            store.set(_confirmed(attempt, rank), name)
            confirmed = attempt
        if store.check([_go(confirmed, name)]):
            return confirmed
    raise CommunicationError(
        f"rank {rank}: rank 0 did not find all ranks within {timeout.total_seconds():g} s (parallel.timeout); look at "
        "its output"
    )


def _until(store: dist.Store, timeout: timedelta) -> Iterable[None]:
    """Yields until `timeout`, after pauses of a twentieth of the time that has passed: hundreds of ranks that asked
    twenty times a second for one that imports torch would keep the store busy. Raises EndedElsewhereError as soon as
    `store` says that a rank has been refused."""
    limit_s = timeout.total_seconds()
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < limit_s:
        if store.check([_REFUSED]):
            code, rank = map(int, store.get(_REFUSED).split())
            raise EndedElsewhereError(code, rank)
        yield
        time.sleep(min(max(_POLL_S, waited_s / 20), limit_s - waited_s))


def refuse_everywhere(error: UserError) -> int:
    """Tell the ranks that torchrun starts next, and those of other nodes that wait for this one, that they would fail
    as well. Returns the exit code."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    alone = size == int(os.environ.get("LOCAL_WORLD_SIZE", size)) or isinstance(error, EndedElsewhereError)
    if not alone and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's, there before its ranks
        with suppress(dist.DistError):
            rank = int(os.environ["RANK"])
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=10)))
            store.compare_set(_REFUSED, "", f"{error.exit_code} {rank}")
    return refuse(error)


_REFUSED = "moba_train/refused"

_ATTEMPT = "moba_train/attempt"


def _confirmed(attempt: str, rank: int) -> str:
    return f"moba_train/confirmed/{attempt}/{rank}"


def _go(attempt: str, name: str) -> str:
    return f"moba_train/go/{attempt}/{name}"


T = TypeVar("T")

_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""Records the last collectives of each rank; NCCL writes its own to a file when a collective times out."""


@dataclass(frozen=True)
class World:
    """This process's place among all ranks."""

    rank: int
    size: int
    device: torch.device
    ranks_per_node: int
    """Consecutive ranks run on one node."""
    timeout: timedelta
    """Limit for every collective."""
    store: dist.Store
    """Key-value store of all ranks; torchrun's outlives them."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, the one that writes logs."""
        return self.rank == 0


@contextmanager
def joined_world(timeout: timedelta = timedelta(minutes=10), stalls: Path | None = None) -> Iterator[World]:
    """Join the process group that torchrun describes, and leave it at the end.

    Collectives use gloo for CPU tensors and NCCL for CUDA tensors (created here, not inside the first step). A
    collective that takes longer than `timeout` ends the run, and an exception that leaves the context carries a note
    about ranks that ended before or do not answer. On CUDA, NCCL's watchdog ends the process or, where CUDA
    blocks the watchdog too, NCCL's monitor of it, after half of `timeout` twice. `stalls`: folder for flight records,
    /tmp by default. GPU memory grows in segments (`grow_segments`). Raises LaunchError when this node has fewer GPUs
    than ranks.
    """
    # Half of the timeout: NCCL's monitor acts after twice its heartbeat's limit when CUDA blocks the watchdog.
    nccl = _FLIGHT_RECORDER | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(1, int(timeout.total_seconds() / 2)))}
    nccl |= {"TORCH_FR_DUMP_TEMP_FILE": str(flight_records(stalls))} if stalls else {}
    with environment_defaults(nccl), _joined(timeout) as world:
        yield world


@contextmanager
def environment_defaults(values: dict[str, str]) -> Iterator[None]:
    """Sets those of these environment variables that are not set yet, and removes them at the end."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def _joined(timeout: timedelta) -> Iterator[World]:
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = _device(int(os.environ.get("LOCAL_RANK", 0)), per_node)
    store: dist.Store = dist.HashStore()
    if "RANK" in os.environ:
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        except dist.DistError as error:
            where = ", ".join(f"{name}={os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT"))
            text = f"{where}: the ranks cannot meet there ({error}); give another address or port"
            raise CommunicationError(text) from None
        store.set_timeout(timeout)
        # torchrun's store outlives its ranks (see the head of this file).
        store = attempt_store(store, rank, size, timeout)
    dist.init_process_group(
        # gloo for numbers of the host, so that reading them never waits for the GPU's queue.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=size,
        store=dist.PrefixStore("default", store),
        timeout=timeout,
        # With a device NCCL connects here; else the first collective would, in a step, when its memory may be taken.
        device_id=device if device.type == "cuda" else None,
    )
    failures = FailureReports(store, rank, size, timeout)
    try:
        yield World(rank, size, device, per_node, timeout, store)
    except Exception as error:
        if others := failures.report(error):
            error.add_note(others)
        waited = was_waiting(error)
        if waited and (code := failures.code_of_others) is not None:
            raise EndedElsewhereError(code) from error
        if isinstance(error, UserError):
            error.said_elsewhere = failures.is_said_elsewhere(error)
        if not waited:  # destroying the group would wait for ranks that do not answer
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _device(local_rank: int, local_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_size > torch.cuda.device_count():
        raise LaunchError(
            f"torchrun --nproc-per-node: {local_size} ranks given, this node has {torch.cuda.device_count()} GPUs; "
            "give at most one rank per GPU"
        )
    torch.cuda.set_device(local_rank)
    grow_segments()
    return torch.device("cuda", local_rank)


def flight_records(folder: Path) -> Path:
    """Path prefix of the flight records in `folder`, which the rank follows; `torchfrtrace` expects this name."""
    return folder / "nccl_trace_rank_"


def broadcast(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Returns rank 0's `value`, which must be picklable, on every rank. `group`: of all ranks."""
    values = [value]
    dist.broadcast_object_list(values, group=group)
    return values[0]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the `value`, which is pickled, of every rank, in rank order, on rank 0, and an empty list on the others.
    `group`: of all ranks, like the default one.

    A rank other than 0 sends two messages. torch's functions for objects first send all sizes around a ring of the
    ranks, which took 269 ms for 64 ranks, a gather and a broadcast 14 ms (benchmarks/measured/durability.md).
    """
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [*map(int, _gather_tensors(torch.tensor(own.numel()), group))]
    longest = torch.tensor(max(sizes, default=0))
    dist.broadcast(longest, 0, group)
    padded = torch.cat([own, own.new_zeros(int(longest) - own.numel())])
    received = zip(_gather_tensors(padded, group), sizes, strict=True)
    return [pickle.loads(bytes(content[:size].numpy())) for content, size in received]


def _gather_tensors(own: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The tensors of all ranks, of one shape, on rank 0; an empty list on the others."""
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))] if dist.get_rank(group) == 0 else []
    dist.gather(own, every or None, group=group)
    return every


def sum_over_ranks(values: list[float]) -> list[float]:
    """Returns the element-wise sum of `values` over all ranks. On the host: never touches the GPU."""
    own = torch.tensor(values, dtype=torch.float64)
    # By way of rank 0: gloo's all_reduce goes around a ring of all ranks twice.
    total = torch.stack(_gather_tensors(own) or [own]).sum(0)
    dist.broadcast(total, 0)
    return total.tolist()


def gather_over_ranks(value: T) -> list[T]:
    """Returns `value`, which is pickled, of every rank, in rank order. Called on all ranks together."""
    return broadcast(gather(value))


def any_rank(value: bool) -> bool:
    """True if `value` is true on any rank. Called on all ranks together, and never touches the GPU."""
    return sum_over_ranks([float(value)])[0] > 0
