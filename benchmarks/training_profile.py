"""Where the time of a training step goes: kernels of the real trainer, in groups.

    torchrun --nproc-per-node 2 -m benchmarks.training_profile --model llama3-8b --row 8K:full \\
        --output benchmarks/results/training-profile-8b-h200-x2.json

It trains the recipe of a row of `benchmarks.training` with torch.profiler around a few steps of rank 0. Every moment of
these steps counts once: for the group of a kernel that computes, else for communication that nothing hides, else as
idle. Matrix products of the loss are in `matrix products`; `loss` is its softmax.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from benchmarks.options import need_gpus
from benchmarks.record import markdown, save
from benchmarks.timing import kernel_names
from benchmarks.trainer_run import model_shape, write_corpus
from benchmarks.training_rows import Row, parse_row
from moba_train import train
from moba_train.training.trainer import Trainer

COMMUNICATION = "communication, exposed"
IDLE = "idle"
_GROUPS = {
    COMMUNICATION: r"nccl",
    "attention": r"flash|fmha|cudnn_generated|cudnn.*attn|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|_scaled_mm",
    "optimizer and gradient norm": r"multi_tensor|adam|foreach",
    "loss": r"softmax|nll_loss|cross_entropy|logsumexp",
    "copies": r"memcpy|memset|copy|cat|split|chunk|index",
}
"""Groups by what names of kernels contain, in the order in which they are tried."""
_OTHER = "norms, rotary, elementwise"


class Kernel(NamedTuple):
    """A kernel, or a copy, on the GPU; microseconds."""

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


def kernels(trace: dict[str, Any]) -> list[Kernel]:
    """Everything that ran on the GPU in a profiler's trace, by start."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    return sorted(
        (Kernel(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events), key=lambda k: k.start
    )


def shares(found: list[Kernel], ours: Iterable[str] = ()) -> dict[str, float]:
    """Seconds of each group from the first kernel's start to the last one's end; they add up to that time.

    found: kernels by start. Where several compute at once, a moment counts for the one that began first.
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


def profiled_steps(row: Row, traces: list[Path], folder: Path) -> None:
    """Let the trainer of this process profile `row.steps` steps, after `row.warm`, and write the trace; rank 0 only."""
    take_step = Trainer._step
    recorder = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])

    def step(self: Trainer, *arguments: Any) -> bool:
        done = self.progress.step
        if done == row.warm:
            _synchronize()
            recorder.start()
        went_on = take_step(self, *arguments)
        if self.progress.step == row.warm + row.steps > done:
            _synchronize()
            recorder.stop()
            traces.append(folder / "trace.json")
            recorder.export_chrome_trace(str(traces[-1]))
        return went_on

    Trainer._step = step  # type: ignore[method-assign, assignment]  # only in this program


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--row", default="8K:full", help="as in benchmarks.training; stepsN: steps that are profiled")
    parser.add_argument("--sequences-per-gpu", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    need_gpus(parser)
    measure(parse_row(arguments.row, Row(steps=3)), arguments)


def measure(row: Row, arguments: argparse.Namespace) -> None:
    """Train on this rank; rank 0 profiles, prints the table and saves it."""
    is_main = int(os.environ.get("RANK", 0)) == 0
    traces: list[Path] = []
    # Every rank has the same corpus in a folder of its own; rank 0's run folder holds for all.
    folder = Path(tempfile.gettempdir()) / f"training-profile-{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}"
    world = int(os.environ.get("WORLD_SIZE", 1))
    own = folder / os.environ.get("RANK", "0")
    own.mkdir(parents=True)
    tokens = 2 * (row.warm + row.steps + 2) * row.sequences(world, arguments.sequences_per_gpu) * row.seq_len
    write_corpus(own / "corpus", tokens, model_shape(arguments.model)["vocab_size"], row.documents)
    run_dir = folder / "run"
    sizes = (arguments.sequences_per_gpu, arguments.layers)
    recipe = row.recipe(arguments.model, own / "corpus", run_dir, world, *sizes)
    (own / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    if is_main:
        profiled_steps(row, traces, own)
    code = train.main([str(own / "recipe.yaml"), *row.overrides])
    if code:
        raise SystemExit(code)
    if is_main:
        report(traces[0], row, arguments)
        shutil.rmtree(run_dir)
    shutil.rmtree(own)


def report(trace: Path, row: Row, arguments: argparse.Namespace) -> None:
    """Print the table of a trace and save it."""
    found = kernels(json.loads(trace.read_text()))
    ours = kernel_names() if torch.cuda.is_available() else set()
    groups = shares(found, ours) if found else {}
    whole = sum(groups.values())
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    results = {
        "step_s": whole / row.steps,
        "groups_s": {group: seconds / row.steps for group, seconds in groups.items()},
        "longest": longest(found, ours),
    }
    save(arguments.output, settings, results)
    print(f"\n{arguments.row}, rank 0, {row.steps} steps profiled: {1000 * whole / row.steps:.0f} ms a step\n")
    rows = [["group", "ms a step", "share"]]
    rows += [[name, f"{1000 * value / row.steps:.1f}", f"{value / whole:.1%}"] for name, value in groups.items()]
    print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
