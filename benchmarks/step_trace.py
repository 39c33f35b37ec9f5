"""What a profiler's trace of training steps says: groups of kernels, idle time and what the host did then, and how long
ranks waited for each other.

Times in a trace are microseconds; results are seconds.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

COMMUNICATION = "communication, exposed"
IDLE = "idle"
_GROUPS = {
    COMMUNICATION: r"nccl|symmetric_memory|memcpy ptop",
    "attention": r"flash|fmha|cudnn_generated|cudnn.*attn|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|_scaled_mm",
    "optimizer and gradient norm": r"multi_tensor|adam|foreach",
    "loss": r"softmax|nll_loss|cross_entropy|logsumexp",
    "copies": r"memcpy|memset|copy|cat|split|chunk|index",
}
"""Groups by what names of kernels contain, in the order in which they are tried."""
_OTHER = "norms, rotary, elementwise"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_OPERATORS = ("cpu_op", "user_annotation")
_SHORT = 20.0
"""Microseconds: gaps below are the latency of launches, and not looked into."""
_BETWEEN_CALLS = "Python, between operators"


class Kernel(NamedTuple):
    """A kernel, or a copy, on the GPU; microseconds. Also a call on the host."""

    name: str
    start: float
    stop: float


def group_of(name: str, ours: Iterable[str] = ()) -> str:
    """The group of a kernel; `ours`: names of the Triton kernels of our attention."""
    if name in ours:
        return "attention"
    lower = name.lower()
    if lower.startswith("triton_"):  # compiled blocks: torch names a kernel after the operators that it fuses
        return _OTHER
    return next((group for group, pattern in _GROUPS.items() if re.search(pattern, lower)), _OTHER)


def kernels(trace: Mapping[str, Any]) -> list[Kernel]:
    """Everything that ran on the GPU in a profiler's trace, by start."""
    return _events(trace, _ON_GPU)


