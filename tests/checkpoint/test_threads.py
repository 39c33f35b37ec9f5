"""A rank's part of a checkpoint, written, hashed and read by several threads: nothing is lost, whichever of them
fails."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moba_train.checkpoint import files, publish
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.files import evenly, in_threads, threads_for, try_all
from moba_train.checkpoint.load import load_checkpoint
from moba_train.checkpoint.manifest import FileEntry, verify_checkpoint
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import TrainingTensors, load_model_and_optimizer
from moba_train.checkpoint.writer import ShardFile
from moba_train.errors import CheckpointError
from tests.checkpoint.checkpoint_ranks import (
    assert_equal,
    build,
    full_values,
    own_device,
    process_group,
    run_ranks,
    train,
)
from tests.checkpoint.test_publish import flip_byte


@contextmanager
def many_threads() -> Iterator[None]:
    """Files of a few bytes are enough for a thread each, on a node with many cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PART_BYTES", 64)
        patch.setattr(os, "cpu_count", lambda: 64)
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        yield


@given(st.lists(st.integers(0, 1000)), st.integers(1, 8))
def test_items_are_cut_in_their_order_into_parts_of_equal_size(sizes: list[int], count: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "threads_for", lambda size: count)
        parts = evenly(list(enumerate(sizes)), lambda item: item[1])
    assert [item for part in parts for item in part] == list(enumerate(sizes))
    assert len(parts) <= count
    assert all(parts)
    for part in parts:
        assert sum(size for _, size in part) <= sum(sizes) / count + max(sizes) + 1


