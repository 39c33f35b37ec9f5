"""What the ranks of a save do together: an error on one of them is an error on all, and none is left waiting."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class SaveFailedError(Exception):
    """A step of a save failed on at least one rank; the text says on which and why."""


class Together:
    """The ranks of one process group. Every method is called on all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)

    def on_every_rank(self, action: Callable[[], T]) -> list[T]:
        """Runs `action` and returns every rank's result, small ones. Raises SaveFailedError if any raised."""
        outcome: tuple[T | None, str | None]
        try:
            outcome = action(), None
        except Exception as error:
            outcome = None, f"rank {self.rank}: {error!r}"
        outcomes: list[Any] = [None] * self._size
        dist.all_gather_object(outcomes, outcome, group=self._group)
        if errors := [error for _, error in outcomes if error is not None]:
            raise SaveFailedError("; ".join(errors))
        return [result for result, _ in outcomes]

    def each(self, action: Callable[[], T]) -> T:
        """Runs `action` and returns this rank's result, of any size. Raises SaveFailedError if any rank's raised."""
        own: list[T] = []
        self.on_every_rank(lambda: own.append(action()))
        return own[0]

    def from_rank_0(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 and returns its result on every rank."""
        results: list[Any] = self.on_every_rank(lambda: action() if self.rank == 0 else None)
        return results[0]

    def to_rank_0(self, value: T) -> list[T]:
        """Every rank's value, on rank 0; nothing on the others."""
        values: list[Any] = [None] * self._size if self.rank == 0 else []
        dist.gather_object(value, values or None, dst=dist.get_global_rank(self._group, 0), group=self._group)
        return values

    def of_rank_0(self, values: list[T]) -> T:
        """This rank's of the values that rank 0 has for all; what others give is left aside."""
        own: list[Any] = [None]
        sender = dist.get_global_rank(self._group, 0)
        dist.scatter_object_list(own, values if self.rank == 0 else None, src=sender, group=self._group)
        return own[0]
