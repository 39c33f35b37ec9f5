"""A training job as every scheduler needs it."""

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moba_train.errors import LaunchError

STOP_S = 600
"""Seconds between the scheduler's signal and the end; the log of a run says how many it needs (docs/durability.md)."""
IMAGE_FOLDER = PurePosixPath("/opt/moba_train")
"""Where docker/Dockerfile puts the repository; relative paths of a recipe begin there."""
RECIPE_FOLDER = PurePosixPath("/etc/moba_train")
"""Where pods find their recipe."""
SHARED_MEMORY = PurePosixPath("/dev/shm")
"""Where NCCL's memory that ranks of a pod share is mounted."""
MAX_NAME = 40
"""Characters of a job's name: those of its pods, with suffixes, must stay below 63."""


@dataclass(frozen=True)
class Job:
    """What runs, and on how many GPUs."""

    name: str
    """Lower-case letters, digits and hyphens."""
    recipe: Path
    overrides: tuple[str, ...]
    resolved: str
    """The recipe with all that it extends, the overrides and the defaults, as YAML."""
    nodes: int
    gpus_per_node: int
    stop_s: int = STOP_S


@dataclass(frozen=True)
class Pods:
    """What Kubernetes needs besides."""

    image: str
    claim: str
    """Name of a PersistentVolumeClaim that all nodes can write: data and checkpoints."""
    mount: PurePosixPath
    """Where the pods see it."""
    restarts: int = 3
    """Starts after failures; each continues from the newest checkpoint."""


def job_name(text: str) -> str:
    """`text` as the name of a job. Raises LaunchError where nothing of it can be used."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME].strip("-")
    if not name or not name[0].isalpha():
        raise LaunchError(f"name: given {text!r}; allowed for a job: a letter, then letters, digits and hyphens")
    return name


def volume(text: str) -> tuple[str, PurePosixPath]:
    """CLAIM:PATH as (claim, path). Raises LaunchError."""
    claim, colon, path = text.partition(":")
    if not (claim and colon and path.startswith("/") and path != "/"):
        raise LaunchError(f"--claim: given {text!r}; allowed: NAME:PATH, such as training:/data, with an absolute path")
    mount = PurePosixPath(posixpath.normpath(path))
    for needed in (IMAGE_FOLDER, RECIPE_FOLDER, SHARED_MEMORY):
        if needed.is_relative_to(mount):
            raise LaunchError(
                f"--claim: given {text!r}: a volume there hides {needed}, which the pods need; allowed: another path, "
                f"such as {claim}:/data"
            )
    return claim, mount
