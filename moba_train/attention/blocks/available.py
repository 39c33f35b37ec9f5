"""Whether the Triton kernels can run."""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from moba_train.attention.blocks.geometry import in_one_range
from moba_train.attention.protocol import Layout

_MOST_SELECTED = 127
"""Selected blocks of a query, its own block not counted: k up to 128."""


@cache
def has_triton() -> bool:
    """Whether the package is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 is set, which runs the kernels on the CPU, in float32 too, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_runs_on(x: Tensor) -> bool:
    """Whether Triton kernels can work on tensors of this one's device."""
    return has_triton() and (x.is_cuda or interpreted())


def triton_refuses(x: Tensor, layout: Layout, block_size: int, selected: int) -> str:
    """Why the kernels cannot work on queries or keys like `x` ([tokens, heads, D]), with `selected` blocks of a query
    beside its own; empty when they can."""
    if not has_triton():
        return "the package triton is not installed"
    if not x.is_cuda and not interpreted():
        return f"tensors are on {x.device.type}, not on CUDA"
    if x.dtype not in (torch.float16, torch.bfloat16) and not interpreted():
        return f"dtype {x.dtype}, bfloat16 or float16 needed"
    if x.shape[-1] not in (64, 128):
        return f"head dim {x.shape[-1]}, 64 or 128 needed"
    if selected > _MOST_SELECTED:
        return f"{selected} selected blocks beside the own one, at most {_MOST_SELECTED} supported"
    for ranges in (layout.q_ranges, layout.k_ranges):
        if not in_one_range(ranges, block_size):
            parts = ", ".join(f"{start}-{stop}" for start, stop in ranges or ())
            return f"a shard whose token ranges {parts} are less than block_size {block_size} apart"
    return ""
