"""A rank that stalls or dies ends the run, soon, and the message says which one it was."""

import contextlib
import logging
import os
import pickle
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.checkpoint import checkpointer as checkpointer_module
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.writer import ShardWriter
from moba_train.health import watch
from moba_train.parallel.world import joined_world
from moba_train.run import trainer
from moba_train.run.trainer import Trainer
from moba_train.train import main
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks

TIMEOUT_S = 15


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the running ranks that a torchrun process started, in the order of ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [child for child in map(int, children) if is_running(child)]


def is_running(process: int) -> bool:
    """True if the process exists and is no zombie."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def disturb(run: Run, what: signal.Signals, gpu: bool = False) -> tuple[float, int, str, float]:
    """Send `what` to rank 1 of two that share a sequence: when, exit code, output, seconds until the end."""
    run.recipe["stages"][1]["tokens"] = "10M"
    run.recipe["parallel"] = {"cp": 2, "cp_transport": "ring", "timeout": TIMEOUT_S}
    run.recipe["checkpoint"]["every"] = 1_000_000  # a save that is under way is given up after timeouts of its own
    launcher = run.start_on_gpu(2) if gpu else run.start(2)
    try:
        deadline = time.monotonic() + 90
        while not (path := run.run_dir / "metrics.jsonl").exists() or len(path.read_text().splitlines()) < 12:
            assert time.monotonic() < deadline, "no training in 90 s"
            assert launcher.poll() is None, launcher.communicate()[0]
            time.sleep(0.1)
        time.sleep(1)  # each rank has given a sign of life
        waiting, victim = ranks_of(launcher.pid)
        began, at = time.monotonic(), time.time()
        os.kill(victim, what)
        while is_running(waiting):
            if time.monotonic() - began > 60:
                os.kill(waiting, signal.SIGABRT)  # Python's fault handler then tells where it is
                time.sleep(1)
                os.kill(victim, signal.SIGKILL)  # it holds the pipe open
                launcher.kill()
                pytest.fail(f"rank 0 waits on: {launcher.communicate()[0][-5000:]}")
            time.sleep(0.05)
        taken = time.monotonic() - began
        if what == signal.SIGSTOP:
            os.kill(victim, signal.SIGKILL)
        output, _ = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode is not None
    return at, launcher.returncode, output, taken


def check_stall(run: Run, stopped_at: float) -> None:
    """Rank 1 is named within one timeout, and what rank 0 waits in can be read."""
    (stall,) = run.records("stall")
    assert stall["time"] - stopped_at < TIMEOUT_S
    assert "rank 1 of 2 stalls in" in stall["message"]
    assert "no heartbeat" in stall["message"]
    record = run.run_dir / "stalls" / "nccl_trace_rank_0"
    assert str(record)[:-1] in stall["message"]
    assert pickle.loads(record.read_bytes())["entries"], "the last collectives of rank 0"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_stalled_gpu_is_named_before_nccl_ends_the_run(run: Run) -> None:
    stopped_at, code, _, _ = disturb(run, signal.SIGSTOP, gpu=True)
    assert code != 0
    check_stall(run, stopped_at)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL])
def test_the_rank_that_stalls_or_dies_is_named(run: Run, what: signal.Signals) -> None:
    stopped_at, code, output, taken = disturb(run, what)
    assert code != 0
    assert taken < TIMEOUT_S + 20
    if what == signal.SIGSTOP:
        assert "no answer from rank 1" in output, output[-3000:]
        assert "rank 0 gave up" in output, output[-3000:]
        assert "in step" in output, output[-3000:]
        assert "rank 1 was last seen in" in output, output[-3000:]
        check_stall(run, stopped_at)
    else:
        assert "rank: 1" in output or "rank      : 1" in output, output[-3000:]  # torchrun's report


def waiting_for_a_file_server() -> None:
    time.sleep(4)


def train_with_a_sleep(recipe: str, output: str) -> int:
    """Rank 1 sleeps in its sixth step. What is logged goes to the file `output` and the rank's number."""
    forward_and_backward = Trainer._forward_and_backward

    def slow(self: Trainer, *arguments: Any) -> Any:
        if self.world.rank == 1 and self.progress.step == 6:
            waiting_for_a_file_server()
        return forward_and_backward(self, *arguments)

    with pytest.MonkeyPatch.context() as patched, open(f"{output}.{os.environ['RANK']}", "w") as file:
        patched.setattr(Trainer, "_forward_and_backward", slow)
        patched.setattr(watch, "LEAST_S", 1.5)
        patched.setattr(watch, "FACTOR", 3)
        patched.setattr(trainer, "COMPARE_EVERY", 2)
        handler = logging.StreamHandler(file)
        logging.getLogger().addHandler(handler)
        try:
            return main([recipe])
        finally:
            logging.getLogger().removeHandler(handler)


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_with_its_stack_and_the_run_goes_on(run: Run, ranks: Ranks) -> None:
    """Longer than the watch's limit, shorter than the collectives' timeout."""
    run.recipe["stages"] = run.recipe["stages"][:1]
    run.recipe["parallel"] = {"timeout": 60}
    output = run.folder / "log"
    ranks.work(train_with_a_sleep, [str(run.write_recipe()), str(output)], 2)
    (stall,) = run.records("stall")
    assert "rank 1 of 2 stalls in 'forward and backward' after step 5" in stall["message"]
    assert "in waiting_for_a_file_server" in stall["message"]
    assert stall["message"] in "".join(path.read_text() for path in run.folder.glob("log.*"))
    assert [alert["alert"] for alert in run.records("alert")] == ["stall"]

    metrics = run.records()
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    compared = [record for record in metrics if "straggler_step" in record]
    assert [record["step"] for record in compared] == [2, 4, 6]
    for record in compared:
        assert 0 < record["attention_s"] < record["step_s"]
        assert 1 <= record["straggler_attention"] <= 2
        assert record["straggler_attention_rank"] in (0, 1)


