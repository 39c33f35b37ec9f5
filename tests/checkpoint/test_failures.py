"""Saves that fail, and processes that die: the checkpoints published before stay, and no rank hangs."""

import errno
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moba_train.checkpoint import checkpointer as checkpointer_module
from moba_train.checkpoint import load, manifest, publish
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.load import load_checkpoint, newest_intact
from moba_train.checkpoint.publisher import Place
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.writer import ShardFile, ShardWriter
from moba_train.errors import CheckpointError
from moba_train.parallel.world import gather_over_ranks
from tests.checkpoint.checkpoint_ranks import own_device, process_group, run_ranks
from tests.checkpoint.test_publish import failing_reads, flip_byte, steps
from tests.checkpoint.test_threads import start_at_most
from tests.forked import forked


class Logged(logging.Handler):
    """What this rank logs: its errors and warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def disk_full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def cannot_read(*args: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def save_with_full_disks(folder: Path) -> None:
    """Rank 1 cannot write its shard, then rank 0 cannot write the manifest's JSON, then all is well again."""
    checkpointer = Checkpointer(folder, Retention(1))
    tensors = {f"weight.{dist.get_rank()}": torch.ones(1000)}
    checkpointer.save(1, tensors, {})
    checkpointer.wait()
    assert checkpointer.last_error is None

    for step, failing_rank, owner, name in [
        (2, 1, ShardFile, "write"),
        (3, 0, manifest, "write_json"),
        (4, 1, os, "fsync"),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == failing_rank:
                patch.setattr(owner, name, disk_full)
            checkpointer.save(step, tensors, {})
            checkpointer.wait()
        assert checkpointer.last_error is not None
        assert f"rank {failing_rank}: OSError(28, 'No space left on device')" in checkpointer.last_error
        dist.barrier()
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_00000001"]
        manifest.verify_checkpoint(folder / "step_00000001")
        dist.barrier()

    checkpointer.save(5, tensors, {})
    checkpointer.close()
    assert checkpointer.last_error is None
    path = folder / "step_00000005"
    assert publish.latest_checkpoint(folder) == path
    load_checkpoint(path, tensors, optional=("weight.",), verify=True)

    # What rank 1 alone cannot read, rank 0 does not go on from either.
    assert newest_intact(folder) == path
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(load, "read_meta", cannot_read)
        with pytest.raises(CheckpointError, match="Input/output error"):
            newest_intact(folder)
        dist.barrier()
        assert path.is_dir(), "nor is it set aside"

    # A read that fails once while the tensors are loaded.
    with pytest.MonkeyPatch.context() as patch:
        failures, read = [cannot_read], load._read_overlap
        patch.setattr(load, "_read_overlap", lambda *args: (failures.pop() if failures else read)(*args))
        load_checkpoint(path, tensors, optional=("weight.",))
        assert not failures

    dist.barrier()
    if dist.get_rank() == 1:
        (path / "rank_1_0.safetensors").write_bytes(bytes((path / "rank_1_0.safetensors").stat().st_size))
    dist.barrier()
    for verify in (False, True):
        # On both ranks, although rank 0's own tensor is good.
        with pytest.raises(CheckpointError, match=r"rank_1_0\.safetensors: its SHA-256"):
            load_checkpoint(path, tensors, optional=("weight.",), verify=verify)


def save_without_threads(folder: Path) -> None:
    """Rank 1 has no room for a thread: it writes while its training waits, and the other rank does as always."""
    checkpointer = Checkpointer(folder, Retention(1))
    tensors = {f"weight.{dist.get_rank()}": torch.ones(1000)}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            start_at_most(0, patch)
        checkpointer.save(1, tensors, {})
        checkpointer.before_update()
        checkpointer.wait()
    assert checkpointer.last_error is None
    dist.barrier()
    load_checkpoint(folder / "step_00000001", tensors, optional=("weight.",), verify=True)
    checkpointer.save(2, tensors, {})
    checkpointer.close()
    assert [saved.step for saved in checkpointer.saves] == [1, 2]


def test_a_rank_that_can_start_no_thread_saves_all_the_same(tmp_path: Path) -> None:
    run_ranks(2, save_without_threads, tmp_path / "store", tmp_path / "checkpoints")


def test_a_full_disk_on_one_rank_costs_only_that_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, save_with_full_disks, tmp_path / "store", tmp_path / "checkpoints")


