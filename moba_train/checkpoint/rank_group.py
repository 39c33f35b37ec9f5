"""The collectives of a save, in which an error on one rank is an error on all, so that no rank is left waiting."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from moba_train.errors import LaunchError

T = TypeVar("T")


class SaveFailedError(Exception):
    """A step of a save failed on at least one rank; the text names the rank and the error."""


class RankGroup:
    """The ranks of one process group. Every method is called on all of them, and results must be picklable.

    A method that runs an `action` raises SaveFailedError on all ranks if the action raised on any. A LaunchError, which
    says that the run must not go on, is raised as it is on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self._group = group
        self._size = dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)

    def on_every_rank(self, action: Callable[[], T]) -> T:
        """Runs `action` and returns this rank's result, which is not sent and so may be large."""
        own: list[T] = []
        self.gather_from_every_rank(lambda: own.append(action()))
        return own[0]

    def gather_from_every_rank(self, action: Callable[[], T]) -> list[T]:
        """Runs `action` and returns the results of all ranks, by rank."""
        outcome: tuple[T | None, str | LaunchError | None]
        try:
            outcome = action(), None
        except LaunchError as error:
            outcome = None, error
        except Exception as error:
            outcome = None, f"rank {self.rank}: {error!r}"
        outcomes: list[Any] = [None] * self._size
        dist.all_gather_object(outcomes, outcome, group=self._group)
        errors = [error for _, error in outcomes if error is not None]
        for launch_error in (error for error in errors if isinstance(error, LaunchError)):
            raise launch_error
        if errors:
            raise SaveFailedError("; ".join(errors))
        return [result for result, _ in outcomes]

    def broadcast_from_rank_0(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 alone and returns its result on every rank."""
        results: list[Any] = self.gather_from_every_rank(lambda: action() if self.rank == 0 else None)
        return results[0]

    def gather_to_rank_0(self, value: T) -> list[T]:
        """Returns the values of all ranks, by rank, on rank 0, and an empty list on the others."""
        values: list[Any] = [None] * self._size if self.rank == 0 else []
        dist.gather_object(value, values or None, dst=self._first, group=self._group)
        return values

    def scatter_from_rank_0(self, values: list[T]) -> T:
        """Returns this rank's entry of rank 0's `values`, which has one for each rank; ignored on other ranks."""
        own: list[Any] = [None]
        dist.scatter_object_list(own, values if self.rank == 0 else None, src=self._first, group=self._group)
        return own[0]
