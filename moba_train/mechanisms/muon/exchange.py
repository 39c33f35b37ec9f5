"""Whole matrices from their shards, and back: each matrix is gathered on one rank, and its result scattered from there.

A round takes one matrix for each rank of the group, so that all ranks work and all links carry the same. All gathers of
a round are one all-to-all, and so are its scatters: in total each number of a matrix travels once to its owner and once
back. Replicas (`parallel.dp_replicate`) share the work like any other ranks; a shard that several ranks hold is sent by
one of them, in the owner's replica, and the result goes to all, so that replicas cannot drift apart.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moba_train.optim.gradients import local_part


class _Region(NamedTuple):
    """The rows [top, top + rows) and columns [left, left + columns) of a matrix."""

    top: int
    left: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def part_of(self, matrix: Tensor) -> Tensor:
        """A view of the region."""
        return matrix[self.top : self.top + self.rows, self.left : self.left + self.columns]


class MatrixExchange:
    """Gathers matrices [rows, columns] from the shards of all ranks of `group` and scatters results of that shape.

    matrices: parameters, the same on all ranks; under FSDP2 and tensor parallelism DTensors. group: all ranks that hold
    a shard of them; None: this process holds them whole. Made, and used, on all ranks of the group together.
    """

    def __init__(self, matrices: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.ranks = 1 if group is None else group.size()
        self._rank = 0 if group is None else group.rank()
        self._shapes = [matrix.shape for matrix in matrices]
        own = [_own_region(matrix) for matrix in matrices]
        regions = [own] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(regions, own, group=group)
        self._regions = [[_Region(*of_rank[index]) for of_rank in regions] for index in range(len(matrices))]
        self._holders = [_holders(of_ranks) for of_ranks in self._regions]
        """Ranks that hold each region of each matrix, in their order."""

    def gather(self, round_: Sequence[int], shards: Sequence[Tensor]) -> Callable[[], Tensor | None]:
        """Begin to gather the matrices with the indices `round_`, the i-th on rank i of the group; `shards` are this
        rank's, of one dtype. The returned function waits and gives this rank's matrix, if it has one."""
        sends = [
            shard if self._sends(index, owner) else shard[:0]
            for owner, (index, shard) in enumerate(zip(round_, shards, strict=True))
        ]
        here = self._rank < len(round_)
        own = round_[self._rank] if here else -1
        senders = (
            {region: self._sender(ranks, self._rank) for region, ranks in self._holders[own].items()} if here else {}
        )
        sizes = [0] * self.ranks
        for region, sender in senders.items():
            sizes[sender] = region.numel
        receive = self._exchange(sends, sizes, shards[0])

        def whole() -> Tensor | None:
            parts = receive()
            if not here:
                return None
            matrix = shards[0].new_empty(self._shapes[own])
            for region, sender in senders.items():
                region.part_of(matrix).copy_(parts[sender].view(region.rows, region.columns))
            return matrix

        return whole

    def scatter(self, round_: Sequence[int], whole: Tensor | None, like: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to scatter the results of a round, of which this rank has `whole`, if one; `like` has their dtype and
        device. The returned function waits and gives this rank's shard of each matrix of the round."""
        sends = [like.new_empty(0)] * self.ranks
        if whole is not None:
            sends = [region.part_of(whole) for region in self._regions[round_[self._rank]]]
        own = [self._regions[index][self._rank] for index in round_]
        sizes = [region.numel for region in own] + [0] * (self.ranks - len(own))
        receive = self._exchange(sends, sizes, like)

        def shards() -> list[Tensor]:
            parts = receive()
            return [part.view(region.rows, region.columns) for part, region in zip(parts, own, strict=False)]

        return shards

    def _sends(self, index: int, owner: int) -> bool:
        """True if this rank sends its region of a matrix to its owner."""
        ranks = self._holders[index].get(self._regions[index][self._rank])
        return ranks is not None and self._sender(ranks, owner) == self._rank

    def _sender(self, ranks: Sequence[int], owner: int) -> int:
        """The one of the `ranks` that hold a region that sends it to the owner."""
        # Replicas are the outermost dimension of the mesh: the owner's is at the same place in the list of holders.
        return ranks[owner * len(ranks) // self.ranks]

    def _exchange(self, sends: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> Callable[[], list[Tensor]]:
        """Begin an all-to-all of one tensor for each rank (none for those beyond `sends`); `sizes`: elements from each
        rank. The returned function waits and gives what each rank has sent, flat."""
        sent_sizes = [send.numel() for send in sends] + [0] * (self.ranks - len(sends))
        sent = torch.cat([send.flatten() for send in sends])
        if self.ranks == 1:
            return lambda: list(sent.split(sizes))
        received = like.new_empty(sum(sizes))
        work = dist.all_to_all_single(received, sent, list(sizes), sent_sizes, group=self._group, async_op=True)

        def wait() -> list[Tensor]:
            work.wait()
            return list(received.split(list(sizes)))

        return wait


def _holders(regions: Sequence[_Region]) -> dict[_Region, list[int]]:
    """The ranks that hold each region, given that of each rank."""
    holders: dict[_Region, list[int]] = {}
    for rank, region in enumerate(regions):
        if region.numel:
            holders.setdefault(region, []).append(rank)
    return holders


def _own_region(matrix: Tensor) -> tuple[int, int, int, int]:
    """The place of this rank's shard, as checkpoints know it."""
    if not isinstance(matrix, DTensor):
        return (0, 0, *matrix.shape)
    (chunk,) = matrix.__create_chunk_list__()
    assert chunk.sizes == local_part(matrix).shape, "a shard is one rectangle"
    return (*chunk.offsets, *chunk.sizes)
