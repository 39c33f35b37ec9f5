"""Communication between the ranks of context parallelism: the only file here that calls torch.distributed for it.

On CUDA all communication runs on streams of its own, concurrently with computation: collectives on one high-priority
stream, point-to-point messages on NCCL's stream, each ordered after the other as issued. A call waits for the work that
the current stream was given before it, not for later work; `Work.wait` makes the current stream wait for the call.
`Work` keeps every tensor of the call alive until then, so no memory is reused too early. Collectives need no
`record_stream`, which holds memory back until the host checks the stream again; for point-to-point messages torch calls
it all the same. On the CPU every call is finished when it returns.

All ranks of a group make the same calls in the same order. A call that fails raises CommunicationError with its name,
the ranks and the time; on a CPU, so does a call that waits longer than the group's timeout. On CUDA a call that waits
too long ends the process: NCCL's watchdog names the collective and writes its flight record (parallel/world.py).

Shape suffixes: L rows of a shard, R ranks.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moba_train.errors import CommunicationError

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13, which warns about the old name."""


class Work:
    """Handle of an asynchronous call, as in torch.distributed; it holds the tensors that the call receives."""

    def __init__(
        self, received: tuple[Tensor, ...], event: torch.cuda.Event | None = None, sent: tuple[Tensor, ...] = ()
    ) -> None:
        """`event`: recorded after the call on its stream; None: the call is finished. `sent`: only kept alive."""
        self._received = received
        self._event = event
        self._sent = sent

    def wait(self) -> tuple[Tensor, ...]:
        """The received tensors, ready for use on the current stream.

        To be called once: afterwards the handle no longer keeps any tensor alive.
        """
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        received = self._received
        self._event = None
        self._sent = ()
        self._received = ()
        return received


