"""Two runs never share a folder."""

import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moba_train.errors import LaunchError
from moba_train.parallel.run_lock import run_folder_lock
from moba_train.parallel.world import World
from tests.forked import run_processes

HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "a+")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Another process holds a lock on the file."""
    command = [sys.executable, "-S", "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.kill()


def is_locked(path: Path) -> bool:
    """Whether another process could not have the lock; asked by one, because a process never waits for itself."""
    ask = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-S", "-c", ask, str(path)], stderr=subprocess.DEVNULL).returncode != 0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), 1, timedelta(minutes=1), dist.HashStore())
    dist.destroy_process_group()


def test_a_second_run_waits_and_is_then_refused_until_the_first_has_ended(tmp_path: Path, world: World) -> None:
    run_dir = tmp_path / "run"
    with run_folder_lock(run_dir, world):
        holder = (run_dir / "lock").read_text()
    assert holder.startswith("process ")
    with (
        held(run_dir / "lock"),
        pytest.raises(LaunchError, match=rf"{holder.strip()} trains in it.*set run_dir to a new folder"),
        run_folder_lock(run_dir, world, wait_s=0.3),
    ):
        pass
    with run_folder_lock(run_dir, world, wait_s=5):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, world: World) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(LaunchError, match=r"run_dir .*file/run cannot be used"),
        run_folder_lock(tmp_path / "file" / "run", world),
    ):
        pass


def wait_longer_than_a_collective_may(rank: int, store: Path, run_dir: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=1)
    )
    world = World(rank, 2, torch.device("cpu"), 2, timedelta(seconds=1), dist.HashStore())
    with (
        pytest.raises(LaunchError, match=r"process 1 on elsewhere trains in it"),
        run_folder_lock(run_dir, world, wait_s=1.5),
    ):
        pass


def test_a_disk_that_takes_no_byte_is_named(tmp_path: Path, world: World) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # each write fails, as on a full disk
    try:
        with pytest.raises(LaunchError, match=r"cannot be used: .*File too large"), run_folder_lock(tmp_path, world):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_rank_is_told_who_trains_there_whatever_the_timeout_of_collectives_is(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("process 1 on elsewhere")
    with held(lock):
        run_processes(wait_longer_than_a_collective_may, (tmp_path / "store", tmp_path), 2)


def test_a_folder_that_was_removed_is_not_this_run_s_any_more(tmp_path: Path, world: World) -> None:
    run_dir = tmp_path / "run"
    with run_folder_lock(run_dir, world) as lock:
        lock.check()
        shutil.rmtree(run_dir)
        with pytest.raises(LaunchError, match=r"run_dir .*/run: the folder of this run.* is no longer there"):
            lock.check()
        run_dir.mkdir()
        with pytest.raises(LaunchError, match="no longer there"):
            lock.check()
        (run_dir / "lock").write_text("process 1 on elsewhere")
        with pytest.raises(LaunchError, match=r"belongs to another run now \(process 1 on elsewhere\)"):
            lock.check()
        assert not lock.is_current()


def test_a_lock_file_with_another_number_is_told_by_its_text_and_stays_locked(tmp_path: Path, world: World) -> None:
    """Some file systems change inode numbers. Reading the file gives up the lock, so it is taken again."""
    with run_folder_lock(tmp_path, world) as lock:
        fstat = os.fstat

        def other_number(descriptor: int) -> os.stat_result:
            return os.stat_result([0, 1, *fstat(descriptor)[2:]])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fstat", other_number)
            lock.check()
        assert is_locked(tmp_path / "lock")
    assert not is_locked(tmp_path / "lock")


def test_where_there_are_no_locks_only_another_run_s_name_ends_a_run(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with run_folder_lock(tmp_path, world) as lock:
        assert "never start two runs in this folder" in caplog.text
        lock.check()
        text = (tmp_path / "lock").read_text()
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").write_text(text)
        lock.check()
        (tmp_path / "lock").write_text("process 1 on elsewhere")
        with pytest.raises(LaunchError, match="belongs to another run"):
            lock.check()


def test_a_lock_file_that_is_removed_while_a_run_waits_for_it_is_made_again(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockf = fcntl.lockf
    asked: list[int] = []

    def removed_at_first(*arguments: int) -> None:
        asked.append(1)
        if len(asked) == 1:
            (tmp_path / "lock").unlink()
        lockf(*arguments)

    monkeypatch.setattr(fcntl, "lockf", removed_at_first)
    with run_folder_lock(tmp_path, world) as lock:
        lock.check()
        assert is_locked(tmp_path / "lock")


def test_a_restarted_attempt_does_not_begin_afresh_in_place_of_a_folder_that_is_gone(
    tmp_path: Path, world: World
) -> None:
    """torchrun starts the ranks again with the same store, in which each attempt has its own prefix."""
    run_dir = tmp_path / "run"
    job = dist.HashStore()
    attempts = [replace(world, store=dist.PrefixStore(name, dist.PrefixStore("torchrun", job))) for name in "ab"]
    for attempt in attempts:
        with run_folder_lock(run_dir, attempt):
            pass
    shutil.rmtree(run_dir)
    with (
        pytest.raises(LaunchError, match=r"this job trained in it before, and now it is gone"),
        run_folder_lock(run_dir, attempts[1]),
    ):
        pass
    assert not run_dir.exists()
    with run_folder_lock(run_dir, world):
        pass
