"""Whether the Triton kernels can run at all."""

import importlib.util
import os
from functools import cache

from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether the package is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """True under TRITON_INTERPRET=1, which runs the kernels on the CPU, in float32 too, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_runs_on(x: Tensor) -> bool:
    """Whether kernels can work on tensors where this one is."""
    return has_triton() and (x.is_cuda or interpreted())
