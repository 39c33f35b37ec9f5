"""Processes that begin with torch and the trainer imported, which takes longer than what most tests have them do."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

IMPORTED_LATE = [
    "torch._dynamo",
    "torch._inductor.compile_fx",  # with 800 modules, by the first that compiles
    "networkx",
    "torch.distributed.run",
    "moba_train.tools.report.page",
    "plotly.offline",
]
"""By training runs: by torch, or with plotly."""

IMPORTED_BY_TESTS = ["pytest", "hypothesis"]
"""By the module of the function that a process runs: 0.7 s of processor time in each."""

GARBAGE_SEARCHES = 1_000, 20, 100
"""For `gc.set_threshold`, after `gc.freeze`: Python searches the old objects whenever those that are not frozen have
grown by a quarter, and with its own numbers does so for a twentieth of the tests' time."""


TASKS = "/proc/self/task"


def end_process_groups() -> int:
    """End the threads of process groups that were destroyed and are garbage, or named by torch's caches; returns how
    many threads are left. One of gloo's three for each group wakes up 60 times a second: in processes that had trained
    in dozens of runs these took half of the processor's time."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # torch 2.11 has none
    gc.collect()  # 1 ms, as what was there before the first test is frozen
    return len(os.listdir(TASKS)) if os.path.isdir(TASKS) else 0


def forked() -> ForkServerContext:
    """Its processes are forks of one that has imported all this once. They have the environment of that one: what a
    test changes in its own does not reach them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moba_train.train", "moba_train.tools.cli", *IMPORTED_LATE, *IMPORTED_BY_TESTS])
    return context


def run_processes(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int, device: str = "cpu") -> None:
    """Run `function(rank, *arguments)` in a process for each of the ranks, and wait for all. On the CPU they are forks.
    For GPUs they are new ones: a fork cannot use a GPU that anything imported before it has asked for.

    Raises ProcessRaisedException with the first error.
    """
    import torch.multiprocessing as mp  # late: conftest.py imports this file

    method = forked().get_start_method() if device == "cpu" else "spawn"
    mp.start_processes(function, arguments, ranks, start_method=method)
