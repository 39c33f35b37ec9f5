"""A Slurm cluster of two hosts on this machine, with Debian's packages slurm-wlm and munge, for those who are root."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.run.two_hosts import TwoHosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

CONFIGURATION = """
ClusterName=moba
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
GresTypes=gpu
NodeName=node[0-1] CPUs={cpus} Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=node[0-1] Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Two nodes, each with what Slurm takes for a GPU; the controller runs on node0."""

    def __init__(self, folder: Path, hosts: TwoHosts) -> None:
        self.folder = folder
        self.hosts = hosts
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and wait until both nodes are idle."""
        for name in ("munge", "state", "spool-node0", "spool-node1", "cgroup"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, cpus=os.cpu_count()))
        (self.folder / "gres.conf").write_text("NodeName=node[0-1] Name=gpu Count=1 File=/dev/null\n")
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.folder}/cgroup\n")
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        places = [f"--{name}={munge / name.partition('-')[0]}" for name in ("key-file", "socket", "pid-file")]
        subprocess.run(
            ["munged", "--force", *places, f"--log-file={munge}/log", f"--seed-file={munge}/seed"], check=True
        )
        self.run(0, "slurmctld")
        for number in (0, 1):
            self.start_node(number)
        self.wait(lambda: self.run(0, "sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], 30, "both nodes idle")

    def start_node(self, number: int) -> None:
        """Start a node's daemon."""
        self.run(number, "slurmd", "-N", f"node{number}")

    def kill_node(self, number: int) -> None:
        """End every process of a node at once, as a loss of power does. node0 has the controller, too."""
        for process in self.hosts.processes(number):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def run(self, number: int, *command: str, **variables: str) -> str:
        """Run a command on a node and return what it prints."""
        done = subprocess.run(
            self.hosts.on(number, command),
            env=self.environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        text = self.run(0, "scontrol", "show", "job", number, "--oneliner")
        return dict(entry.partition("=")[::2] for entry in text.split())

    def wait(self, until: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until something is true, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
            time.sleep(0.5)

    def stop(self) -> None:
        """End the cluster."""
        for number in (1, 0):
            self.kill_node(number)
        with suppress(OSError, ValueError):
            os.kill(int((self.folder / "munge" / "pid").read_text()), signal.SIGTERM)


def missing_programs() -> list[str]:
    """What must be installed before there can be a cluster."""
    return [program for program in PROGRAMS if shutil.which(program) is None]
