"""The machine that a run trains on, for the event `code` of its history."""

import platform
from typing import Any

import torch


def describe_machine(device: torch.device, ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """Devices, ranks, host and versions, as JSON values."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
    }