class Communicator:
    """Collectives and messages among the ranks of one process group.

    Creating it is collective: it sets up all connections, so that no training step has to. Each takes seconds, and
    memory that may no longer be free in the first step.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # High priority: the few thread blocks of a transfer would otherwise queue behind those of attention. NCCL has a
        # stream of its own for point-to-point messages.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._connect()

    def _connect(self) -> None:
        """Make every kind of call once: NCCL connects two ranks at their first message."""
        token = torch.zeros(self.size, device=self.device)
        self.all_reduce(token)
        self.all_gather(token).wait()
        self.all_to_all(token).wait()
        for distance in range(1, self.size):
            self.send_recv(token, torch.empty_like(token), distance).wait()

    def all_gather(self, *shards_L: Tensor) -> Work:
        """Gather each tensor [L, ...] of all ranks into one [R * L, ...], in rank order."""
        if self.size == 1:
            return Work(shards_L)
        gathered = tuple(x.new_empty(self.size * x.shape[0], *x.shape[1:]) for x in shards_L)

        def call() -> None:
            for gathered_RL, shard_L in zip(gathered, shards_L, strict=True):
                all_gather(gathered_RL, shard_L, group=self.group)

        return self._start("all_gather", call, shards_L, gathered)

    def all_gather_by_ring(self, *shards_L: Tensor) -> Work:
        """`all_gather` by messages between neighbours: every shard travels around the ring of ranks."""
        if self.size == 1:
            return Work(shards_L)
        gathered = tuple(x.new_empty(self.size * x.shape[0], *x.shape[1:]) for x in shards_L)
        by_rank = [gathered_RL.chunk(self.size) for gathered_RL in gathered]
        ahead, behind = self._neighbours(1)

        def call() -> None:
            for from_ranks, shard_L in zip(by_rank, shards_L, strict=True):
                from_ranks[self.rank].copy_(shard_L)
            for step in range(1, self.size):
                sent = (self.rank - step + 1) % self.size
                received = (self.rank - step) % self.size
                messages = []  # one launch for all tensors
                for from_ranks in by_rank:
                    messages += self._pair(from_ranks[sent], ahead, from_ranks[received], behind)
                self._exchange(messages)

        return self._start("all_gather_by_ring", call, shards_L, gathered)

    def all_to_all(self, *parts_RL: Tensor) -> Work:
        """Send the r-th L rows of each tensor [R * L, ...] to rank r; the received rows are in rank order."""
        if self.size == 1:
            return Work(parts_RL)
        received = tuple(torch.empty_like(x) for x in parts_RL)

        def call() -> None:
            # Not messages, though one launch for all would be faster: torch keeps the memory of a message back until
            # the host sees that it has arrived. At 128K with 512/8 that was 38 GiB (benchmarks/LOG.md, "Transfers").
            for received_RL, sent_RL in zip(received, parts_RL, strict=True):
                dist.all_to_all_single(received_RL, sent_RL, group=self.group)

        return self._start("all_to_all", call, parts_RL, received)

    def all_to_all_uneven(self, x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Tensor:
        """Send the first `sent_rows[0]` rows to rank 0, the next `sent_rows[1]` to rank 1, and so on.

        `received_rows`: rows that each rank sends to this one. The received rows are in rank order.
        """
        received = x.new_empty(sum(received_rows), *x.shape[1:])

        def call() -> None:
            dist.all_to_all_single(received, x, list(received_rows), list(sent_rows), group=self.group)

        (received,) = self._start("all_to_all_uneven", call, (x,), (received,)).wait()
        return received

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` over the ranks, element by element and in place."""
        if self.size > 1:
            self._start("all_reduce", lambda: dist.all_reduce(x, group=self.group), (), (x,)).wait()

    def send_recv(
        self, sent: Tensor, received: Tensor, distance: int, then: Callable[[], object] | None = None
    ) -> Work:
        """Send to the rank `distance` places ahead in the ring and receive from the one `distance` places behind.

        `then` runs after the transfer on the communication stream; computation does not wait for it.
        """

        def call() -> None:
            ahead, behind = self._neighbours(distance)
            self._exchange(self._pair(sent, ahead, received, behind))
            if then is not None:
                then()

        return self._start(f"send_recv at distance {distance}", call, (sent,), (received,))

    def _neighbours(self, distance: int) -> tuple[int, int]:
        """The ranks `distance` places ahead and behind in the ring."""
        return (self.rank + distance) % self.size, (self.rank - distance) % self.size

    def _pair(self, sent: Tensor, ahead: int, received: Tensor, behind: int) -> list[dist.P2POp]:
        """A message to the rank `ahead` and one from the rank `behind`."""
        return [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=ahead),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=behind),
        ]

    @staticmethod
    def _exchange(messages: list[dist.P2POp]) -> None:
        """Send and receive all messages at once: one launch over NCCL."""
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def _start(
        self, name: str, call: Callable[[], None], sent: tuple[Tensor, ...], received: tuple[Tensor, ...]
    ) -> Work:
        """Run `call` on the communication stream. Raises CommunicationError when it fails."""
        assert all(x.is_contiguous() for x in (*sent, *received)), "messages must be contiguous"
        began = time.monotonic()
        try:
            if self._stream is None:
                call()
                return Work(received)
            # Work given to the current stream later does not hold the transfer up: an event of this moment is waited
            # for.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                call()
                return Work(received, self._stream.record_event(), sent)
        except RuntimeError as error:
            members = dist.get_process_group_ranks(self.group)
            raise CommunicationError(
                f"context parallelism: rank {members[self.rank]} gave up after {time.monotonic() - began:.1f} s in "
                f"{name} with ranks {members}, tensors {[tuple(x.shape) for x in received]}: {error}"
            ) from error


class Ranks(NamedTuple):
    """The ranks that a transport is made for."""

    group: ProcessGroup
    device: torch.device
    timeout: timedelta | None
    """Timeout of the groups that the transport creates; None: torch's default."""

    @property
    def communicator(self) -> Communicator:
        """Communication among all of them."""
        return Communicator(self.group, self.device)
