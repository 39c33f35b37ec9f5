"""Start of a run on the nodes of a Ray cluster, one task on each, which runs launch/multinode.sh.

    python -m moba_train.tools.launch.ray_nodes --nodes 4 --gpus 8 RECIPE [key.path=value ...]

It is the entry point of a Ray job: of the RayJob that `moba-train launch --k8s rayjob` prints, or of a job for a
cluster that is there (`ray job submit --working-dir . -- python -m ...`). Each task begins in the job's working folder,
which must be a checkout. A stopped job stops the ranks in order, with a checkpoint.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from moba_train.errors import LaunchError, UserError, print_error
from moba_train.tools.launch.job import STOP_S

WAIT_S = 600
"""Seconds until the cluster must have the nodes."""
_LAUNCHER = "launch/multinode.sh"


def main(arguments: list[str]) -> int:
    """Run until all nodes have ended. Returns 0, or the code of the first node that failed.

    Raises LaunchError if Ray is not installed or the cluster has too few nodes with the GPUs asked for.
    """
    parser = argparse.ArgumentParser(prog="python -m moba_train.tools.launch.ray_nodes")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the cluster")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs (ranks) of each")
    parser.add_argument("recipe", nargs=argparse.REMAINDER, help="of launch/multinode.sh: RECIPE [key.path=value ...]")
    given = parser.parse_args(arguments)
    try:
        import ray
    except ImportError:
        raise LaunchError("the package ray is not installed; pip install 'ray[default]'") from None
    ray.init(address="auto")
    bundles = [{"CPU": 1, "GPU": given.gpus}] * given.nodes
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(WAIT_S):
        there = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        raise LaunchError(
            f"--nodes, --gpus: given {given.nodes} and {given.gpus}; allowed: what the cluster has free within "
            f"{WAIT_S} s: its nodes have {', '.join(map(str, there))} GPUs"
        )

    def on_node(number: int, function: Any, *values: Any) -> Any:
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number)
        options = {"num_cpus": 1, "num_gpus": given.gpus, "max_retries": 0, "scheduling_strategy": where}
        return ray.remote(function).options(**options).remote(*values)

    master = ray.get(on_node(0, ray.util.get_node_ip_address))
    places = {"NODES": str(given.nodes), "MASTER": master, "GPUS": str(given.gpus)}
    runs = [
        on_node(number, run_node, places | {"NODE_RANK": str(number)}, given.recipe) for number in range(given.nodes)
    ]
    running = [*runs]

    def stop(*_: object) -> None:
        while running:  # each once: a second signal would end ranks that save
            ray.cancel(running.pop(), force=False)

    signal.signal(signal.SIGTERM, stop)
    waiting = runs
    code = 0
    while waiting and not code:
        (ended,), waiting = ray.wait(waiting)
        code = int(ray.get(ended))
    stop()
    if waiting:  # Ray kills the tasks when this process ends
        ray.wait(waiting, num_returns=len(waiting), timeout=STOP_S)
    return code


def run_node(places: dict[str, str], arguments: list[str]) -> int:
    """Run the launcher of one node in this process's folder, and return its exit code.

    Ray's cancellation is an interrupt: the ranks are asked to stop, and are waited for.
    """
    if not Path(_LAUNCHER).is_file():
        raise LaunchError(f"{Path.cwd()} has no {_LAUNCHER}; allowed: a checkout, by ray job submit --working-dir")
    process = subprocess.Popen(["bash", _LAUNCHER, *arguments], env=os.environ | places)
    while True:
        try:
            return process.wait(timeout=1)  # an interrupt is seen only between two waits
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:
            process.terminate()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print_error(error)
        sys.exit(error.exit_code)
