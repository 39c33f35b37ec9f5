"""Sentences about memory that a plan needs and a machine lacks."""

from math import ceil

import torch

from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.memory.devices import Gpu, local_gpu
from moba_train.memory.memory import USABLE
from moba_train.memory.moments import Memory
from moba_train.memory.plan import Plan


def usable_bytes(gpu: Gpu) -> float:
    """Bytes of the GPU's memory that a plan may fill."""
    return USABLE * gpu.memory


def shortage(name: str, memory: Memory, gpu: Gpu) -> str | None:
    """A phrase on the stage `name` if its memory does not fit `gpu`, else None."""
    if memory.total <= usable_bytes(gpu):
        return None
    return (
        f"stage {name} needs about {format_gib(memory.total)} GiB on each GPU, but {format_gib(usable_bytes(gpu))} "
        f"GiB are usable on {gpu.name} ({format_gib(gpu.memory)} GiB, of which {1 - USABLE:.0%} are kept for CUDA, "
        "NCCL and fragmentation)"
    )


def local_shortage(stage: Stage, memory: Memory, device: torch.device) -> str | None:
    """`shortage` of `stage`, which needs `memory`, on this machine's GPU; None on a CPU."""
    gpu = local_gpu() if device.type == "cuda" else None
    return shortage(stage.name, memory, gpu) if gpu else None


def host_shortage(plan: Plan, available: float) -> str | None:
    """A sentence on the stage that needs most memory of the host if that is more than the `available` bytes for each
    GPU, else None."""
    needs = {
        item.stage.name: {
            "the copy of a save": item.memory.host_copies,
            "the optimizer's state": item.memory.host_optimizer,
            "activations": item.activations.host_bytes,
        }
        for item in plan.stages
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


def over_budget(config: RunConfig, stage: Stage, memory: Memory) -> str | None:
    """A sentence if `stage`, which needs `memory` whatever `budget` leaves out, exceeds memory.gpu_gib, else None."""
    given = config.memory.gpu_gib
    if given is None or memory.total <= given * 2**30:
        return None
    needed = ceil(10 * memory.total / 2**30) / 10
    return (
        f"memory.gpu_gib: given {given:g}, but stage {stage.name} needs {needed:.1f} GiB on each GPU (predicted), "
        f"whatever `budget` leaves out, and will take it; set it to {needed:.1f} or more, or to null (docs/memory.md "
        "says what needs less)"
    )


def format_gib(count: float) -> str:
    """Bytes as GiB with one decimal place."""
    return f"{count / 2**30:.1f}"
