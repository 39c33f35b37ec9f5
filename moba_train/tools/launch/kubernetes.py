"""Manifests for Kubernetes: a JobSet, a TrainJob of Kubeflow Trainer or a RayJob, each with its recipe in a ConfigMap.

A JobSet (jobset.x-k8s.io/v1alpha2) needs nothing but the JobSet controller: its pods are one Indexed Job with stable
host names, and launch/multinode.sh runs in each. A TrainJob (trainer.kubeflow.org/v1alpha1) takes the cluster's runtime
for torch, which gives torchrun its addresses in variables PET_*. A RayJob (ray.io/v1, of KubeRay) makes a Ray cluster
of its own, whose head trains as well; `ray_nodes` runs launch/multinode.sh on each of its nodes.
"""

import posixpath
import re
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from moba_train.config.load import Dumper
from moba_train.errors import LaunchError, ReproducibleFaultError, UserError
from moba_train.resolve.run import ResolvedRun
from moba_train.run.stop import STOPPED_CODE
from moba_train.tools.launch.job import Job

Manifest = dict[str, Any]

RECIPE_FILE = "recipe.yaml"
NODES = "node"
"""Name of the replicated job and of its container; torch runtimes of Kubeflow Trainer have the same."""
PORT = "29500"
HOPELESS = [UserError.exit_code, ReproducibleFaultError.exit_code]
"""Exit codes after which another start ends alike: a refused recipe, a fault that repeats anywhere."""
STOPPED = {"name": STOPPED_CODE, "value": str(128 + signal.SIGTERM)}
"""A pod that Kubernetes has stopped to use its node otherwise has saved, and is not complete."""
TORCH_RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Kubeflow Trainer installs for torch."""
IMAGE_FOLDER = PurePosixPath("/opt/moba_train")
"""Folder of the repository in the image of docker/Dockerfile; relative paths of a recipe begin there."""
RECIPE_FOLDER = PurePosixPath("/etc/moba_train")
"""Folder of the recipe in the pods."""
SHARED_MEMORY = PurePosixPath("/dev/shm")
"""Mount of the memory that NCCL shares among the ranks of a pod."""
_LABEL = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_CLAIM = re.compile(rf"{_LABEL}(?:[.]{_LABEL})*")
_REGISTRY = r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:.]+\])(?::[0-9]+)?"
_REPOSITORY = "[a-z0-9]+(?:(?:[.]|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    f"(?:{_REGISTRY}/)?{_REPOSITORY}(?:/{_REPOSITORY})*"
    "(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z0-9+._-]+:[0-9a-fA-F]{32,})?"
)
"""[REGISTRY/]REPOSITORY[:TAG][@DIGEST], as container runtimes take it."""


@dataclass(frozen=True)
class Pods:
    """The containers of a job, and the volume that they share."""

    image: str
    claim: str
    """Name of a PersistentVolumeClaim that all nodes can write: data and checkpoints."""
    mount: PurePosixPath
    """Path of the claim in the pods."""
    restarts: int = 3
    """Starts after failures; each continues from the newest checkpoint."""


def make_pods(run: ResolvedRun, image: str | None, claim: str | None, restarts: int) -> Pods:
    """The pods of a run. Prints a warning for each file that is not on their volume. Raises LaunchError."""
    missing = [option for option, given in (("--image", image), ("--claim", claim)) if not given]
    if not image or not claim:
        raise LaunchError(f"--k8s needs {' and '.join(missing)}")
    claim_name, mount = volume(claim)
    run_dir = PurePosixPath(posixpath.normpath(IMAGE_FOLDER / run.folders.run))
    if mount not in run_dir.parents:
        raise LaunchError(
            f"run_dir: given {str(run.folders.run)!r}, in the pods {run_dir}, which is not on the volume at {mount}: "
            f"checkpoints would end with the pods; allowed: a folder below it, such as run_dir={mount / run_dir.name}"
        )
    image = image_name(image)
    for path, key in _files_read(run).items():
        in_pods = PurePosixPath(posixpath.normpath(IMAGE_FOLDER / path))
        if mount not in in_pods.parents:
            print(
                f"warning: {key}: {path!r} is {in_pods} in the pods, which is not on the volume at {mount}: pods find "
                f"it only if the image has it; otherwise put it on the volume, and give its path below {mount}",
                file=sys.stderr,
            )
    return Pods(image, claim_name, mount, restarts)


def image_name(text: str) -> str:
    """`text` as the image of a container. Raises LaunchError if Kubernetes could not pull it."""
    if not _IMAGE.fullmatch(text):
        raise LaunchError(
            f"--image: given {text!r}; allowed: [REGISTRY/]REPOSITORY[:TAG][@DIGEST], such as my.registry/moba_train:1"
        )
    return text


def volume(text: str) -> tuple[str, PurePosixPath]:
    """CLAIM:PATH as (claim, path). Raises LaunchError."""
    claim, _, path = text.partition(":")
    mount = PurePosixPath(posixpath.normpath(f"/{path.lstrip('/')}"))
    absolute = path.startswith("/") and mount != PurePosixPath("/")
    if not (len(claim) <= 253 and _CLAIM.fullmatch(claim) and absolute and path.isprintable() and ":" not in path):
        raise LaunchError(
            f"--claim: given {text!r}; allowed: NAME:PATH, such as training:/data, a name of lower-case letters, "
            "digits, hyphens and dots, and an absolute path without a colon"
        )
    for needed in (IMAGE_FOLDER, RECIPE_FOLDER, SHARED_MEMORY):
        if needed.is_relative_to(mount):
            raise LaunchError(
                f"--claim: given {text!r}: a volume there hides {needed}, which the pods need; allowed: another path, "
                f"such as {claim}:/data"
            )
    return claim, mount


def jobset(job: Job, pods: Pods) -> list[Manifest]:
    """A ConfigMap and a JobSet. A pod that fails restarts all, from the newest checkpoint, up to `pods.restarts` times;
    the codes of `HOPELESS` end the job."""
    node_rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    places = {
        "NODES": str(job.nodes),
        "MASTER": f"{job.name}-{NODES}-0-0.{job.name}",
        "PORT": PORT,
        "GPUS": str(job.gpus_per_node),
        "RESTARTS": "0",  # the JobSet's are enough
    }
    container = {
        "name": NODES,
        "image": pods.image,
        "command": ["bash", "launch/multinode.sh", f"{RECIPE_FOLDER}/{RECIPE_FILE}"],
        "env": [
            *({"name": key, "value": value} for key, value in places.items()),
            {"name": "NODE_RANK", "valueFrom": node_rank},
            STOPPED,
        ],
        "resources": _gpus(job),
        "volumeMounts": _mounts(pods),
    }
    indexed_job = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": NODES, "operator": "In", "values": HOPELESS}}
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": job.stop_s,
                "containers": [container],
                "volumes": _volumes(job, pods),
            }
        },
    }
    hopeless = {"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.restarts, "rules": [hopeless]},
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": indexed_job}}],
    }
    return [
        _config_map(job),
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": job.name}, "spec": spec},
    ]


def train_job(job: Job, pods: Pods) -> list[Manifest]:
    """A ConfigMap and a TrainJob for the runtime `TORCH_RUNTIME`, which decides what follows a failure."""
    command = ["python3", "-m", "moba_train.tools.launch.torchrun", "--max-restarts", str(pods.restarts)]
    patch = {
        "terminationGracePeriodSeconds": job.stop_s,
        "containers": [{"name": NODES, "volumeMounts": _mounts(pods)}],
        "volumes": _volumes(job, pods),
    }
    spec = {
        "runtimeRef": {"name": TORCH_RUNTIME},
        "trainer": {
            "image": pods.image,
            "command": [*command, "-m", "moba_train.train", f"{RECIPE_FOLDER}/{RECIPE_FILE}"],
            "numNodes": job.nodes,
            "numProcPerNode": job.gpus_per_node,
            "resourcesPerNode": _gpus(job),
            "env": [STOPPED],
        },
        "runtimePatches": [
            {
                "manager": "moba-train/launch",
                "trainingRuntimeSpec": {
                    "template": {
                        "spec": {
                            "replicatedJobs": [{"name": NODES, "template": {"spec": {"template": {"spec": patch}}}}]
                        }
                    }
                },
            }
        ],
    }
    return [
        _config_map(job),
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": spec,
        },
    ]


def ray_job(job: Job, pods: Pods) -> list[Manifest]:
    """A ConfigMap and a RayJob. Any failure restarts all on a new cluster, up to `pods.restarts` times."""
    container = {
        "name": NODES,
        "image": pods.image,
        "env": [
            {"name": "RESTARTS", "value": "0"},  # the RayJob's are enough
            {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(job.stop_s)},  # by default it kills after 3 s
            STOPPED,
        ],
        "resources": _gpus(job),
        "volumeMounts": _mounts(pods),
    }
    template = {
        "spec": {
            "terminationGracePeriodSeconds": job.stop_s,
            "containers": [container],
            "volumes": _volumes(job, pods),
        }
    }
    node: Manifest = {"rayStartParams": {}, "template": template}
    others = job.nodes - 1
    workers = {"groupName": NODES, "replicas": others, "minReplicas": others, "maxReplicas": others, **node}
    command = ["python3", "-m", "moba_train.tools.launch.ray_nodes", "--nodes", str(job.nodes)]
    command += ["--gpus", str(job.gpus_per_node), f"{RECIPE_FOLDER}/{RECIPE_FILE}"]
    spec = {
        "entrypoint": shlex.join(command),
        "backoffLimit": pods.restarts,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {"headGroupSpec": node, "workerGroupSpecs": [workers] if others else []},
    }
    return [
        _config_map(job),
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": job.name}, "spec": spec},
    ]


MANIFESTS: dict[str, Callable[[Job, Pods], list[Manifest]]] = {
    "jobset": jobset,
    "trainjob": train_job,
    "rayjob": ray_job,
}
"""Functions that make them, by the values of `moba-train launch --k8s`."""


def as_yaml(manifests: list[Manifest]) -> str:
    """The manifests as one file for kubectl, the recipe line by line."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True)


