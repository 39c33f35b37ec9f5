"""Manifests for Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer, each with its recipe in a ConfigMap.

A JobSet (jobset.x-k8s.io/v1alpha2) needs nothing but the JobSet controller: its pods are one Indexed Job with stable
host names, and launch/multinode.sh runs in each. A TrainJob (trainer.kubeflow.org/v1alpha1) takes the cluster's runtime
for torch, which gives torchrun its addresses in variables PET_*.
"""

import signal
from collections.abc import Callable
from typing import Any

import yaml

from moba_train.errors import ReproducibleFaultError, UserError
from moba_train.run.stop import STOPPED_CODE
from moba_train.tools.cluster import RECIPE_FOLDER, SHARED_MEMORY, Job, Pods

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
    """A ConfigMap and a TrainJob for the runtime `TORCH_RUNTIME`. What follows a failure is the runtime's to say."""
    command = ["python3", "-m", "moba_train.tools.launcher", "--max-restarts", str(pods.restarts)]
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


MANIFESTS: dict[str, Callable[[Job, Pods], list[Manifest]]] = {"jobset": jobset, "trainjob": train_job}
"""By what `moba-train launch --k8s` is given."""


def as_yaml(manifests: list[Manifest]) -> str:
    """The manifests as one file for kubectl, the recipe line by line."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True)


class _Dumper(yaml.SafeDumper):
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