@contextmanager
def recorded(owner: Any, name: str) -> Iterator[list[str]]:
    """The names of the files with which this rank calls a function or method."""
    function, files = getattr(owner, name), []

    def recording(path: Path) -> Any:
        files.append(path.name)
        return function(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, recording)
        yield files


def load_by_parts(folder: Path) -> None:
    """Loads a good checkpoint, one in which a shard is damaged, and one in which it is missing."""
    checkpointer = Checkpointer(folder, Retention(1))
    tensors = {f"weight.{dist.get_rank()}": torch.ones(1000)}
    checkpointer.save(1, tensors, {})
    checkpointer.close()
    path = folder / "step_00000001"
    shard = path / "rank_1_0.safetensors"

    with recorded(Path, "lstat") as looked_at:
        load_checkpoint(path, tensors, optional=("weight.",))
    check_parts(looked_at, path)

    dist.barrier()
    if dist.get_rank() == 1:
        shard.write_bytes(bytes(shard.stat().st_size))
    dist.barrier()
    damage = pytest.raises(CheckpointError, match=r"rank_1_0\.safetensors: its SHA")
    with recorded(manifest, "_sha256_of") as hashed, damage:
        load_checkpoint(path, tensors, optional=("weight.",))
    check_parts(hashed, path)

    if dist.get_rank() == 1:
        shard.unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank_1_0\.safetensors: missing"):
        load_checkpoint(path, tensors, optional=("weight.",))


def check_parts(files: list[str], checkpoint: Path) -> None:
    """That each file of the checkpoint is in the list of exactly one rank."""
    counts = Counter(name for names in gather_over_ranks(files) for name in names)
    named = manifest.read_manifest(checkpoint)
    assert {name: counts[name] for name in named} == dict.fromkeys(named, 1)


def test_ranks_share_the_work_of_checking_files_and_report_what_any_of_them_finds(tmp_path: Path) -> None:
    run_ranks(3, load_by_parts, tmp_path / "store", tmp_path / "checkpoints")


def find_damage_beside_what_cannot_be_read(folder: Path) -> None:
    """In the newest checkpoint rank 1 finds a damaged file, and rank 0 cannot read one of its own."""
    checkpointer = Checkpointer(folder, Retention(2))
    for step in (1, 2):
        checkpointer.save(step, {f"weight.{dist.get_rank()}": torch.ones(1000)}, {})
    checkpointer.close()
    newest = folder / "step_00000002"
    unreadable, damaged = "rank_0_0.safetensors", "rank_1_0.safetensors"
    parts = [sorted(manifest.read_manifest(newest))[rank::2] for rank in range(2)]
    assert (unreadable in parts[0], damaged in parts[1]) == (True, True)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            flip_byte(newest / damaged)
            failing_reads(patch, f"{newest.name}/{unreadable}")
        dist.barrier()
        assert newest_intact(folder) == folder / "step_00000001"


def test_damage_that_one_rank_finds_outweighs_what_another_cannot_read(tmp_path: Path) -> None:
    run_ranks(2, find_damage_beside_what_cannot_be_read, tmp_path / "store", tmp_path / "checkpoints")
    assert steps(tmp_path / "checkpoints") == [1]


def save(checkpointer: Checkpointer, step: int) -> None:
    """Saves and waits for the end."""
    checkpointer.save(step, {"weight": torch.ones(1000, device=own_device())}, {})
    checkpointer.wait()


def save_late_on_rank_1(checkpointer: Checkpointer, step: int, given_up: Path) -> None:
    """Rank 1 answers when the others have given up the save, as the file `given_up` says."""
    write = ShardWriter.write

    def write_late(*arguments: Any) -> Any:
        while not given_up.exists():
            time.sleep(0.05)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(ShardWriter, "write", write_late)
        save(checkpointer, step)
    if dist.get_rank() == 0:
        given_up.touch()
    assert f"step {step} was not saved" in (checkpointer.last_error or "")