def _events(trace: Mapping[str, Any], kinds: Sequence[str]) -> list[Kernel]:
    events = [event for event in trace["traceEvents"] if event.get("cat") in kinds and "dur" in event]
    return sorted(
        (Kernel(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events), key=lambda k: k.start
    )


def shares(found: list[Kernel], ours: Iterable[str] = ()) -> dict[str, float]:
    """Seconds of each group from the first kernel's start to the last one's end; they add up to that time.

    Every moment counts once: for the group of a kernel that computes, else for communication that nothing hides, else
    as idle. Where several compute at once, a moment counts for the one that began first. found: kernels by start.
    """
    names = set(ours)
    groups = [group_of(kernel.name, names) for kernel in found]
    seconds: dict[str, float] = {}
    busy: list[Kernel] = []  # what computes, without overlap
    for kernel, group in zip(found, groups, strict=True):
        start = max(kernel.start, busy[-1].stop) if busy else kernel.start
        if group != COMMUNICATION and kernel.stop > start:
            seconds[group] = seconds.get(group, 0.0) + (kernel.stop - start) / 1e6
            busy.append(Kernel(kernel.name, start, kernel.stop))
    ends = [kernel.stop for kernel in busy]
    told = found[0].start
    for kernel, group in zip(found, groups, strict=True):
        start = max(kernel.start, told)
        if group != COMMUNICATION or kernel.stop <= start:
            continue
        hidden = 0.0
        for other in islice(busy, bisect_right(ends, start), None):
            if other.start >= kernel.stop:
                break
            hidden += min(other.stop, kernel.stop) - max(other.start, start)
        seconds[group] = seconds.get(group, 0.0) + (kernel.stop - start - hidden) / 1e6
        told = kernel.stop
    span = (max(kernel.stop for kernel in found) - found[0].start) / 1e6
    idle = span - sum(seconds.values())
    return dict(sorted(seconds.items(), key=lambda item: -item[1])) | {IDLE: idle}


def longest(found: list[Kernel], ours: Iterable[str], count: int = 40) -> list[dict[str, Any]]:
    """The kernels that take most, summed up by name."""
    total: dict[str, list[float]] = {}
    for kernel in found:
        total.setdefault(kernel.name, []).append((kernel.stop - kernel.start) / 1e6)
    first = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [{"kernel": n[:120], "group": group_of(n, ours), "seconds": sum(t), "calls": len(t)} for n, t in first]


class Gap(NamedTuple):
    """Time in which nothing ran on the GPU, and what the host did most of it."""

    start: float
    """Seconds after the first kernel's start."""
    seconds: float
    call: str
    """The call of the CUDA runtime that took most of the gap; empty: none took half of it."""
    operator: str
    """The operator or annotation that covers most of the gap; the innermost of those that cover as much."""


def gaps(trace: Mapping[str, Any]) -> list[Gap]:
    """All gaps that are longer than a launch takes, the longest first."""
    found = kernels(trace)
    calls, operators = (_Host(_events(trace, kinds)) for kinds in (_CALLS, _OPERATORS))
    every = []
    for start, stop in _idle(found):
        call, covered = calls.most_of(start, stop)
        operator, _ = operators.most_of(start, stop)
        name = call if 2 * covered >= stop - start else ""
        every.append(Gap((start - found[0].start) / 1e6, (stop - start) / 1e6, name, operator or _BETWEEN_CALLS))
    return sorted(every, key=lambda gap: -gap.seconds)


def _idle(found: Sequence[Kernel]) -> Iterator[tuple[float, float]]:
    end = found[0].stop
    for kernel in found:
        if kernel.start - end >= _SHORT:
            yield end, kernel.start
        end = max(end, kernel.stop)


class _Host:
    """Events of the host, on all threads."""

    def __init__(self, events: Sequence[Kernel]) -> None:
        self.names = [event.name for event in events]
        self.starts = np.array([event.start for event in events])
        self.stops = np.array([event.stop for event in events])

    def most_of(self, start: float, stop: float) -> tuple[str, float]:
        """Name and overlap (us) of the event with the largest overlap; the last to begin of those that tie."""
        if not self.names:
            return "", 0.0
        overlap = np.minimum(self.stops, stop) - np.maximum(self.starts, start)
        place = len(overlap) - 1 - int(np.argmax(overlap[::-1]))
        return (self.names[place], float(overlap[place])) if overlap[place] > 0 else ("", 0.0)


def idle_by_cause(found: Sequence[Gap]) -> dict[str, float]:
    """Seconds of the gaps by what the host did, the most first."""
    seconds: dict[str, float] = {}
    for gap in found:
        cause = f"{gap.call} in {gap.operator}" if gap.call else gap.operator
        seconds[cause] = seconds.get(cause, 0.0) + gap.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def waits(ranks: Sequence[Sequence[Kernel]]) -> list[dict[str, float]]:
    """For each rank, the seconds that its collectives of each name waited for the last rank to begin.

    ranks: the kernels of communication of each rank, by start, with times of one clock. Collectives of one name are
    taken in their order, which has to be the same on all ranks; a name that ranks have run unequally often is left out.
    """
    by_name: list[dict[str, list[float]]] = []
    for found in ranks:
        starts: dict[str, list[float]] = {}
        for kernel in found:
            starts.setdefault(kernel.name, []).append(kernel.start)
        by_name.append(starts)
    result: list[dict[str, float]] = [{} for _ in ranks]
    for name in by_name[0]:
        columns = [starts.get(name, []) for starts in by_name]
        if len({len(column) for column in columns}) > 1:
            continue
        last = np.max(columns, axis=0)
        for waited, column in zip(result, columns, strict=True):
            waited[name] = float((last - np.array(column)).sum()) / 1e6
    return result


def communication(trace: Mapping[str, Any]) -> list[Kernel]:
    """The kernels of communication, by start, in microseconds that traces of one machine share."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    return [
        Kernel(kernel.name.partition("(")[0], kernel.start + base, kernel.stop + base)
        for kernel in kernels(trace)
        if group_of(kernel.name) == COMMUNICATION
    ]
