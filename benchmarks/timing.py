"""Timing of calls on a GPU."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.record import spread

LONG_MS = 1000.0
"""Calls that take longer than this are timed once, all others at least three times."""


def queued(call: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds from each call's begin to its end on the GPU, for `count` calls that are queued back to back.

    As in training the GPU does not wait for the host, unless the host takes longer than the GPU. A call's result is
    freed before the next call begins, so peak memory is that of one call.
    """
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize()
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def milliseconds(call: Callable[[], Any], budget_s: float, warm: bool = False) -> list[float]:
    """GPU time of single calls, after a warm-up unless `warm`: up to 20 calls within the budget, at least 3, but only
    one if it takes longer than `LONG_MS`."""
    if not warm:
        call()
    (first,) = queued(call, 1)
    if first > LONG_MS:
        return [first]
    return queued(call, int(min(20, max(3, 1000 * budget_s / first))))


def measure(forward: Callable[[], Any], both: Callable[[], Any], budget_s: float, warm: bool = False) -> dict[str, Any]:
    """Milliseconds of the forward pass and of forward and backward, and the peak of all memory in GiB during both.

    The peak counts everything that lives on the GPU: inputs and gradients too.
    """
    result: dict[str, Any] = {"forward_ms": spread(milliseconds(forward, budget_s, warm))}
    if not warm:
        both()  # outside of the peak: Triton's tuning takes memory of its own
    torch.cuda.reset_peak_memory_stats()
    result["both_ms"] = spread(milliseconds(both, budget_s, warm=True))
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    return result


def kernel_names() -> set[str]:
    """Every Triton kernel of our attention, found in its modules."""
    from triton.runtime import KernelInterface

    from moba_train.attention import kernels
    from moba_train.attention.moba import gate_kernels

    folders = [importlib.import_module(f"{kernels.__name__}.{name}") for name in ("common", "triton", "hopper")]
    modules = [
        importlib.import_module(found.name)
        for package in folders
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    ]
    modules.append(gate_kernels)
    found = [value for module in modules for value in vars(module).values() if isinstance(value, KernelInterface)]
    return {kernel.fn.__name__ for kernel in found}


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of GPU time in one call for each of our kernels, longest first; torch's kernels are summed up as
    `others`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return grouped({event.key: event.device_time_total / 1000 for event in profile.key_averages()}, kernel_names())


def grouped(times: dict[str, float], ours: set[str]) -> dict[str, float]:
    """`times` of the kernels in `ours` by name, longest first; all other kernels are summed up as `others`."""
    mine = {name: time for name, time in times.items() if name in ours and time > 0}
    others = sum(times.values()) - sum(mine.values())
    return {**dict(sorted(mine.items(), key=lambda item: -item[1])), "others": others}
