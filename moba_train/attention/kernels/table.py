"""Whether the Triton kernels can run."""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import in_one_range
from moba_train.attention.layout import Layout

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


def triton_multiplies(x: Tensor) -> bool:
    """Whether kernels that multiply rows like those of `x` ([..., width]) can run: 16-bit dtypes on CUDA, and widths
    that a tile holds."""
    half = x.dtype in (torch.float16, torch.bfloat16) or (interpreted() and x.dtype == torch.float32)
    return triton_runs_on(x) and half and x.shape[-1] in (16, 32, 64, 128)


def triton_limits(head_dim: int, selected: int) -> str:
    """Why the kernels cannot work on any machine with heads of this width and `selected` blocks of a query besides its
    own; empty when they can."""
    if head_dim not in (64, 128):
        return f"head dim {head_dim}, 64 or 128 needed"
    if selected > _MOST_SELECTED:
        return f"{selected} selected blocks besides the own one, at most {_MOST_SELECTED} supported"
    return ""


def triton_block_size(block_size: int) -> str:
    """Why the kernels cannot attend to blocks of this size; empty when they can."""
    if block_size % 16 or not 64 <= block_size <= 16384:
        return f"block_size {block_size}, a multiple of 16 from 64 to 16384 needed"
    return ""


def triton_refuses(x: Tensor, layout: Layout, block_size: int, selected: int) -> str:
    """Why the kernels cannot work on queries or keys like `x` ([tokens, heads, D]), with `selected` blocks of a query
    besides its own; empty when they can."""
    if not has_triton():
        return "the package triton is not installed"
    if not x.is_cuda and not interpreted():
        return f"tensors are on {x.device.type}, not on CUDA"
    if x.dtype not in (torch.float16, torch.bfloat16) and not interpreted():
        return f"dtype {x.dtype}, bfloat16 or float16 needed"
    if reason := triton_limits(x.shape[-1], selected):
        return reason
    for ranges in (layout.q_ranges, layout.k_ranges):
        if not in_one_range(ranges, block_size):
            given = ranges or ()
            parts = ", ".join(f"{start}-{stop}" for start, stop in given[:4]) + ", ..." * (len(given) > 4)
            return f"a shard whose token ranges {parts} are less than block_size {block_size} apart"
    return ""


def kernel_decodes(q_BHD: Tensor, block_size: int = 16) -> bool:
    """True if the decoding kernel takes queries like these, and blocks of `block_size` tokens."""
    able = q_BHD.shape[-1] in (64, 128) and q_BHD.dtype in (torch.bfloat16, torch.float16)
    return able and block_size % 16 == 0 and triton_runs_on(q_BHD)
