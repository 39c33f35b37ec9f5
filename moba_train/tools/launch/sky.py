"""A training job as a task of SkyPilot, which rents machines and starts the job on them (`sky jobs launch FILE`).

SkyPilot copies the working folder to every machine, which must be a checkout, and tells each its number and the
addresses of all. `launch/multinode.sh` does the rest.
"""

import re
import shlex

from moba_train.errors import LaunchError
from moba_train.resolve.run import ResolvedRun
from moba_train.tools.launch.job import Job
from moba_train.tools.launch.kubernetes import as_yaml
from moba_train.tools.storage.remote import SCHEMES

_ACCELERATOR = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")

_ON_EACH_NODE = (
    'NODES=$SKYPILOT_NUM_NODES NODE_RANK=$SKYPILOT_NODE_RANK MASTER=$(head -n 1 <<<"$SKYPILOT_NODE_IPS") '
    "GPUS=$SKYPILOT_NUM_GPUS_PER_NODE exec bash launch/multinode.sh"
)


def task_yaml(job: Job, run: ResolvedRun, accelerator: str) -> str:
    """The task's file. accelerator: SkyPilot's name of the GPU, such as H100.

    Raises LaunchError for a name that none can have.
    """
    if not _ACCELERATOR.fullmatch(accelerator):
        raise LaunchError(f"--sky: given {accelerator!r}; allowed: SkyPilot's name of a GPU, such as H100")
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": {"accelerators": {accelerator: job.gpus_per_node}},
        "setup": f"FOR=run bash -c {shlex.quote(_setup(run))}\n",
        "run": f"{_ON_EACH_NODE} {shlex.join([str(job.recipe), *job.overrides])}\n",
    }
    return "".join(f"# {note}\n" for note in _notes(job, run)) + as_yaml([task])


def _setup(run: ResolvedRun) -> str:
    """Commands that install what the run needs on each machine."""
    schemes = {address.partition("://")[0] for address in _addresses(run).values()}
    packages = [SCHEMES[scheme] for scheme in sorted(schemes & SCHEMES.keys())]
    more = f'; "$PYTHON" -m pip install --quiet {shlex.join(packages)}' if packages else ""
    return f"source launch/setup.sh{more}"


def _addresses(run: ResolvedRun) -> dict[str, str]:
    """Values of `init_from` and of the section `checkpoint` that may be addresses, by key."""
    stores = {name: str(getattr(setting, "address", "")) for name, _, setting in run.checkpoint.asked_for()}
    return stores | {"init_from": run.init_from or ""}


def _notes(job: Job, run: ResolvedRun) -> list[str]:
    """Lines about the start, and about what the machines must have in addition."""
    notes = ["sky jobs launch FILE starts it, on new machines again after each that is taken away."]
    addresses = _addresses(run)
    if any(address.startswith("s3:") for address in addresses.values()):
        notes.append(
            "Credentials of the store: sky jobs launch --secret AWS_ACCESS_KEY_ID --secret AWS_SECRET_ACCESS_KEY."
        )
    if all(name in ("init_from", "resume_from") or where.startswith("file:") for name, where in addresses.items()):
        notes.append("Disks go with their machines: set checkpoint.upload, or mount run_dir by file_mounts or volumes.")
    if job.nodes > 1:
        notes.append(f"All nodes must see the data and {run.folders.run}: mount them by file_mounts or volumes.")
    return notes
