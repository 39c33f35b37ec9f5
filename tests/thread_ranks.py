"""Ranks of context parallelism that are threads of this process: their communicator and their transports."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moba_train.parallel.context.comm import Communicator, Ranks, Work
from moba_train.parallel.context.policy import transport_spec
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.base import Transport
from moba_train.parallel.context.transport.ulysses import Ulysses


class ThreadCommunicator(Communicator):
    """The communicator of ranks that are threads of this process."""

    def __init__(self, rank: int, board: "Board") -> None:
        self.rank = rank
        self.size = board.size
        self.board = board

    def _swap(self, call: str, value: object) -> list[Any]:
        return self.board.swap(self.rank, call, value)

    def all_gather(self, *shards_L: Tensor) -> Work:
        from_all = self._swap("all_gather", [x.clone() for x in shards_L])
        return Work(tuple(torch.cat([theirs[i] for theirs in from_all]) for i in range(len(shards_L))))

    all_gather_by_ring = all_gather

    def all_to_all(self, *parts_RL: Tensor) -> Work:
        from_all = self._swap("all_to_all", [x.clone().chunk(self.size) for x in parts_RL])
        return Work(tuple(torch.cat([theirs[i][self.rank] for theirs in from_all]) for i in range(len(parts_RL))))

    def all_to_all_uneven(self, x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Tensor:
        from_all = self._swap("all_to_all_uneven", x.clone().split(list(sent_rows)))
        mine = [theirs[self.rank] for theirs in from_all]
        assert [part.shape[0] for part in mine] == list(received_rows)
        return torch.cat(mine)

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._swap("all_reduce", x.clone())).sum(0))

    def send_recv(
        self, sent: Tensor, received: Tensor, distance: int, then: Callable[[], object] | None = None
    ) -> Work:
        from_all = self._swap(f"send_recv {distance}", sent.clone())
        received.copy_(from_all[(self.rank - distance) % self.size])
        if then is not None:
            then()
        return Work((received,))


class Board:
    """Exchanges messages between the threads of one group; all threads must make the same calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[tuple[str, Any]] = [("", None)] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def swap(self, rank: int, call: str, value: object) -> list[Any]:
        self.slots[rank] = (call, value)
        self.barrier.wait()
        from_all = list(self.slots)
        self.barrier.wait()
        assert {name for name, _ in from_all} == {call}, f"rank {rank} is at {call}, all: {[n for n, _ in from_all]}"
        return [message for _, message in from_all]


class ThreadRanks(NamedTuple):
    """`Ranks` of a transport that has one group, as one of these threads sees them."""

    communicator: ThreadCommunicator


def thread_transports(strategy: CPStrategy) -> tuple[list[Transport], list[Board]]:
    """The transports of all ranks, and the boards that they use."""
    if strategy.transport == "hierarchical":
        nodes, places = strategy.ranks // strategy.node_size, strategy.node_size
        inner, outer = [Board(places) for _ in range(nodes)], [Board(nodes) for _ in range(places)]
        made: list[Transport] = [
            Ulysses(ThreadCommunicator(rank % places, inner[rank // places]), AllGather(outside, strategy.slices))
            for rank in range(strategy.ranks)
            for outside in [ThreadCommunicator(rank // places, outer[rank % places])]
        ]
        return made, inner + outer
    board = Board(strategy.ranks)
    spec = transport_spec(strategy.transport)
    ranks = [ThreadRanks(ThreadCommunicator(rank, board)) for rank in range(strategy.ranks)]
    return [spec.make(strategy, cast(Ranks, each)) for each in ranks], [board]
