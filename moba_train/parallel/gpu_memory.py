"""How torch's allocator takes memory from a GPU."""

import os

import torch

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's variables, the second its older name."""


def grow_segments() -> None:
    """Let the allocator's segments grow and shrink, for the rest of the process, unless the environment sets it.

    With segments of fixed size, memory that is free in pieces is of no use to a larger tensor: near the end of a GPU's
    memory the allocator then waits for the GPU and gives all free pieces back, again and again, or the run ends with
    gigabytes free (docs/memory.md). Segments that exist stay as they are.
    """
    if not any(name in os.environ for name in _SETTINGS):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
