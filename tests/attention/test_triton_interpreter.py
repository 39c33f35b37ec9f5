"""The Triton kernels on a machine without a GPU: run by Triton's interpreter, and compiled for Hopper."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def run_pytest(files: list[Path], **environment: str) -> None:
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]  # of NumPy, 15,000 times
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    if "PYTEST_XDIST_WORKER" not in os.environ and find_spec("xdist"):  # else other tests run beside them
        command += ["-n", str(min(4, os.cpu_count() or 1))]  # processes of one thread each
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


@pytest.mark.slow
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    """The files interpreted_*.py of all folders, in processes of their own: Triton reads TRITON_INTERPRET when the
    kernels are imported. Not in bfloat16, in which the interpreter's arithmetic is wrong."""
    run_pytest(sorted((ROOT / "tests").rglob("interpreted_*.py")), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