@pytest.mark.parametrize(
    ("machine", "usable", "ranks", "gib", "want"),
    [
        (64, 64, 4, 45, 4),
        (256, 256, 8, 45, 4),
        (48, 48, 8, 45, 3),
        (96, 6, 8, 45, 3),  # bound to six cores of its own
        (64, 64, 4, 3.5, 3),
        (64, 64, 4, 1.9, 1),
        (2, 2, 1, 45, 1),
        (4, 4, 8, 45, 1),
    ],
)
def test_threads_share_the_node_and_none_is_started_for_little(
    machine: int, usable: int, ranks: int, gib: float, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert threads_for(int(gib * 2**30)) == want


def test_threads_work_at_the_same_time_and_an_error_ends_all() -> None:
    together = threading.Barrier(3, timeout=30)

    def meet(number: int) -> int:
        together.wait()
        return 10 * number

    assert in_threads(meet, [1, 2, 3], 3) == [10, 20, 30]
    ended: list[int] = []

    def fail(number: int) -> None:
        together.wait()
        if number == 2:
            raise OSError(errno.ENOSPC, "disk full")
        ended.append(number)

    with pytest.raises(OSError, match="disk full"):
        in_threads(fail, [1, 2, 3], 3)
    assert sorted(ended) == [1, 3]


def test_after_an_error_nothing_is_begun_and_the_first_one_is_raised() -> None:
    begun: list[int] = []
    failed = threading.Event()

    def act(number: int) -> None:
        begun.append(number)
        if number == 1:
            failed.set()
            raise CheckpointError("the first")
        assert failed.wait(30)
        time.sleep(0.1)
        raise OSError("a later one")

    with pytest.raises(CheckpointError, match="the first"):
        in_threads(act, range(40), 2)
    assert sorted(begun) == [0, 1]
    begun.clear()
    failed.clear()
    with pytest.raises(CheckpointError, match="the first"):  # at once: it is not tried again
        try_all(range(40), act, 2)
    assert sorted(begun) == [0, 1]


def start_at_most(room: int, patch: pytest.MonkeyPatch) -> None:
    """Let threads start as under a limit of processes, such as `ulimit -u`, that leaves room for so many."""
    name = "_start_new_thread" if sys.version_info < (3, 13) else "_start_joinable_thread"
    start = getattr(threading, name)
    left = [room]

    def limited(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        return start(*arguments, **more)

    patch.setattr(threading, name, limited)


def test_what_fails_in_a_thread_is_tried_again() -> None:
    tried: Counter[int] = Counter()

    def read(number: int) -> int:
        tried[number] += 1
        if (number, tried[number]) in ((2, 1), (3, 1), (3, 2)):
            raise OSError(errno.EIO, "Input/output error")
        return number

    assert try_all(range(6), read, 3) == ({number: number for number in range(6)}, {})
    assert tried == Counter({0: 1, 1: 1, 2: 2, 3: 3, 4: 1, 5: 1})


@pytest.mark.parametrize("room", [0, 1])
def test_where_no_further_thread_can_be_started_those_that_run_do_the_work(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_at_most(room, monkeypatch)
    assert in_threads(lambda number: 10 * number, range(6), 3) == [0, 10, 20, 30, 40, 50]


HANGING = """
import os, threading, time
from moba_train.checkpoint.files import in_threads

def hang(number):
    os.write(1, b"hangs\\n")
    time.sleep(600)

"""


def hanging(rest: str) -> subprocess.Popen[bytes]:
    """A process that runs `rest` after `HANGING`, once both threads hang."""
    process = subprocess.Popen([sys.executable, "-c", HANGING + rest], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert [process.stdout.readline() for _ in range(2)] == [b"hangs\n"] * 2
    return process


def test_threads_that_hang_do_not_keep_the_process() -> None:
    """As a save does on a file system that never answers: the run gives it up."""
    process = hanging("threading.Thread(target=in_threads, args=(hang, [1, 2], 2), daemon=True).start(); time.sleep(2)")
    assert process.wait(timeout=60) == 0


def test_ctrl_c_waits_for_no_thread() -> None:
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored in a background job
    process = hanging(f"{handler}; in_threads(hang, [1, 2], 2)")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT


def save_in_threads(folder: Path) -> None:
    """Each rank writes several files; with one of them damaged, the checkpoint is."""
    model, optimizer = build(seed=0)
    train(model, optimizer, 1)
    with many_threads():
        checkpointer = Checkpointer(folder, Retention(1))
        checkpointer.save(1, TrainingTensors(model, optimizer)(), {})
        checkpointer.before_update()
        checkpointer.close()
    assert checkpointer.last_error is None
    torch.save(full_values(TrainingTensors(model, optimizer)()), folder / f"expected{dist.get_rank()}.pt")


def load_in_threads(folder: Path) -> None:
    (path,) = (path for _, path in publish.published(folder))
    for patched in (False, True):
        model, optimizer = build(seed=1)
        if patched:
            with many_threads():
                load_model_and_optimizer(model, optimizer, path, verify=True)
        else:
            load_model_and_optimizer(model, optimizer, path, verify=True)
        assert_equal(full_values(TrainingTensors(model, optimizer)()), torch.load(folder / "expected0.pt"))


def test_files_of_several_threads_load_in_any_layout_and_every_one_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_ranks(2, save_in_threads, tmp_path / "store_1", folder)
    (path,) = (path for _, path in publish.published(folder))
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    for rank in (0, 1):
        assert len([name for name in shards if name.startswith(f"rank_{rank}_")]) > 1, shards
    run_ranks(2, load_in_threads, tmp_path / "store_2", folder)
    with process_group(tmp_path / "store_3"):
        load_in_threads(folder)
    with many_threads():
        for name in shards:
            content = (path / name).read_bytes()
            flip_byte(path / name)
            with pytest.raises(CheckpointError, match=rf"{name}: its SHA-256 is not"):
                verify_checkpoint(path)
            (path / name).write_bytes(content)
        assert set(verify_checkpoint(path)) > set(shards)


@pytest.mark.parametrize("which", [0, 2])
def test_a_full_disk_in_one_thread_fails_the_save(which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other threads have written is not published."""
    folder = tmp_path / "checkpoints"
    write = ShardFile.write

    def write_or_fail(file: ShardFile, *arguments: Any) -> FileEntry:
        if file.name == f"rank_0_{which}.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, *arguments)

    values = {f"weight.{number}": torch.full((64,), float(number)) for number in range(8)}
    with process_group(tmp_path / "store"), many_threads():
        checkpointer = Checkpointer(folder, Retention(2))
        monkeypatch.setattr(ShardFile, "write", write_or_fail)
        checkpointer.save(1, values, {})
        checkpointer.wait()
        assert "step 1 was not saved" in (checkpointer.last_error or "")
        assert "No space left" in (checkpointer.last_error or "")
        assert list(folder.glob("*step*")) == []
        monkeypatch.setattr(ShardFile, "write", write)
        checkpointer.save(2, values, {})
        checkpointer.close()
        assert checkpointer.last_error is None
        found = {name: torch.empty_like(value) for name, value in values.items()}
        load_checkpoint(folder / publish.step_name(2), found, verify=True)
    assert_equal(found, values)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_threads_of_a_rank_stay_on_its_gpu(tmp_path: Path) -> None:
    """What they read goes to that GPU; to make a context on another takes seconds, and memory there."""
    run_ranks(2, save_and_load_on_gpus, tmp_path / "store", tmp_path / "checkpoints", device="cuda")


def save_and_load_on_gpus(folder: Path) -> None:
    save_in_threads(folder)
    dist.barrier()
    load_in_threads(folder)
    assert own_device() == "cuda"
    gpus = range(torch.cuda.device_count())
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # not in its stubs
    assert [gpu for gpu in gpus if has_context(gpu)] == [dist.get_rank()]
