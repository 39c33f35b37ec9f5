"""Where the time of a training step goes: kernels of the real trainer, in groups, and what its host did meanwhile.

    torchrun --nproc-per-node 2 -m benchmarks.training_profile --model llama3-8b --row 8K:full \\
        --output benchmarks/results/training-profile-8b-h200-x2.json

It trains the recipe of a row of `benchmarks.training` with torch.profiler around a few steps of every rank. Every
moment of these steps counts once: for the group of a kernel that computes, else for communication that nothing hides,
else as idle. Matrix products of the loss are in `matrix products`; `loss` is its softmax. Beside that: what the host
did while its GPU was idle, how long collectives waited for the last rank, and, in the profiled steps, allocations of
GPU memory and Python's garbage collection. The profiler itself slows the host down.
"""

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from benchmarks import step_trace
from benchmarks.options import need_gpus
from benchmarks.record import markdown, save
from benchmarks.step_trace import Kernel
from benchmarks.timing import kernel_names
from benchmarks.trainer_run import model_shape, write_corpus
from benchmarks.training_rows import Row, parse_row
from moba_train import train
from moba_train.run.trainer import Trainer

_ALLOCATOR = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams")
_WAIT_S = 120.0
"""For the other ranks' summaries, once a rank has its own."""


@dataclass
class Recorder:
    """Profiles `row.steps` steps of the trainer of this process, after `row.warm`."""

    row: Row
    trace: Path
    """File that the trace is written to."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of each profiled step, on the host; a step waits for its loss, not for its update."""
    collected_s: float = 0.0
    """Seconds of Python's garbage collection."""
    allocator: dict[str, int] = field(default_factory=dict)
    """Calls of the caching allocator."""

    def install(self) -> None:
        """Let every `Trainer` of this process be profiled."""
        take_step = Trainer._step
        recorder = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])

        def step(trainer: Trainer, *arguments: Any) -> None:
            done = trainer.progress.step
            if done == self.row.warm:
                self._begin()
                recorder.start()
            began = time.perf_counter()
            take_step(trainer, *arguments)
            if trainer.progress.step > done >= self.row.warm and not self.trace.exists():
                self.step_s.append(time.perf_counter() - began)
            if trainer.progress.step == self.row.warm + self.row.steps > done:
                self._end()
                recorder.stop()
                recorder.export_chrome_trace(str(self.trace))

        Trainer._step = step  # type: ignore[method-assign, assignment]  # only in this program

    def _begin(self) -> None:
        _synchronize()
        self.allocator = {name: -count for name, count in _allocator().items()}
        gc.callbacks.append(self._collecting)

    def _end(self) -> None:
        _synchronize()
        gc.callbacks.remove(self._collecting)
        self.allocator = {name: count + self.allocator[name] for name, count in _allocator().items()}

    def _collecting(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        self.collected_s += -now if phase == "start" else now


def _allocator() -> dict[str, int]:
    return {name: torch.cuda.memory_stats().get(name, 0) if torch.cuda.is_available() else 0 for name in _ALLOCATOR}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--row", default="8K:full", help="as in benchmarks.training")
    parser.add_argument("--sequences-per-gpu", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    need_gpus(parser)
    measure(parse_row(arguments.row, Row(steps=3)), arguments)


def measure(row: Row, arguments: argparse.Namespace) -> None:
    """Train on this rank and profile it; rank 0 prints the tables of all ranks and saves them."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with _folder(rank, world) as folder:
        own = folder / str(rank)
        tokens = 2 * (row.warm + row.steps + 2) * row.sequences(world, arguments.sequences_per_gpu) * row.seq_len
        write_corpus(own / "corpus", tokens, model_shape(arguments.model)["vocab_size"], row.documents)
        sizes = (arguments.sequences_per_gpu, arguments.layers)
        recipe = row.recipe(arguments.model, own / "corpus", folder / "run", world, *sizes)
        (own / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        recorder = Recorder(row, own / "trace.json")
        recorder.install()
        if code := train.main([str(own / "recipe.yaml"), *row.overrides]):
            raise SystemExit(code)
        ours = kernel_names() if torch.cuda.is_available() else set()
        _write(own / "summary.json", summary(recorder, ours))
        if rank == 0:
            report([_read(folder / str(other) / "summary.json") for other in range(world)], row, arguments)


@contextmanager
def _folder(rank: int, world: int) -> Iterator[Path]:
    """A temporary folder that all ranks share, with a folder for each, named by its rank; rank 0 removes it."""
    # Every rank has the same corpus in a folder of its own; rank 0's run folder holds for all. The name has the process
    # that all ranks have in common, torchrun's, so that one that was killed is not in the way of the next.
    folder = Path(tempfile.gettempdir()) / f"training-profile-{os.getppid() if world > 1 else os.getpid()}"
    (folder / str(rank)).mkdir(parents=True)
    try:
        yield folder
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def summary(recorder: Recorder, ours: set[str]) -> dict[str, Any]:
    """What is kept of a rank's trace; `ours`: names of the Triton kernels of our attention."""
    trace = json.loads(recorder.trace.read_text())
    found = step_trace.kernels(trace)
    gaps = step_trace.gaps(trace) if found else []
    steps = recorder.row.steps
    return {
        "groups_s": {k: seconds / steps for k, seconds in step_trace.shares(found, ours).items()} if found else {},
        "longest": step_trace.longest(found, ours),
        "idle_by_cause_s": {cause: s / steps for cause, s in list(step_trace.idle_by_cause(gaps).items())[:20]},
        "longest_gaps": [gap._asdict() for gap in gaps[:20]],
        "step_s": recorder.step_s,
        "garbage_collection_s": recorder.collected_s / steps,
        "allocator_calls": recorder.allocator,
        "communication": step_trace.communication(trace),
    }


def report(ranks: list[dict[str, Any]], row: Row, arguments: argparse.Namespace) -> None:
    """Print the summaries of all ranks, and save them."""
    found = [[Kernel(*kernel) for kernel in one.pop("communication")] for one in ranks]
    # Collectives are compared in their order on all ranks, which those of several groups do not have in common.
    one_group = len(ranks) in (row.tp, row.cp, row.pp) or row.tp == row.cp == row.pp == 1
    waits = step_trace.waits(found) if one_group else [{} for _ in ranks]
    for one, waited in zip(ranks, waits, strict=True):
        one["waited_for_last_rank_s"] = {name: seconds / row.steps for name, seconds in waited.items()}
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    save(arguments.output, settings, {"ranks": ranks})
    print(f"\n{arguments.row}, {row.steps} steps profiled\n")
    print(markdown(_table(ranks)))
    for rank, one in enumerate(ranks):
        print(f"\nrank {rank}: the host while its GPU was idle, ms a step")
        print(markdown([["cause", "ms"], *_milliseconds(one["idle_by_cause_s"], 8)]), flush=True)


def _table(ranks: list[dict[str, Any]]) -> list[list[str]]:
    """Milliseconds of a step, one column a rank."""
    groups = {group: None for one in ranks for group in one["groups_s"]}  # in the order of the first rank
    rows = [["ms a step", *(f"rank {rank}" for rank in range(len(ranks)))]]
    rows += [[group, *(f"{1000 * one['groups_s'].get(group, 0.0):.1f}" for one in ranks)] for group in groups]
    rows.append(["all", *(f"{1000 * sum(one['groups_s'].values()):.1f}" for one in ranks)])
    waited = [sum(one["waited_for_last_rank_s"].values()) for one in ranks]
    if any(waited):
        rows.append(["collectives waited for the last rank", *(f"{1000 * seconds:.1f}" for seconds in waited)])
    rows.append(["garbage collection", *(f"{1000 * one['garbage_collection_s']:.1f}" for one in ranks)])
    rows += [[name, *(str(one["allocator_calls"].get(name, 0)) for one in ranks)] for name in _ALLOCATOR]
    rows.append(["steps, s", *(", ".join(f"{s:.2f}" for s in one["step_s"]) for one in ranks)])
    return rows


def _milliseconds(seconds: dict[str, float], count: int) -> list[list[str]]:
    return [[name, f"{1000 * value:.1f}"] for name, value in list(seconds.items())[:count]]


def _write(file: Path, content: dict[str, Any]) -> None:
    """Write the file so that it is complete as soon as it is there."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(file)


def _read(file: Path) -> dict[str, Any]:
    """The content of a file that another rank writes. Raises TimeoutError."""
    end = time.monotonic() + _WAIT_S
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} is not there after {_WAIT_S:.0f} s")
        time.sleep(0.1)
    content: dict[str, Any] = json.loads(file.read_text())
    return content


if __name__ == "__main__":
    main()
