"""A tiny training run that can be disturbed and watched from outside: its processes, output and checkpoints."""

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.trainer_run import ranks_of, write_corpus
from moba_train.checkpoint.manifest import read_manifest
from moba_train.checkpoint.publish import latest_checkpoint, published
from moba_train.telemetry.jsonl import read_records

RANKS = 2
STEPS = 240
EVERY = 4
"""Steps between checkpoints."""

_BATCH = 256
_VOCAB = 64
_LIBC = ctypes.CDLL(None)
_CLOCK = """
import os, time
_time = time.time
def _shifted():
    try:
        return _time() + float(open(os.environ["CHAOS_CLOCK"]).read())
    except (OSError, ValueError):
        return _time()
time.time = _shifted
"""
"""A sitecustomize module: the clock of the run jumps by the seconds in the file $CHAOS_CLOCK."""


class ChaosRun:
    """A run folder below `folder`, and the command that trains in it on two ranks for `steps` steps: torchrun, or with
    `fork` an agent that restarts ranks faster (`chaos_launch`)."""

    def __init__(self, folder: Path, fork: bool, steps: int = STEPS, timeout_s: int = 120) -> None:
        self.folder = folder
        self.fork = fork
        self.steps = steps
        self.timeout_s = timeout_s
        self.checkpoints = folder / "run" / "checkpoints"
        self.faults = folder / "faults"
        self.corpus = folder / "corpus"
        self.launches = 0
        self.lines: list[str] = []
        self._launcher: subprocess.Popen[str] | None = None
        self.faults.mkdir(parents=True, exist_ok=True)
        if not Path(f"{self.corpus}.idx").exists():
            write_corpus(self.corpus, 2 * self.steps * _BATCH, _VOCAB)
        (folder / "sitecustomize.py").write_text(_CLOCK)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(self._recipe()))

    def second(self) -> "ChaosRun":
        """A second trainer for the same folder."""
        return ChaosRun(self.folder, self.fork, self.steps, self.timeout_s)

    def _recipe(self) -> dict[str, Any]:
        half = self.steps // 2 * _BATCH
        return {
            "name": "chaos",
            "run_dir": str(self.folder / "run"),
            "model": {
                "vocab_size": _VOCAB,
                "hidden_size": 32,
                "intermediate_size": 64,
                "layers": 2,
                "heads": 2,
                "kv_heads": 2,
            },
            "attention": {"full_layers": "last:1", "moba": {"block_size": 16, "topk": 2}},
            "data": {"train": [{"path": str(self.corpus)}]},
            "batch_tokens": _BATCH,
            "micro_batch_size": 2,
            "stages": [
                {
                    "name": "short",
                    "seq_len": 32,
                    "tokens": half,
                    "micro_batch_size": 4,
                    "attention": {"default": "full"},
                },
                {"name": "long", "seq_len": 64, "tokens": half, "micro_batch_size": 2},
            ],
            "parallel": {"timeout": self.timeout_s},
            "checkpoint": {"every": EVERY, "keep_last": 3},
            "telemetry": {"log_every": 4, "report": False},
        }

    def launch(self) -> None:
        """Start the training command, the first time or again."""
        self.launches += 1
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1000"]
        inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
        launcher = ["benchmarks.chaos_launch", str(RANKS)] if self.fork else [*torchrun, "-m", "benchmarks.chaos_rank"]
        environment = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CHAOS_CLOCK": str(self.folder / "clock"),
            "CHAOS_FAULTS": str(self.faults),
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(Path(__file__).parent.parent), *inherited]),
        }
        self._launcher = self._start(["-m", *launcher, str(self.folder / "recipe.yaml")], environment)
        threading.Thread(target=self._listen, args=(self._launcher,), daemon=True).start()

    def _start(self, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start Python with these arguments, and what the environment lacks."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_obey_permissions,
            env=os.environ | environment,
        )

    def _listen(self, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stdout is not None
        self.lines.extend(iter(launcher.stdout.readline, ""))

    @property
    def launcher(self) -> subprocess.Popen[str]:
        """torchrun's agent."""
        assert self._launcher is not None
        return self._launcher

    @property
    def ended(self) -> bool:
        """Whether the last command has ended."""
        return self.launcher.poll() is not None

    @property
    def finished(self) -> bool:
        """Whether all steps are done and saved."""
        return self.ended and self.saved_step == self.steps

    @property
    def saved_step(self) -> int:
        """Step of the newest published checkpoint, 0 without one."""
        return max((step for step, _ in published(self.checkpoints)), default=0)

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written, or was when its writer died."""
        return any(self.checkpoints.glob(".tmp-step_*"))

    def starts(self) -> list[int]:
        """The step at which each restart attempt began to train, newest last."""
        found = (re.search(r"(?:resume|stage) at step (\d+): (resumed|stage short)", line) for line in list(self.lines))
        return [int(match[1]) for match in found if match and (match[2] == "resumed" or match[1] == "0")]

    def logged_step(self) -> int:
        """The newest step on the console since the last start; 0 before the first."""
        for line in reversed(self.lines):
            if line.startswith("step "):
                return int(line.split()[1].partition("/")[0])
            if " at step " in line and "resume" in line:
                return 0
        return 0

    def metric_steps(self) -> list[int]:
        """Steps of the metrics in metrics.jsonl, in the order of the file."""
        records = read_records(self.checkpoints.parent / "metrics.jsonl")
        return [record["step"] for record in records if record["type"] == "metrics"]

    def says(self, text: str, first: int = 0) -> bool:
        """Whether a line of output from number `first` on contains `text`."""
        return any(text in line for line in self.lines[first:])

    def wait(self, condition: Callable[[], object], timeout_s: float = 180, what: str = "") -> bool:
        """Wait until `condition` is true (True) or the command has ended (False)."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.ended:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what or condition} not within {timeout_s} s; the last lines:\n{self.tail()}")
            time.sleep(0.01)
        return True

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the command has ended."""
        self.wait(lambda: False, timeout_s, "the end of the command")

    def tail(self) -> str:
        """The end of the output."""
        return "".join(self.lines[-40:])[-2500:]

    def state(self) -> dict[str, str]:
        """SHA-256 of the newest checkpoint's tensors (model, optimizer, random states), by file."""
        path = latest_checkpoint(self.checkpoints)
        assert path is not None
        return {name: entry["sha256"] for name, entry in read_manifest(path).items() if name.endswith(".safetensors")}

    def end(self) -> None:
        """Kill the processes that still run."""
        ranks = ranks_of(self.launcher.pid)
        self.launcher.kill()
        for process in ranks:
            with suppress(ProcessLookupError):
                os.kill(process, 9)
        self.launcher.wait()


def _obey_permissions() -> None:
    """Called in the child before torchrun starts: takes from root the right to write where permissions forbid it."""
    drop_bounding = 24
    dac_override = 1
    _LIBC.prctl(drop_bounding, dac_override)
