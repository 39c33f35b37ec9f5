"""GPUs to plan for, by the name that a user gives."""

import difflib

from moba_train.errors import ConfigError
from moba_train.memory.devices import GPUS_BY_NAME, Gpu

_DEFAULT_TFLOPS = 989.0
"""An H100's, where the GPU is absent or unknown."""


def named_gpu(name: str) -> Gpu:
    """The GPU of the table with this name, such as `h200` or `h100-nvl`. Raises ConfigError for an unknown name."""
    if gpu := GPUS_BY_NAME.get(name.lower().replace(" ", "-")):
        return gpu
    close = difflib.get_close_matches(name.lower(), GPUS_BY_NAME, n=1)
    closest = f"closest: {close[0]}; " if close else ""
    raise ConfigError([f"--gpu: given {name!r}; {closest}allowed: {', '.join(sorted(GPUS_BY_NAME))}"])


def peak_or_default(gpu: Gpu | None) -> float:
    """Dense bf16 TFLOP/s of a GPU, or of an H100 if it is absent or unknown."""
    return gpu.tflops if gpu is not None and gpu.tflops is not None else _DEFAULT_TFLOPS
