"""CUDA's Multi-Process Service, by which kernels of the arms that share a GPU run at the same time.

Without it the GPU takes turns between processes, and a small model's kernels leave most of it idle. NVIDIA's
documentation says that a fault of one process on a GPU ends the others there, too.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CONTROL = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""Names the folder in which a process finds the service."""
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
"""Names the folder that the service logs to."""
_QUIT_S = 10.0
"""Seconds that the service may take to end."""


def service_runs() -> bool:
    """Whether processes that this one starts share GPUs by a service."""
    return _PIPES in os.environ


@contextmanager
def multi_process_service() -> Iterator[None]:
    """Inside, the processes that this one starts share GPUs by a service of their own, if CUDA's driver brings it along
    and the environment names none already."""
    control = shutil.which(_CONTROL)
    if control is None or service_runs():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        service = {_PIPES: folder, _LOGS: folder}
        environment = os.environ | service
        # It has all GPUs, as it would number those named here anew, and arms name theirs by the machine's numbers.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        started = subprocess.run([control, "-d"], env=environment, capture_output=True, text=True)
        if started.returncode != 0:
            reason = (started.stderr or started.stdout).strip()
            print(f"arms that share a GPU take turns: {_CONTROL} -d failed: {reason}", flush=True)
            yield
            return
        before = {name: os.environ.get(name) for name in service}
        os.environ.update(service)
        try:
            yield
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit\n", capture_output=True, text=True, timeout=_QUIT_S)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
