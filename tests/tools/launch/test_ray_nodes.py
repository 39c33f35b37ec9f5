"""Start of a run on the nodes of a Ray cluster: the task of one node, and with Ray itself, where it is installed, two
nodes that it simulates on this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moba_train.errors import LaunchError
from moba_train.tools.launch import ray_nodes

ROOT = Path(__file__).parents[3]
SAYS_ITS_PLACE = 'echo "$NODES $NODE_RANK $GPUS $1 $2" >"place$NODE_RANK"; [ -n "$MASTER" ]\n'
STOPS_IN_ORDER = """
trap 'sleep $NODE_RANK; echo saved >"stopped$NODE_RANK"; exit 143' TERM
touch "started$NODE_RANK"
for _ in $(seq 300); do sleep 0.1; done
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an empty launcher, in which this process and its children work."""
    (tmp_path / "launch").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "launch" / "multinode.sh"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def test_a_node_runs_the_launcher_with_its_place_and_ends_with_its_code(checkout: Path) -> None:
    checkout.write_text(SAYS_ITS_PLACE + "exit 65\n")
    places = {"NODES": "2", "NODE_RANK": "1", "MASTER": "10.0.0.4", "GPUS": "8"}
    assert ray_nodes.run_node(places, ["recipe", "a=two words"]) == 65
    assert Path("place1").read_text() == "2 1 8 recipe a=two words\n"


def test_an_interrupt_asks_the_ranks_to_stop_and_waits_for_them(checkout: Path) -> None:
    checkout.write_text(STOPS_IN_ORDER)

    def interrupt() -> None:
        wait_for(Path("started0"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert ray_nodes.run_node({"NODE_RANK": "0"}, ["recipe"]) == 143
    thread.join()
    assert Path("stopped0").read_text() == "saved\n"


def test_a_folder_without_the_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"has no launch/multinode\.sh; allowed: a checkout, by ray job submit"):
        ray_nodes.run_node({}, ["recipe"])


class TestWithRay:
    """On two nodes with a GPU each, as Ray counts them; they need not be there."""

    @pytest.fixture(autouse=True)
    def cluster(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        pytest.importorskip("ray", reason="needs ray")
        from ray.cluster_utils import Cluster

        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1})
        cluster.add_node(num_cpus=2, num_gpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield
        cluster.shutdown()

    def start(self, nodes: int) -> "subprocess.Popen[str]":
        patch = "import sys; from moba_train.tools.launch import ray_nodes; ray_nodes.WAIT_S = 20; "
        patch += "sys.exit(ray_nodes.main(sys.argv[1:]))"
        command = [sys.executable, "-c", patch, "--nodes", str(nodes), "--gpus", "1", "recipe", "a=two words"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def test_each_node_runs_the_launcher(self, checkout: Path) -> None:
        checkout.write_text(SAYS_ITS_PLACE)
        process = self.start(2)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        for node in (0, 1):
            assert Path(f"place{node}").read_text() == f"2 {node} 1 recipe a=two words\n"

    def test_a_stopped_job_stops_all_nodes_in_order(self, checkout: Path) -> None:
        checkout.write_text(STOPS_IN_ORDER)
        process = self.start(2)
        for node in (0, 1):
            wait_for(Path(f"started{node}"))
        process.terminate()
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 143, said
        assert Path("stopped0").is_file()
        assert Path("stopped1").is_file()

    def test_a_cluster_with_too_few_nodes_is_named(self) -> None:
        said, _ = self.start(3).communicate(timeout=120)
        assert "given 3 and 1; allowed: what the cluster has free within 20 s: its nodes have 1, 1 GPUs" in said