def save_twice(folder: Path) -> None:
    """Rank 1 hangs in the first save, until rank 0 has given up the run."""

    def hang(*arguments: Any) -> dict[str, Any]:
        while not (folder / "given up").exists():
            time.sleep(0.05)
        return {}

    with pytest.MonkeyPatch.context() as patch, joined_world(timedelta(seconds=TIMEOUT_S)) as world:
        patch.setattr(checkpointer_module, "RANKS_APART", timedelta(seconds=5))
        checkpointer = Checkpointer(folder / "checkpoints", Retention(1))
        if world.rank == 1:
            patch.setattr(ShardWriter, "write", hang)
        checkpointer.save(1, {"weight": torch.ones(10)}, {})
        checkpointer.wait()
        assert "step 1 was not saved" in (checkpointer.last_error or "")
        checkpointer.save(2, {"weight": torch.ones(10)}, {})


def save_while_a_disk_hangs(folder: Path) -> None:
    """Rank 0 says for whom it has waited."""
    with pytest.raises(RuntimeError) as ended:
        save_twice(folder)
    if os.environ["RANK"] == "0":
        (folder / "given up").touch()
        assert any("no answer from rank 1" in note for note in ended.value.__notes__), ended.value.__notes__


@pytest.mark.slow
def test_a_rank_whose_disk_hangs_beyond_the_next_save_is_named(tmp_path: Path, ranks: Ranks) -> None:
    ranks.work(save_while_a_disk_hangs, [tmp_path], 2)


def train_where_rank_1_misses_how_saves_end(recipe: str) -> int:
    """On rank 1 every save fails after it is published, as when the last answer of the other ranks is lost."""
    write = Checkpointer._write

    def miss_the_end(self: Checkpointer, step: int, *arguments: Any) -> None:
        write(self, step, *arguments)
        self._count_failure(step, RuntimeError("connection closed by peer"))

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(Checkpointer, "_write", miss_the_end)
        return main([recipe])


def test_a_rank_that_misses_how_saves_end_neither_stops_nor_fails_the_run(run: Run, ranks: Ranks) -> None:
    """Not after the last save either, and on both ranks."""
    run.recipe["checkpoint"] = {"every": 4, "max_failures": 1}
    ranks.work(train_where_rank_1_misses_how_saves_end, [str(run.write_recipe())], 2)
    assert len(run.losses()) == 12
    assert run.newest_checkpoint.name == "step_00000012"
