"""Launches the real trainer for benchmarks: torchrun with a recipe of random tokens."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import numpy as np
import yaml

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.load import load_config
from moba_train.config.mesh import WorldSize
from moba_train.memory.devices import Device, local_gpu, local_host_memory
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.plan.plan import StagePlan, make_plan
from moba_train.tools.plan.step_time import make_machine

Found = TypeVar("Found")
MODELS = Path(__file__).parent.parent / "configs" / "models"
WARM_UP_STEPS = 5
"""First steps that are left out of all numbers, because they compile and allocate."""


def model_shape(model: str) -> dict[str, Any]:
    """The section `model` of configs/models/MODEL.yaml."""
    shape: dict[str, Any] = yaml.safe_load((MODELS / f"{model}.yaml").read_text())["model"]
    return shape


def write_corpus(prefix: Path, tokens: int, vocab_size: int, documents: Literal["packed", "long"] = "packed") -> None:
    """Write a corpus of at least `tokens` random tokens: packed, in documents of 4K to 64K; long, in one document, so
    that every sequence lies inside it."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        while writer.tokens < tokens:
            size = tokens if documents == "long" else int(2 ** rng.uniform(12, 16))
            writer.add_document(rng.integers(vocab_size, size=size, dtype=np.int32))


def recipe(
    model: str, corpus: Path, run_dir: Path, seq_len: int, sequences: int, steps: int, /, **other: Any
) -> dict[str, Any]:
    """A recipe with one stage of `steps` optimizer steps of `sequences` sequences, saved at its end only; `other` keys
    replace these."""
    return {
        "extends": str(MODELS / f"{model}.yaml"),
        "name": "benchmark",
        "run_dir": str(run_dir),
        "data": {"train": [{"path": str(corpus)}]},
        "batch_tokens": sequences * seq_len,
        "stages": [{"name": "only", "seq_len": seq_len, "tokens": steps * sequences * seq_len}],
        "checkpoint": {"every": 10**6},
        "telemetry": {"console": False, "report": False},
        **other,
    }


def planned_here(file: Path, overrides: Sequence[str], ranks: int) -> StagePlan:
    """What `moba-train plan` says of a recipe with one stage on `ranks` GPUs of this machine.

    Without GPUs, nothing limits memory. overrides: `key.path=value`.
    """
    gpu = local_gpu()
    device = Device(gpu, local_host_memory(ranks)) if gpu is not None else None
    run = resolve_unchecked(load_config(file, list(overrides))).on(WorldSize(ranks, ranks), device)
    (stage,) = make_plan(run, make_machine(gpu, ranks, 400.0, None, gpu is not None)).stages
    return stage


def launch(content: dict[str, Any], file: Path, ranks: int, **how: Any) -> subprocess.CompletedProcess[str]:
    """Write the recipe `content` to `file` and train it on `ranks` ranks; `how` is passed to `subprocess.run`."""
    return subprocess.run(trainer_command(content, file, ranks), text=True, **how)


def side_by_side(jobs: Sequence[Callable[[], Found]], at_once: int) -> Iterator[Found]:
    """What each job returns, as it ends; at most `at_once` run together. When a job raises, those that have not begun
    never do."""
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(job) for job in jobs]
        try:
            for job in as_completed(waiting):
                yield job.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def launch_until(enough: Callable[[], bool], content: dict[str, Any], file: Path, ranks: int) -> None:
    """Write the recipe `content` to `file`, train it on `ranks` ranks, and kill the run as `run_until` does."""
    run_until(enough, trainer_command(content, file, ranks))


def run_until(
    enough: Callable[[], bool], command: list[str], limit_s: float = math.inf, output: IO[str] | None = None
) -> None:
    """Start torchrun by `command` and kill it with all its ranks once `enough` returns True, or after `limit_s`
    seconds. `output`: file that takes what it prints.

    Raises RuntimeError when it ends before, TimeoutError when it took too long.
    """
    began = time.monotonic()
    launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT if output else None)
    try:
        while not enough():
            if launcher.poll() is not None:
                raise RuntimeError(
                    f"training ended with status {launcher.returncode} before there was enough to measure"
                )
            if time.monotonic() - began > limit_s:
                raise TimeoutError(f"not enough to measure after {limit_s:.0f} s")
            time.sleep(0.2)
    finally:
        processes = [launcher.pid, *ranks_of(launcher.pid)]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launcher.wait()
        while any(map(is_running, processes)):
            time.sleep(0.1)


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the running ranks that a torchrun process started, in the order of ranks."""
    with suppress(ProcessLookupError, FileNotFoundError):  # torchrun itself has ended
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return [child for child in map(int, children) if is_running(child)]
    return []


def is_running(process: int) -> bool:
    """Whether the process exists and is no zombie."""
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def trainer_command(
    content: dict[str, Any], file: Path, ranks: int, *overrides: str, program: str = "moba_train.train"
) -> list[str]:
    """The command that trains the recipe `content`, which is written to `file`; overrides: `key.path=value`."""
    file.write_text(yaml.safe_dump(content))
    return [*torchrun(ranks), program, str(file), *overrides]


def torchrun(ranks: int) -> list[str]:
    """The beginning of a command that starts a module, named next, on `ranks` ranks of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
