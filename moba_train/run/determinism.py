"""`deterministic: true`: the same recipe on the same machines gives the same bits again.

What depends on the switch, by part:
- torch's own operators: its switch selects reproducible ones and refuses operators that have none; torch.compile then
  selects kernels without timing them;
- cuBLAS: results depend on its workspace unless its size is fixed;
- dense attention: cuDNN's backward pass adds in the order of arrival and is left out, the flash kernels have a
  reproducible one (attention/full/kernels.py). MoBA's own kernels always add in a fixed order;
- on a CPU: the number of threads, which says in how many parts a sum is made; it is 1 then;
- NCCL: rings and trees add in a fixed order; for sums inside the NVLink switch (NVLS) that is not guaranteed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moba_train.parallel.world import environment_defaults

_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, everything is bitwise reproducible, if `wanted`. Enter it before the first use of a GPU and of NCCL.

    An operator that has no reproducible version then raises RuntimeError. Environment variables that are already set
    keep their values.
    """
    if not wanted:
        yield
        return
    torch_settings: Any = torch.utils.deterministic
    threads = torch.get_num_threads()
    fill = torch_settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    # Our kernels read no memory that was never written, and filling every new tensor with NaN costs time.
    torch_settings.fill_uninitialized_memory = False
    try:
        with environment_defaults(_ENVIRONMENT):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        torch_settings.fill_uninitialized_memory = fill
