"""The collectives of a save, in which an error on one rank is an error on all, so that no rank is left waiting."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from moba_train.errors import LaunchError, named_ranks
from moba_train.parallel import world

T = TypeVar("T")
U = TypeVar("U")
Outcome = tuple[T | None, str | LaunchError | None]
"""Result of an action, or its error."""

logger = logging.getLogger(__name__)


class SaveFailedError(Exception):
    """A step of a save failed on at least one rank; the text names the ranks and their errors."""

    def __init__(self, text: str, own: str | None) -> None:
        super().__init__(text)
        self.own = own
        """The error of this rank; None where only other ranks have failed."""


class SaveGroup:
    """A process group of all ranks, for saves. Every method is called on all ranks, and results must be picklable.

    A method that runs an `action` raises SaveFailedError on all ranks if the action raised on any. A LaunchError, which
    says that the run must not go on, is raised as it is on all ranks. A rank that waits for longer than the group's
    timeout gets torch's RuntimeError. gloo then closes the group for good, so that all later calls fail on all ranks,
    until `reconnect`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self._group = group
        self._size = dist.get_world_size(group)
        self._is_lost = False
        self._own_s = 0.0
        """Seconds that this rank's last action took."""

    def reconnect(self, new_group: Callable[[], dist.ProcessGroup]) -> None:
        """Replaces the group by a new one if a collective has failed on any rank; rank 0 then logs which rank was late.

        Called by the thread that uses the default process group, while no other method runs. It is this group that
        tells all ranks about the failure of one, so a rank that never comes ends the run as in any step of training.
        """
        ranks = world.gather_over_ranks((self._is_lost, self._own_s))
        if not any(is_lost for is_lost, _ in ranks):
            return
        dist.destroy_process_group(self._group)
        self._group = new_group()
        self._is_lost = False
        if self.rank == 0:
            slowest_s, slowest = max((seconds, rank) for rank, (_, seconds) in enumerate(ranks))
            logger.warning(
                "the ranks lost contact in the last save and are connected again for the next one. Rank %d let the "
                "others wait longest: its part took %.1f s",
                slowest,
                slowest_s,
            )

    def run(self, action: Callable[[], T]) -> T:
        """Runs `action` and returns this rank's result, which is not sent and so may be large."""
        own: list[T] = []
        self.agree(lambda: own.append(action()), lambda _: None)
        return own[0]

    def agree(self, action: Callable[[], T], decide: Callable[[list[T]], U]) -> U:
        """Runs `action` and, on rank 0 alone, `decide` with the results of all ranks, by rank. Returns its result on
        every rank: the messages of a rank other than 0 do not grow with the number of ranks."""
        own = self._outcome(action)
        # Errors travel with the results: a rank that raised here would leave the others waiting.
        outcomes = self.gather(own)
        return self._conclude(self._decide(outcomes, decide) if outcomes else None, own[1])

    def broadcast(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 alone and returns its result on every rank."""
        return self._conclude(self._decide([], lambda _: action()) if self.rank == 0 else None, None)

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, by rank, on rank 0, and an empty list on the others."""
        with self._collective():
            return world.gather(value, self._group)

    def scatter(self, values: list[T]) -> T:
        """Returns this rank's entry of rank 0's `values`, which has one for each rank; ignored on other ranks."""
        own: list[Any] = [None]
        with self._collective():
            dist.scatter_object_list(own, values if self.rank == 0 else None, group=self._group)
        return own[0]

    def _outcome(self, action: Callable[[], T]) -> Outcome[T]:
        began = time.monotonic()
        try:
            return action(), None
        except LaunchError as error:
            return None, error
        except Exception as error:
            return None, repr(error)
        finally:
            self._own_s = time.monotonic() - began

    def _decide(self, outcomes: list[Outcome[T]], decide: Callable[[list[Any]], U]) -> Outcome[U]:
        errors = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
        if not errors:
            decision, problem = self._outcome(lambda: decide([result for result, _ in outcomes]))
            if problem is None:
                return decision, None
            errors[self.rank] = problem
        return None, next((each for each in errors.values() if isinstance(each, LaunchError)), None) or _by_text(errors)

    def _conclude(self, outcome: Outcome[U] | None, own: str | LaunchError | None) -> U:
        """The result of rank 0's `outcome`, on every rank; raises its error. `own`: this rank's error."""
        with self._collective():
            result, error = world.broadcast(outcome, self._group)  # type: ignore[misc]  # rank 0's is never None
        if isinstance(error, LaunchError):
            raise error
        if error is not None:
            raise SaveFailedError(error, error if self.rank == 0 else f"rank {self.rank}: {own}" if own else None)
        return result  # type: ignore[return-value]  # without an error

    @contextmanager
    def _collective(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._is_lost = True
            raise


def _by_text(errors: dict[int, str | LaunchError]) -> str:
    """The errors of ranks, each text once: `ranks 3-9: OSError(...)`."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, text in errors.items():
        ranks[str(text)].append(rank)
    return "; ".join(f"{named_ranks(numbers)}: {text}" for text, numbers in ranks.items())