def save_while_rank_1_is_late(folder: Path) -> None:
    """Rank 1 is late for the save of step 2."""
    logged = Logged()
    logging.getLogger().addHandler(logged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer_module, "RANKS_APART", timedelta(seconds=5))
        checkpointer = Checkpointer(folder, Retention(3))
        save(checkpointer, 1)
        assert checkpointer.last_error is None
        save_late_on_rank_1(checkpointer, 2, folder.with_name("given up"))
        for step in (3, 4):
            save(checkpointer, step)
            assert checkpointer.last_error is None
        checkpointer.close()
    dist.barrier()
    assert [path for _, path in publish.published(folder)] == [folder / publish.step_name(step) for step in (1, 3, 4)]
    manifest.verify_checkpoint(folder / "step_00000004")
    late_ranks = [text for text in logged.texts if "let the others wait longest" in text]
    assert len(late_ranks) == (dist.get_rank() == 0), "said once"
    assert all("Rank 1 let" in text for text in late_ranks)


def test_a_rank_that_answers_too_late_costs_one_save_and_is_named(tmp_path: Path) -> None:
    run_ranks(3, save_while_rank_1_is_late, tmp_path / "store", tmp_path / "checkpoints")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_with_gpus_connect_again_after_a_late_answer(tmp_path: Path) -> None:
    """They agree on it over NCCL, and only saves use gloo."""
    run_ranks(2, save_while_rank_1_is_late, tmp_path / "store", tmp_path / "checkpoints", device="cuda")


