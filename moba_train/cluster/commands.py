"""The command lines that start a job with torchrun and with Slurm."""

import shlex
from collections.abc import Sequence

from moba_train.cluster.job import STOP_S, Job


def torchrun_lines(job: Job, master: str) -> list[list[str]]:
    """One command for each node; `master`: host name of the first. On a single node `moba-train train`."""
    arguments = [str(job.recipe), *job.overrides]
    if job.nodes == 1:
        return [["moba-train", "train", *arguments, "--gpus", str(job.gpus_per_node)]]
    return [
        [
            "env",
            f"NODES={job.nodes}",
            f"NODE_RANK={node}",
            f"MASTER={master}",
            f"GPUS={job.gpus_per_node}",
            "bash",
            "launch/multinode.sh",
            *arguments,
        ]
        for node in range(job.nodes)
    ]


def slurm_line(job: Job, time_limit: str | None) -> list[str]:
    """The command that submits the job; `time_limit`: as sbatch takes it, None: the partition's."""
    limit = [] if time_limit is None else ["--time", time_limit]
    signal = [] if job.stop_s == STOP_S else [f"--signal=B:USR1@{job.stop_s}"]
    return [
        "sbatch",
        "--job-name",
        job.name,
        "--nodes",
        str(job.nodes),
        "--gpus-per-node",
        str(job.gpus_per_node),
        *limit,
        *signal,
        "launch/slurm.sbatch",
        str(job.recipe),
        *job.overrides,
    ]


def shell(command: Sequence[str]) -> str:
    """The command as a shell takes it."""
    return shlex.join(command).removeprefix("env ")
