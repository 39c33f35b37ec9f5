"""CUDA's Multi-Process Service, by which kernels of the arms that share a GPU run at the same time.

Without it the GPU takes turns between processes, and a small model's kernels leave most of it idle.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_CONTROL = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""Names the folder in which a process finds the service."""
_LOGS = "CUDA_MPS_LOG_DIRECTORY"


@contextmanager
def multi_process_service() -> Iterator[None]:
    """Inside, the processes that this one starts share GPUs by a service of their own, if CUDA's driver brings it along
    and the environment names none already."""
    control = shutil.which(_CONTROL)
    if control is None or _PIPES in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        service = {_PIPES: folder, _LOGS: folder}
        started = subprocess.run([control, "-d"], env=os.environ | service, capture_output=True, text=True)
        if started.returncode != 0:
            reason = (started.stderr or started.stdout).strip()
            print(f"arms that share a GPU take turns: {_CONTROL} -d failed: {reason}", flush=True)
            yield
            return
        os.environ.update(service)
        try:
            yield
        finally:
            subprocess.run([control], input="quit\n", capture_output=True, text=True)
            for name in service:
                del os.environ[name]
