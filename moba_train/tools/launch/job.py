"""A training job, and the command lines that start it with torchrun and with Slurm."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path

from moba_train.errors import LaunchError

STOP_S = 600
"""Seconds between the scheduler's signal and the end; a run's log says how many it needs (docs/how-to/resume.md)."""
MAX_NAME = 40
"""Characters of a job's name: those of its pods, with suffixes, must stay below 63."""
MAX_STOP_S = 65_535
"""The most seconds that sbatch takes for a signal before the time limit."""
_HOST = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
"""A host name or an IPv4 address."""
_ZONE = re.compile("[A-Za-z0-9._-]+")
"""The zone of an IPv6 address, behind its %."""
_TIME = re.compile(
    "(?:(?P<days>[0-9]{1,9})-)?(?P<first>[0-9]{1,9})(?::(?P<second>[0-9]{1,9}))?(?::(?P<third>[0-9]{1,9}))?"
)


@dataclass(frozen=True)
class Job:
    """A recipe on a number of GPUs."""

    name: str
    """Lower-case letters, digits and hyphens."""
    recipe: Path
    overrides: tuple[str, ...]
    resolved: str
    """The recipe with all that it extends, the overrides and the defaults, as YAML."""
    nodes: int
    gpus_per_node: int
    stop_s: int = STOP_S


def job_name(text: str) -> str:
    """`text` as the name of a job. Raises LaunchError if nothing of it can be used."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME].strip("-")
    if not name or not name[0].isalpha():
        raise LaunchError(f"name: given {text!r}; allowed for a job: a letter, then letters, digits and hyphens")
    return name


def host_name(text: str) -> str:
    """`text` as the host name of the first node. Raises LaunchError if it cannot be one."""
    if not (_HOST.fullmatch(text) or _is_ipv6(text)):
        raise LaunchError(f"--master: given {text!r}; allowed: a host name or an IP address")
    return text


def _is_ipv6(text: str) -> bool:
    """True if `text` is an IPv6 address, with its zone or without."""
    try:
        zone = IPv6Address(text).scope_id
    except AddressValueError:
        return False
    return zone is None or _ZONE.fullmatch(zone) is not None


def time_limit(text: str, stop_s: int) -> str:
    """`text` as a time limit of sbatch.

    Raises LaunchError if sbatch would refuse it, and if the run would be asked to stop as soon as it starts, because
    the limit is no longer than `stop_s`, the seconds to stop in.
    """
    if text.upper() in ("INFINITE", "UNLIMITED"):
        return text
    parts = _TIME.fullmatch(text)
    if not parts:
        raise LaunchError(
            f"--time: given {text!r}; allowed: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, "
            "DAYS-HOURS:MINUTES, DAYS-HOURS:MINUTES:SECONDS or UNLIMITED"
        )
    first, second, third = (int(parts[name] or 0) for name in ("first", "second", "third"))
    if parts["days"] or parts["third"]:
        seconds = 86_400 * int(parts["days"] or 0) + 3600 * first + 60 * second + third
    else:
        seconds = 60 * first + second
    if 0 < seconds <= stop_s:  # 0 means no limit
        raise LaunchError(
            f"--time: given {text}, which is {seconds} s: the run is asked to stop {stop_s} s before the limit, so at "
            "once; allowed: a longer limit, or a smaller --stop-seconds"
        )
    return text


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
