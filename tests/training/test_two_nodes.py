"""Training on two nodes, each with a launcher and two ranks of its own, a sequence over all four.

On the CPU they are network namespaces with addresses and host names, and one cable between them, for which it takes
root. On GPUs each node has the same two (or the one there is, for one rank a node), and NCCL takes them for different
hosts that only sockets connect.

Takes minutes: MOBA_NODES=1 python -m pytest tests/training/test_two_nodes.py
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tiny_run import Run, assert_like_one_gpu, assert_same_tensors, curves
from trainer_ranks import Ranks, free_port

from moba_train.checkpoint.publish import latest_checkpoint

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif("MOBA_NODES" not in os.environ, reason="MOBA_NODES=1 asks for it")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def launched(command: list[str], node: int, ranks: int = 2, **variables: str) -> subprocess.Popen[str]:
    """`launch/multinode.sh`, or what ends in it, as a user gives it on that node for so many ranks."""
    places = {"NODES": "2", "NODE_RANK": str(node), "GPUS": str(ranks), "RESTARTS": "3"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | places | {"MOBA_PYTHON": sys.executable} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


class Nodes:
    """Two hosts, node0 and node1, with two ranks each, that share the file system."""

    def __init__(self) -> None:
        self.names = [f"moba{os.getpid()}-{number}" for number in (0, 1)]

    def plug_in(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ends = [f"mt{os.getpid()}{letter}" for letter in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(self.names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.213.77.{number + 1}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", name, "link", "set", device, "up")
            hosts = Path("/etc/netns", name, "hosts")  # `ip netns exec` puts it in the place of /etc/hosts
            hosts.parent.mkdir(parents=True)
            hosts.write_text("127.0.0.1 localhost\n10.213.77.1 node0\n10.213.77.2 node1\n")

    def unplug(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError, OSError):
                ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def launch(self, number: int, recipe: Path) -> subprocess.Popen[str]:
        """On that node, on the CPU."""
        inside = ["ip", "netns", "exec", self.names[number], "unshare", "--uts"]
        with_name = f"hostname node{number} && exec bash launch/multinode.sh {recipe}"
        return launched([*inside, "bash", "-c", with_name], number, MASTER="node0", CUDA_VISIBLE_DEVICES="")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
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


def finish(run: Run, launchers: list[subprocess.Popen[str]], kill: int | None = None) -> None:
    """Wait for the end of training. Once there is a checkpoint, SIGKILL that rank of the second node."""
    try:
        if kill is not None:
            deadline = time.monotonic() + 180
            while latest_checkpoint(run.run_dir / "checkpoints") is None:
                assert time.monotonic() < deadline, "no checkpoint in 180 s"
                assert all(launcher.poll() is None for launcher in launchers)
                time.sleep(0.05)
            os.kill(rank_of(launchers[1], kill), signal.SIGKILL)
        outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)[-6000:]


def over_both_nodes(run: Run, **other: object) -> Run:
    """Heads exchanged inside a node and keys between them."""
    run.recipe["parallel"] = {"cp": 4, "cp_transport": "hierarchical", "timeout": 15, **other}
    run.recipe["checkpoint"]["every"] = 2
    run.recipe["stages"][1]["tokens"] = "20K"
    return run


def assert_ended_alike(run: Run, undisturbed: Run) -> None:
    assert len(run.records("resume")) == 1
    losses = {record["step"]: record["loss"] for record in run.records()}
    assert list(losses.values()) == undisturbed.losses()
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)


@pytest.fixture
def undisturbed(tmp_path: Path, corpora: Path) -> Run:
    (tmp_path / "undisturbed").mkdir()
    return Run(tmp_path / "undisturbed", corpora)


def test_two_nodes_train_as_one_and_go_on_after_one_lost_a_rank(
    run: Run, undisturbed: Run, nodes: Nodes, ranks: Ranks
) -> None:
    ranks.train(over_both_nodes(undisturbed), 4, per_node=2)
    recipe = over_both_nodes(run).write_recipe()
    finish(run, [nodes.launch(number, recipe) for number in (0, 1)], kill=3)
    assert_ended_alike(run, undisturbed)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_gpus_pass_for_those_of_two_nodes(run: Run, undisturbed: Run, tmp_path: Path, corpora: Path) -> None:
    """NCCL, bf16; head width 64, so that the kernels of real training run. A GPU's two ranks take turns on it."""
    (tmp_path / "alone").mkdir()
    alone, per_node = Run(tmp_path / "alone", corpora), min(2, torch.cuda.device_count())
    one_each = {"cp": 2, "cp_transport": "allgather"} if per_node == 1 else {}
    for one in (run, undisturbed, alone):
        over_both_nodes(one, timeout=60, **one_each).recipe["model"] |= {"hidden_size": 256}
        one.recipe["deterministic"] = True

    def launch(one: Run) -> list[subprocess.Popen[str]]:
        command, port = ["bash", "launch/multinode.sh", str(one.write_recipe())], str(free_port())
        return [launched(command, node, per_node, PORT=port, NCCL_HOSTID=f"node{node}") for node in (0, 1)]

    finish(undisturbed, launch(undisturbed))
    finish(run, launch(run), kill=2 * per_node - 1)
    assert_ended_alike(run, undisturbed)
    del alone.recipe["parallel"]
    code, output = alone.train(1, gpu=True)
    assert code == 0, output
    assert_like_one_gpu(curves(undisturbed), curves(alone))
