"""What the ranks of context parallelism say to each other: the only file here that calls torch.distributed.

On CUDA, everything runs beside the computation, in the order it was asked for: collectives on one stream of high
priority, messages on NCCL's own, each of which waits for the other. A call waits for what the current stream was given
before it, and for nothing given later; `Arrival.wait` makes the current stream wait for it.
Every tensor of a call stays alive until then, so no memory is reused too early, and none needs `record_stream`, which
would hold it back until the host looks again. On the CPU every call is finished when it returns.

All ranks of a group make the same calls in the same order. A call that fails, on a CPU also one that waits longer than
the group's timeout, raises CommunicationError with its name, the ranks and the time. On CUDA a call that waits too long
ends the process: NCCL's watchdog says in which collective, and writes its flight record (parallel/world.py).

Shape suffixes: L rows of a shard, R ranks.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.errors import CommunicationError

# Renamed in torch 2.13, which warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Arrival:
    """Tensors that are on their way."""

    def __init__(
        self, tensors: tuple[Tensor, ...], event: torch.cuda.Event | None = None, kept: tuple[Tensor, ...] = ()
    ) -> None:
        self._tensors, self._event, self._kept = tensors, event, kept

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, for use on the current stream from now on. To be called once: nothing keeps them here."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        tensors, self._event, self._kept, self._tensors = self._tensors, None, (), ()
        return tensors


class Peers:
    """The ranks of one process group, this one included.

    Creating it is collective: it sets up all connections, so that no step has to (they take seconds, and memory that
    the first step may no longer find).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Of high priority: the few thread blocks of a transfer would otherwise queue behind those of the attention, as
        # those of messages may, which NCCL has a stream of its own for.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._connect()

    def _connect(self) -> None:
        token = torch.zeros(self.size, device=self.device)
        self.sum(token)
        self.all_gather(token).wait()
        self.all_to_all(token).wait()
        for distance in range(1, self.size):
            self.shift(token, torch.empty_like(token), distance).wait()

    def all_gather(self, *shards_L: Tensor) -> Arrival:
        """Each tensor [L, ...] of every rank, laid end to end: [R * L, ...]."""
        if self.size == 1:
            return Arrival(shards_L)
        gathered = tuple(x.new_empty(self.size * x.shape[0], *x.shape[1:]) for x in shards_L)

        def call() -> None:
            for whole, shard in zip(gathered, shards_L, strict=True):
                _all_gather(whole, shard, group=self.group)

        return self._start("all_gather", call, shards_L, gathered)

    def all_to_all(self, *parts_RL: Tensor) -> Arrival:
        """Of each tensor [R * L, ...], the r-th L rows go to rank r; those received lie in rank order."""
        if self.size == 1:
            return Arrival(parts_RL)
        received = tuple(torch.empty_like(x) for x in parts_RL)

        def call() -> None:
            messages = []  # one launch for all tensors, and faster than NCCL's all-to-all for each
            for whole, given in zip(received, parts_RL, strict=True):
                from_ranks, to_ranks = whole.chunk(self.size), given.chunk(self.size)
                from_ranks[self.rank].copy_(to_ranks[self.rank])
                for distance in range(1, self.size):
                    ahead, behind = self._neighbours(distance)
                    messages += self._pair(to_ranks[ahead], ahead, from_ranks[behind], behind)
            self._exchange(messages)

        return self._start("all_to_all", call, parts_RL, received)

    def all_to_all_uneven(self, x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Tensor:
        """The first `sent_rows[0]` rows go to rank 0, the next `sent_rows[1]` to rank 1, and so on."""
        received = x.new_empty(sum(received_rows), *x.shape[1:])

        def call() -> None:
            dist.all_to_all_single(received, x, list(received_rows), list(sent_rows), group=self.group)

        (received,) = self._start("all_to_all_uneven", call, (x,), (received,)).wait()
        return received

    def sum(self, x: Tensor) -> None:
        """Element-wise sum over the ranks, in place."""
        if self.size > 1:
            self._start("sum", lambda: dist.all_reduce(x, group=self.group), (), (x,)).wait()

    def shift(self, sent: Tensor, received: Tensor, distance: int, then: Callable[[], object] | None = None) -> Arrival:
        """Send to the rank `distance` ahead, and receive from the one as far behind, around the ring.

        `then` follows on the stream of the communication, which the computation need not wait for.
        """

        def call() -> None:
            ahead, behind = self._neighbours(distance)
            self._exchange(self._pair(sent, ahead, received, behind))
            if then is not None:
                then()

        return self._start(f"shift by {distance}", call, (sent,), (received,))

    def _neighbours(self, distance: int) -> tuple[int, int]:
        """The rank so far ahead around the ring, and the one so far behind."""
        return (self.rank + distance) % self.size, (self.rank - distance) % self.size

    def _pair(self, sent: Tensor, ahead: int, received: Tensor, behind: int) -> list[dist.P2POp]:
        return [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=ahead),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=behind),
        ]

    @staticmethod
    def _exchange(messages: list[dist.P2POp]) -> None:
        """All at once: one launch over NCCL."""
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def _start(
        self, name: str, call: Callable[[], None], given: tuple[Tensor, ...], received: tuple[Tensor, ...]
    ) -> Arrival:
        assert all(x.is_contiguous() for x in (*given, *received)), "messages must be contiguous"
        began = time.monotonic()
        try:
            if self._stream is None:
                call()
                return Arrival(received)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                call()
                return Arrival(received, self._stream.record_event(), given)
        except RuntimeError as error:
            members = dist.get_process_group_ranks(self.group)
            raise CommunicationError(
                f"context parallelism: rank {members[self.rank]} gave up after {time.monotonic() - began:.1f} s in "
                f"{name} with ranks {members}, tensors {[tuple(x.shape) for x in received]}: {error}"
            ) from error


def nested_groups(
    group: dist.ProcessGroup, inner: int, timeout: timedelta | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of a context group's ranks in its node and of its ranks at the same place in every node.

    `inner`: consecutive ranks of `group` in one node. Every rank of the world must call this, also where several
    context groups stand side by side.
    """
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, dist.get_process_group_ranks(group))
    found: dict[str, dist.ProcessGroup] = {}
    for ranks in sorted(set(map(tuple, everyone))):
        nodes = [ranks[first : first + inner] for first in range(0, len(ranks), inner)]
        places = [ranks[place::inner] for place in range(inner)]
        for kind, members in (*(("node", node) for node in nodes), *(("place", place) for place in places)):
            made = dist.new_group(list(members), timeout=timeout)
            if dist.get_rank() in members:
                found[kind] = made
    return found["node"], found["place"]
