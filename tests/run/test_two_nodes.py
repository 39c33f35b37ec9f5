"""Training on two nodes: network namespaces with addresses, host names and launchers of their own, and one cable.

Takes two minutes and root: MOBA_NODES=1 python -m pytest tests/run/test_two_nodes.py
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moba_train.checkpoint.publish import latest_checkpoint
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks
from tests.run.two_hosts import TwoHosts

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif("MOBA_NODES" not in os.environ, reason="MOBA_NODES=1 asks for it")


def launch(hosts: TwoHosts, number: int, recipe: Path) -> subprocess.Popen[str]:
    """`launch/multinode.sh` as a user gives it on that host, two ranks on the CPU."""
    places = {"NODES": "2", "NODE_RANK": str(number), "MASTER": "node0", "GPUS": "2", "RESTARTS": "3"}
    return subprocess.Popen(
        hosts.on(number, ["bash", "launch/multinode.sh", str(recipe)]),
        cwd=ROOT,
        env=os.environ | places | {"MOBA_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    made = TwoHosts()
    try:
        made.plug_in()
    except (subprocess.CalledProcessError, OSError) as error:
        made.unplug()
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.unplug()


def rank_of(launcher: subprocess.Popen[str], rank: int) -> int:
    """Process id of a rank below the launcher, which has become torchrun."""
    for child in map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()):
        with suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
    raise AssertionError(f"rank {rank} does not run")


def test_two_nodes_train_as_one_and_go_on_after_one_lost_a_rank(
    run: Run, corpora: Path, tmp_path: Path, hosts: TwoHosts, ranks: Ranks
) -> None:
    """A sequence over all four ranks, heads exchanged inside a node and keys between them."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Run(tmp_path / "undisturbed", corpora)
    for one in (run, undisturbed):
        one.recipe["parallel"] = {"cp": 4, "cp_transport": "hierarchical", "timeout": 15}
        one.recipe["checkpoint"]["every"] = 2
        one.recipe["stages"][1]["tokens"] = "20K"
    ranks.train(undisturbed, 4, per_node=2)

    launchers = [launch(hosts, number, run.write_recipe()) for number in (0, 1)]
    try:
        deadline = time.monotonic() + 120
        while latest_checkpoint(run.run_dir / "checkpoints") is None:
            assert time.monotonic() < deadline, "no checkpoint in 120 s"
            assert all(launcher.poll() is None for launcher in launchers)
            time.sleep(0.05)
        os.kill(rank_of(launchers[1], 3), signal.SIGKILL)
        outputs = [launcher.communicate(timeout=150)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)[-6000:]
    assert len(run.records("resume")) == 1
    losses = {record["step"]: record["loss"] for record in run.records()}
    assert list(losses.values()) == undisturbed.losses()
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)
