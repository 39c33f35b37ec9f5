"""`deterministic: true`: the same recipe on the same machines gives the same bits again.

What is at stake, by part:
- torch's own operators: its switch chooses reproducible ones and refuses those that have none; torch.compile then
  chooses kernels without timing them;
- cuBLAS: results depend on its workspace unless that is fixed;
- dense attention: cuDNN's backward pass adds in the order of arrival and is left out, the flash kernels have a
  reproducible one (attention/full/kernels.py). MoBA's own kernels always add in a fixed order;
- NCCL: rings and trees add in a fixed order, sums inside the NVLink switch (NVLS) are not promised to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moba_train.parallel.world import environment_defaults

_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Everything within is bitwise reproducible, if `wanted`; to be entered before the first use of a GPU and NCCL.

    Inside it an operator that has no reproducible version raises RuntimeError. Variables that are set already stay.
    """
    if not wanted:
        yield
        return
    torch_settings: Any = torch.utils.deterministic
    fill = torch_settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # No kernel of ours reads what was never written, and filling every new tensor with NaN costs time.
    torch_settings.fill_uninitialized_memory = False
    try:
        with environment_defaults(_ENVIRONMENT):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch_settings.fill_uninitialized_memory = fill
