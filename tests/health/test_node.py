"""A bad GPU or a full disk is named: before a run starts, and when it appears or gets worse."""

import errno
import time
from collections import namedtuple
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moba_train.config.health import NodeConfig
from moba_train.health import node
from moba_train.health.gpu import GpuState
from moba_train.health.node import FORGOTTEN_S, Disk, KnownProblems, NodeWatch, Problem, disk_problem, gpu_problems
from moba_train.parallel.world import World


class FakeGpu:
    """A GPU in the states that a test gives it."""

    name = "GPU 5 (GPU-1234)"

    def __init__(self, state: GpuState) -> None:
        self.state = state
        self.readings = 0

    def read(self) -> GpuState:
        self.readings += 1
        return self.state


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The GPU of every rank of this process."""
    fake = FakeGpu(GpuState(links=18, link_errors=(("replay", 3), ("CRC", 500))))
    monkeypatch.setattr(node, "find_gpu", lambda _uuid: fake)
    monkeypatch.setattr(node, "_uuid", lambda _device: "GPU-1234")
    return fake


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "EVERY_S", 0.01)


class Node:
    """One node with two ranks, watched; rank 0 gets the reports."""

    def __init__(self, disks: list[Disk]) -> None:
        store = dist.HashStore()
        self.reports: list[str] = []
        self.watches = []
        for rank in (0, 1):
            world = World(rank, 2, torch.device("cpu"), 2, timedelta(seconds=5), store)
            self.watches.append(NodeWatch(world, disks, self.reports.append))

    def wait_for(self, text: str, rank: int) -> list[str]:
        """The reports, once one of them is about `rank` and contains `text`."""
        deadline = time.monotonic() + 10
        while not any(text in report and f"rank {rank}," in report for report in self.reports):
            assert time.monotonic() < deadline, self.reports
            time.sleep(0.005)
        return self.reports

    def close(self) -> None:
        for watch in self.watches:
            watch.close()
            assert not watch._thread.is_alive()


@pytest.fixture
def watched(gpu: FakeGpu, tmp_path: Path) -> Iterator[Node]:
    sound = Node([Disk(tmp_path, 1)])
    yield sound
    sound.close()


def test_a_problem_reaches_rank_0_when_it_appears_and_when_it_gets_worse(gpu: FakeGpu, watched: Node) -> None:
    while gpu.readings < 4:
        time.sleep(0.005)
    assert watched.reports == [], "errors of before the run do not count"
    for state, text in (
        (gpu.state._replace(uncorrected_ecc=2), "2 uncorrected ECC errors"),
        (gpu.state._replace(uncorrected_ecc=2, remap_pending=True), "rows wait for a reset"),
        (gpu.state._replace(uncorrected_ecc=3, remap_pending=True), ""),
        (gpu.state._replace(uncorrected_ecc=4, remap_pending=True), "4 uncorrected ECC errors"),
    ):
        gpu.state = state
        readings = gpu.readings
        while gpu.readings < readings + 6:
            time.sleep(0.005)
        for rank in (0, 1):
            watched.wait_for(text, rank)
    texts = sorted(report.partition("rank ")[2] for report in watched.reports)
    assert len(texts) == 6, texts
    assert texts[0] == "0, GPU 5 (GPU-1234): 2 uncorrected ECC errors since it was last reset"
    assert watched.reports[0].startswith("host ")


def test_a_driver_that_raises_is_a_problem_and_no_end(gpu: FakeGpu, watched: Node) -> None:
    def broken() -> GpuState:
        raise OSError("the driver is gone")

    read, gpu.read = gpu.read, broken  # type: ignore[method-assign]
    assert "its state cannot be read: OSError('the driver is gone')" in watched.wait_for("cannot be read", 1)[-1]
    gpu.read = read  # type: ignore[method-assign]
    gpu.state = gpu.state._replace(remap_failed=True)
    watched.wait_for("must be replaced", 1)


def test_a_driver_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "read", lambda: time.sleep(3))
    monkeypatch.setattr(node, "FIRST_ANSWER_S", 0.05)
    monkeypatch.setattr(node, "gather_over_ranks", lambda own: [own])
    began = time.monotonic()
    world = World(0, 1, torch.device("cpu"), 1, timedelta(seconds=5), dist.HashStore())
    node.refuse_broken_gpus(NodeConfig(), world)
    watch = NodeWatch(world, [Disk(tmp_path, 1)], print)
    watch.close()
    assert time.monotonic() - began < 2


def test_a_disk_that_fills_up_is_named_by_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    free = 2**31
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(2**40, 0, free if path == tmp_path else 2**40))
    disk = Disk(tmp_path, 2**30)
    assert disk_problem(disk) is None
    watched = Node([disk])
    try:
        free = 2**29
        watched.wait_for("512.00 MiB free, one checkpoint needs 1.00 GiB", 0)
        free = 2**28
        watched.wait_for("256.00 MiB free", 0)
    finally:
        watched.close()
    assert len(watched.reports) == 2
    assert f"disk of {tmp_path}: " in watched.reports[0]
    free = 0
    assert disk_problem(Disk(tmp_path / "not" / "made", 1)) is not None, "its disk is that of the folder above"

    def hung_up(_path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("shutil.disk_usage", hung_up)
    unread = disk_problem(disk)
    assert unread is not None
    assert "Stale file handle" in unread.text


def test_what_is_wrong_with_a_gpu() -> None:
    before = GpuState(links=18, link_errors=(("replay", 3), ("recovery", 0), ("CRC", 500)))
    assert gpu_problems(before, before) == []
    assert [problem.name for problem in gpu_problems(GpuState(lost="GPU is lost"), before) if problem.is_fault] == [
        "lost"
    ]
    worse = GpuState("", 1, True, True, ("power brake",), 17, (("replay", 4), ("recovery", 0), ("CRC", 600)))
    problems = gpu_problems(worse, before)
    assert {problem.name for problem in problems if problem.is_fault} == {"ecc", "remap_failed"}
    texts = [problem.text for problem in problems if not problem.is_fault]
    assert texts[1:] == [
        "the hardware has lowered its clocks: power brake",
        "17 NVLinks are active, 18 were when the run started",
        "1 NVLink replay errors since the run started",
    ]
    many = gpu_problems(before._replace(link_errors=(("CRC", 601),)), before)
    assert [problem.text for problem in many] == ["101 NVLink CRC errors since the run started"]


def test_a_problem_that_comes_back_after_an_hour_is_news() -> None:
    known = KnownProblems()
    hot = [Problem("slowdown", 1, "hot")]
    assert known.news(hot, 0.0) == hot
    for minute in range(1, 100):
        assert known.news(hot, 60.0 * minute) == []
    assert known.news([], 99 * 60.0 + FORGOTTEN_S / 2) == []
    assert known.news(hot, 99 * 60.0 + FORGOTTEN_S - 1) == []
    assert known.news(hot, 99 * 60.0 + 2 * FORGOTTEN_S) == hot