class _Dumper(Dumper):
    """Writes texts of several lines as such."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _config_map(job: Job) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-recipe"},
        "data": {RECIPE_FILE: job.resolved},
    }


def _gpus(job: Job) -> Manifest:
    return {"limits": {"nvidia.com/gpu": str(job.gpus_per_node)}}


def _mounts(pods: Pods) -> list[Manifest]:
    return [
        {"name": "recipe", "mountPath": str(RECIPE_FOLDER), "readOnly": True},
        {"name": "shared", "mountPath": str(pods.mount)},
        {"name": "shm", "mountPath": str(SHARED_MEMORY)},
    ]


def _volumes(job: Job, pods: Pods) -> list[Manifest]:
    return [
        {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's; the default of 64 MiB is too small
    ]


def _files_read(run: ResolvedRun) -> dict[str, str]:
    """Files and folders that the run reads, each with the first key of the recipe that names it."""
    keys: dict[str, str] = {}
    for key, source in run.named_sources():
        keys.setdefault(source.path, f"{key}.path")
    if run.init_from is not None and "://" not in run.init_from:
        keys.setdefault(run.init_from, "init_from")
    if run.data.tokenizer and not run.data.tokenizer.startswith("tiktoken:"):
        keys.setdefault(run.data.tokenizer, "data.tokenizer")
    return keys
