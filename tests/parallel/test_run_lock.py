"""Two runs never share a folder."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moba_train.errors import LaunchError
from moba_train.parallel.run_lock import run_folder_lock
from moba_train.parallel.world import World

HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "a+")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def world(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), 1, timedelta(minutes=1), dist.HashStore())
    dist.destroy_process_group()


def test_a_second_run_waits_and_is_then_refused_until_the_first_has_ended(tmp_path: Path, world: World) -> None:
    run_dir = tmp_path / "run"
    with run_folder_lock(run_dir, world):
        holder = (run_dir / "lock").read_text()
    assert holder.startswith("process ")
    command = [sys.executable, "-S", "-c", HOLD, str(run_dir / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(LaunchError, match=rf"{holder.strip()} trains in it.*set run_dir to a new folder"),
            run_folder_lock(run_dir, world, wait_s=0.3),
        ):
            pass
        first.kill()
        with run_folder_lock(run_dir, world, wait_s=5):
            pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, world: World) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(LaunchError, match=r"run_dir .*file/run cannot be used"),
        run_folder_lock(tmp_path / "file" / "run", world),
    ):
        pass