@contextmanager
def last_answer_lost() -> Iterator[None]:
    """On this rank alone, the collective fails in which the ranks learn that a save is published."""
    write = ShardWriter.write
    broadcast = dist.broadcast_object_list
    has_written = False

    def write_own_files(*arguments: Any) -> Any:
        nonlocal has_written
        has_written = True
        return write(*arguments)

    def broadcast_object_list(*arguments: Any, **options: Any) -> None:
        broadcast(*arguments, **options)
        if has_written:
            raise RuntimeError("connection closed by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "write", write_own_files)
        patch.setattr(dist, "broadcast_object_list", broadcast_object_list)
        yield


def assert_all_ranks_end_alike(checkpointer: Checkpointer) -> None:
    """The next save raises the same error on every rank."""
    with pytest.raises(CheckpointError, match="1 saves in a row have failed") as ended:
        save(checkpointer, 9)
    assert len(set(gather_over_ranks(str(ended.value)))) == 1


def save_where_one_rank_loses_the_last_answer(folder: Path) -> None:
    """Ranks 1 and 2 take a published save for the one failed save too many. Rank 0, which has published it, does not,
    and its view counts."""
    logged = Logged()
    logging.getLogger().addHandler(logged)
    checkpointer = Checkpointer(folder, Retention(3), max_failures=1)
    for step, lost in ((1, 1), (2, 2), (3, 0)):
        with last_answer_lost() if dist.get_rank() == lost else nullcontext():
            save(checkpointer, step)
        assert (checkpointer.fatal is not None) == (dist.get_rank() == lost != 0)
        checkpointer.raise_fatal()
        assert (checkpointer.failed_saves, checkpointer.last_error) == (0, None)
    if dist.get_rank() == 0:
        assert checkpointer.last_saved is not None
        assert (checkpointer.last_saved.step, checkpointer.errors) == (3, [])
        assert [text for text in logged.texts if "step 3 is complete, but the ranks lost contact" in text]
    save(checkpointer, 4)
    assert checkpointer.last_error is None
    assert [step for step, _ in publish.published(folder)] == [2, 3, 4]


def test_ranks_that_saw_a_published_save_end_differently_go_on_together(tmp_path: Path) -> None:
    run_ranks(3, save_where_one_rank_loses_the_last_answer, tmp_path / "store", tmp_path / "checkpoints")


def end_after_a_late_rank(folder: Path) -> None:
    """The late rank and those that waited in vain have different errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer_module, "RANKS_APART", timedelta(seconds=2))
        checkpointer = Checkpointer(folder, Retention(3), max_failures=1)
        save_late_on_rank_1(checkpointer, 1, folder.with_name("given up"))
        assert len(set(gather_over_ranks(checkpointer.last_error))) > 1
        assert_all_ranks_end_alike(checkpointer)


def test_a_late_rank_and_the_others_end_the_run_with_the_same_error(tmp_path: Path) -> None:
    run_ranks(3, end_after_a_late_rank, tmp_path / "store", tmp_path / "checkpoints")


def save_where_three_ranks_cannot(folder: Path) -> None:
    """Ranks 1 to 3 of 5 have a full disk, in the first folder and in the fallback."""
    rank, logged = dist.get_rank(), Logged()
    logging.getLogger().addHandler(logged)
    first, second = folder / "first", folder / "second"
    checkpointer = Checkpointer(first, Retention(1), fallback=Place(second, Retention(1), "checkpoint.fallback_dir"))
    with pytest.MonkeyPatch.context() as patch:
        if 1 <= rank <= 3:
            patch.setattr(ShardFile, "write", disk_full)
        checkpointer.save(1, {f"weight.{rank}": torch.ones(10)}, {})
        checkpointer.close()
    full = "OSError(28, 'No space left on device')"
    at_all = f"{first}: ranks 1-3: {full}; {second}: ranks 1-3: {full}"
    assert checkpointer.last_error == f"the checkpoint of step 1 was not saved: {at_all}"
    (said,) = logged.texts if rank < 4 else (*logged.texts, "")
    own = at_all if rank == 0 else f"{first}: rank {rank}: {full}; {second}: rank {rank}: {full}"
    assert (own in said) == (rank < 4)


def test_rank_0_logs_the_errors_of_all_ranks_once_and_the_others_their_own(tmp_path: Path) -> None:
    run_ranks(5, save_where_three_ranks_cannot, tmp_path / "store", tmp_path)


def test_an_error_after_publishing_is_not_a_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever retention stumbles over: the checkpoint is there."""

    def stumble(meta: dict[str, object]) -> bool:
        raise KeyError("progress")

    with process_group(tmp_path / "store"):
        checkpointer = Checkpointer(tmp_path / "checkpoints", Retention(1))
        checkpointer.save(1, {"weight": torch.ones(1)}, {}, protect=stumble)
        checkpointer.close()
    assert checkpointer.last_error is None
    assert checkpointer.last_saved is not None
    assert "the checkpoint of step 1 is saved, but" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_a_folder_that_became_read_only(tmp_path: Path) -> None:
    with process_group(tmp_path / "store"):
        folder = tmp_path / "checkpoints"
        checkpointer = Checkpointer(folder, Retention(1))
        folder.chmod(0o500)
        checkpointer.save(1, {"weight": torch.ones(1)}, {})
        checkpointer.close()
        assert "Permission denied" in (checkpointer.last_error or "")
        folder.chmod(0o700)


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with process_group(tmp_path / "store"):
        folder = tmp_path / "checkpoints"
        checkpointer = Checkpointer(folder, Retention(1))
        folder.rmdir()
        folder.write_text("not a folder")
        with caplog.at_level(logging.ERROR):
            checkpointer.save(1, {"weight": torch.ones(1)}, {})
            checkpointer.close()
        assert "step 1 was not saved" in caplog.text
        with pytest.raises(CheckpointError, match="change run_dir"):
            Checkpointer(folder, Retention(1))


def save_for_ever(folder: Path, store: Path, published: Any) -> None:
    """Resumes and saves as fast as it can; `published` follows the last step known to be on disk."""
    torch.set_num_threads(1)
    with process_group(store):
        checkpointer = Checkpointer(folder, Retention(1))
        last = publish.latest_checkpoint(folder)
        step = manifest.read_meta(last)["step"] if last else 0
        while True:
            step += 1
            checkpointer.save(step, {"weight": torch.full((50_000,), float(step))}, {"step": step})
            checkpointer.wait()
            assert checkpointer.last_error is None
            published.value = step


@pytest.mark.slow
def test_sigkill_at_any_moment_loses_no_published_checkpoint(tmp_path: Path) -> None:
    context = forked()
    folder, moments = tmp_path / "checkpoints", random.Random(0)
    published = context.Value("q", 0, lock=False)  # a process that is killed would keep the lock
    leftovers = 0
    for attempt in range(20):
        before = published.value
        process = context.Process(target=save_for_ever, args=(folder, tmp_path / f"store_{attempt}", published))
        process.start()
        while published.value == before:
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.join()

        leftovers += any(path.name.startswith(".tmp-step") for path in folder.iterdir())
        path = publish.latest_checkpoint(folder)
        assert path is not None
        manifest.verify_checkpoint(path)
        step = manifest.read_meta(path)["step"]
        assert step >= published.value
        weight = torch.zeros(50_000)
        load_checkpoint(path, {"weight": weight})
        assert torch.equal(weight, torch.full_like(weight, step))
    assert leftovers > 0, "no kill fell into a save: the test has lost its point"
