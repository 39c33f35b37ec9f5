"""Sentences about memory that a plan needs and a machine lacks."""

from collections.abc import Mapping
from math import ceil

from moba_train.memory.activations import StageActivations
from moba_train.memory.devices import Gpu
from moba_train.memory.memory import USABLE
from moba_train.memory.moments import Memory


def usable_bytes(gpu: Gpu) -> float:
    """Bytes of the GPU's memory that a plan may fill."""
    return USABLE * gpu.memory


def shortage(name: str, memory: Memory, gpu: Gpu | None) -> str | None:
    """A phrase on the stage `name` if its memory does not fit `gpu` (None: there is none, and no limit), else None."""
    if gpu is None or memory.total <= usable_bytes(gpu):
        return None
    return (
        f"stage {name} needs about {format_gib(memory.total)} GiB on each GPU, but {format_gib(usable_bytes(gpu))} "
        f"GiB are usable on {gpu.name} ({format_gib(gpu.memory)} GiB, of which {1 - USABLE:.0%} are kept for CUDA, "
        "NCCL and fragmentation)"
    )


def host_shortage(stages: Mapping[str, StageActivations], available: float) -> str | None:
    """A sentence on the stage that needs most memory of the host if that is more than the `available` bytes for each
    GPU, else None. stages: by name."""
    needs = {
        name: {
            "the copy of a save": found.memory.host_copies,
            "the optimizer's state": found.memory.host_optimizer,
            "activations": found.host_bytes,
        }
        for name, found in stages.items()
    }
    name, parts = max(needs.items(), key=lambda need: sum(need[1].values()))
    if sum(parts.values()) <= available:
        return None
    listed = ", ".join(f"{part} {format_gib(size)}" for part, size in parts.items() if size)
    lower = "lower memory.host_gib or " if parts["activations"] else ""
    return (
        f"stage {name} needs about {format_gib(sum(parts.values()))} GiB of host memory for each GPU ({listed}), but "
        f"this machine has {format_gib(available)}, and Linux kills runs that take more; {lower}use more machines"
    )


def over_budget(name: str, memory: Memory, gpu_bytes: float | None) -> str | None:
    """A sentence if the stage `name`, which needs `memory` whatever `budget` leaves out, exceeds memory.gpu_gib, else
    None. gpu_bytes: the key, in bytes; None: not given."""
    if gpu_bytes is None or memory.total <= gpu_bytes:
        return None
    needed = ceil(10 * memory.total / 2**30) / 10
    return (
        f"memory.gpu_gib: given {gpu_bytes / 2**30:g}, but stage {name} needs {needed:.1f} GiB on each GPU "
        f"(predicted), whatever `budget` leaves out, and will take it; set it to {needed:.1f} or more, or to null "
        "(docs/how-to/out-of-memory.md says what needs less)"
    )


def format_gib(count: float) -> str:
    """Bytes as GiB with one decimal place."""
    return f"{count / 2**30:.1f}"
