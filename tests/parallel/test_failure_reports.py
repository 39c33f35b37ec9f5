"""What a rank that gives up tells about the others, and what that costs the store."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from moba_train.errors import CheckpointError, CommunicationError
from moba_train.parallel import failures
from moba_train.parallel.failures import FailureReports


class CountingStore:
    """A store that counts the requests of each thread."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.requests: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.requests[threading.get_ident()] += 1
            return method(*arguments)

        return counted


def give_up(store: Any, errors: dict[int, Exception], size: int) -> dict[int, tuple[str, int | None, bool]]:
    """The ranks of `errors` give up at the same time: what is known about others, their exit code, and whether the
    error is said elsewhere, by rank."""
    together = threading.Barrier(len(errors))

    def one(rank: int) -> tuple[str, int | None, bool]:
        reports = FailureReports(store, rank, size, timedelta(seconds=60))
        together.wait()
        text = reports.report(errors[rank])
        return text, reports.code_of_others, reports.is_said_elsewhere(errors[rank])  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(errors)) as pool:
        return dict(zip(errors, pool.map(one, errors), strict=True))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 1.0)
    monkeypatch.setattr(failures, "SAME_S", 0.3)


def test_all_ranks_that_wait_name_the_one_that_does_not_answer() -> None:
    errors: dict[int, Exception] = {
        rank: CommunicationError(f"rank {rank} waits in vain") for rank in range(8) if rank != 5
    }
    for text, code, _ in give_up(dist.HashStore(), errors, size=8).values():
        assert "no answer from rank 5: dead" in text
        assert code is None


def test_ranks_that_wait_name_those_that_ended_with_errors_of_their_own() -> None:
    store = dist.HashStore()
    full = CheckpointError("the disk is full")
    ended = give_up(store, {2: full, 3: full, 4: full}, size=6)
    assert [text for text, _, _ in ended.values()] == ["", "", ""]
    assert sorted(said for _, _, said in ended.values()) == [False, True, True]
    assert give_up(store, {5: CheckpointError("bug")}, size=6)[5][0].endswith(
        "ended before: CheckpointError: the disk is full"
    )
    waiting: dict[int, Exception] = {rank: CommunicationError(f"rank {rank} waits in vain") for rank in (0, 1)}
    for text, code, said in give_up(store, waiting, size=6).values():
        assert text.splitlines() == [
            "ranks 2-4 ended before: CheckpointError: the disk is full",
            "rank 5 ended before: CheckpointError: bug",
        ]
        assert code == CheckpointError.exit_code
        assert not said


def test_a_rank_that_gives_up_late_is_told_what_is_known_then() -> None:
    store = dist.HashStore()
    (first,) = give_up(store, {0: CommunicationError("in vain")}, size=3).values()
    assert "no answer from ranks 1-2" in first[0]
    (late,) = give_up(store, {1: CommunicationError("in vain, too")}, size=3).values()
    assert "no answer from rank 2:" in late[0]
    assert "rank 0 ended before: CommunicationError: in vain" in late[0]


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("error", [CommunicationError("in vain"), CheckpointError("the disk is full")])
def test_requests_of_a_rank_do_not_grow_with_the_number_of_ranks(ranks: int, error: Exception) -> None:
    """The last rank does not answer, so that the others wait for it as long as they ever do."""
    store = CountingStore()
    give_up(store, dict.fromkeys(range(ranks - 1), error), ranks)
    assert max(store.requests.values()) < 60
