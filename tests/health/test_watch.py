"""How long a phase may take, and who is to blame when it takes longer."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moba_train.health import watch
from moba_train.health.watch import BEFORE_TIMEOUT, PhaseTimes, Watch
from moba_train.parallel.failures import Heartbeat
from moba_train.parallel.world import World

MOST = 480.0
TIMEOUT_S = 2.5


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LEAST_S", 0.6)


class Ranks:
    """One rank of `size`, really watched; the others give the signs of life that they are told to."""

    def __init__(self, folder: Path, size: int, watched: int = 0) -> None:
        self.store = dist.HashStore()
        self.reports: list[str] = []
        world = World(watched, size, torch.device("cpu"), size, timedelta(seconds=TIMEOUT_S), self.store)
        self.watch = Watch(world, folder, self.reports.append)

    def heartbeat(self, rank: int, entered: int, age_s: float = 9.0, limit_s: float = 1.0, waits: bool = True) -> None:
        count = 1 + int(time.monotonic() * 1000)
        stack = f"  at line {rank}\n"
        Heartbeat(count, entered, "checkpoint", 7, age_s, limit_s, stack, waits).publish(self.store, rank)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path, 3)
    yield ranks
    ranks.watch.close()


def reported(ranks: Ranks, heartbeats: Callable[[], None], seconds: float = 10.0) -> bool:
    """Whether anything is reported within `seconds` of these heartbeats."""
    deadline = time.monotonic() + seconds
    while not ranks.reports and time.monotonic() < deadline:
        heartbeats()
        time.sleep(0.02)
    return bool(ranks.reports)


def test_limits_follow_the_usual_time_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LEAST_S", 10.0)
    times = PhaseTimes(MOST)
    assert times.limit("step") == MOST, "not known yet"
    for seconds in (60.0, 2.0, 2.0, 2.1):  # the first compiles
        times.add("step", seconds)
    assert times.limit("step") == pytest.approx(20.5)
    assert times.limit("checkpoint") == MOST
    for _ in range(100):
        times.add("step", 0.1)
    assert times.limit("step") == 10.0
    for _ in range(100):
        times.add("step", 100.0)
    assert times.limit("step") == MOST
    times.forget()
    assert times.limit("step") == MOST


def test_a_rank_without_signs_of_life_is_named(three: Ranks) -> None:
    three.heartbeat(2, entered=5)  # its last
    assert reported(three, lambda: three.heartbeat(1, entered=0))
    (text,) = three.reports
    assert text.startswith("rank 2 of 3 stalls in 'checkpoint' after step 7: no heartbeat")
    assert "rank 1" not in text


def test_a_node_of_silent_ranks_is_named_as_soon_as_one_rank(tmp_path: Path) -> None:
    """By the first of the others that claims it: ranks 0 to 19 are lost, one after the other would take 20 quarters."""
    others = Ranks(tmp_path, 21, watched=20)
    for rank in range(20):
        others.heartbeat(rank, entered=0)  # their last
    began = time.monotonic()
    assert reported(others, lambda: None)
    assert time.monotonic() - began < 2 * BEFORE_TIMEOUT * TIMEOUT_S
    assert others.reports[0].startswith("rank 0 of 21 stalls")
    others.watch.close()


def test_the_rank_that_is_behind_is_named_with_its_stack(three: Ranks) -> None:
    def heartbeats() -> None:
        three.heartbeat(1, entered=0, waits=False)
        three.heartbeat(2, entered=1)

    with three.watch.phase("update", 8):
        assert reported(three, heartbeats)
    assert three.reports[0].startswith("rank 1 of 3 stalls in 'checkpoint' after step 7: for 9.0 s")
    assert "at line 1" in three.reports[0]
    time.sleep(0.3)
    assert len(three.reports) == 1, "once"


def test_of_ranks_in_the_same_phase_the_one_that_does_not_wait_is_named(three: Ranks) -> None:
    def heartbeats() -> None:
        three.heartbeat(1, entered=1)
        three.heartbeat(2, entered=0, waits=True)
        three.heartbeat(1, entered=0, waits=False)

    with three.watch.phase("update", 8):
        assert reported(three, heartbeats)
    assert three.reports[0].startswith("rank 1 of 3")


def test_where_all_that_are_behind_wait_all_of_them_are_named(three: Ranks) -> None:
    def heartbeats() -> None:
        three.heartbeat(1, entered=0)
        three.heartbeat(2, entered=0)

    with three.watch.phase("update", 8):
        assert reported(three, heartbeats)
    assert re.findall(r"^rank (\d) of 3 stalls", three.reports[0], re.MULTILINE) == ["1", "2"]
    assert "the others wait for " in three.reports[0]


def test_a_rank_alone_is_reported_with_its_flight_record_when_its_limit_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    alone = Ranks(tmp_path, 1)
    record = tmp_path / "nccl_trace_rank_0"
    began = time.monotonic()
    with alone.watch.phase("update", 8):
        while not record.exists() and time.monotonic() < began + 10:
            time.sleep(0.02)
    alone.watch.close()
    assert BEFORE_TIMEOUT * TIMEOUT_S <= time.monotonic() - began < 10
    (text,) = alone.reports
    assert text.startswith("rank 0 of 1 stalls in 'update' after step 8")
    assert "the others" not in text


def test_a_rank_that_may_take_so_long_is_not_blamed(three: Ranks) -> None:
    def heartbeats() -> None:
        three.heartbeat(1, entered=0, age_s=9.0, limit_s=30.0)
        three.heartbeat(2, entered=0)

    with three.watch.phase("update", 8):
        assert not reported(three, heartbeats, seconds=2.6)


def current_phase(ranks: Ranks) -> tuple[str, int]:
    """Phase and step in the next heartbeat."""
    earlier = Heartbeat.latest(ranks.store, 0)
    while (heartbeat := Heartbeat.latest(ranks.store, 0)) is None or (earlier and heartbeat.count <= earlier.count + 1):
        time.sleep(0.01)
    return heartbeat.phase, heartbeat.step


def test_a_phase_gives_way_to_the_outer_one_and_stays_where_an_exception_left_it(three: Ranks) -> None:
    with three.watch.phase("update", 8):
        with three.watch.phase("spike", 8):
            assert current_phase(three) == ("spike", 8)
        assert current_phase(three) == ("update", 8)
    assert current_phase(three) == ("between phases", 8)
    with suppress(ValueError), three.watch.phase("evaluation", 9):
        raise ValueError
    assert current_phase(three) == ("evaluation", 9)


def test_a_phase_costs_microseconds(tmp_path: Path) -> None:
    watch = Ranks(tmp_path, 1).watch
    began = time.thread_time()
    for step in range(1000):
        with watch.phase("step", step):
            pass
    assert time.thread_time() - began < 0.1, "0.1 ms each"
    watch.close()
