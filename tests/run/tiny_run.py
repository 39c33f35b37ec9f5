"""A corpus of structured random text and a recipe small enough to train in seconds."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.health.dump import dump_folder
from moba_train.strict_json import from_json
from moba_train.telemetry.jsonl import read_records
from moba_train.train import main
from tests.forked_program import ForkedProgram

VOCAB = 64


def write_corpus(prefix: Path, documents: int, seed: int, lengths: tuple[int, int] = (20, 400)) -> None:
    """Documents of so many tokens in which a token mostly follows from the one before, so that the loss can fall."""
    rng = np.random.default_rng(seed)
    following = np.random.default_rng(0).permutation(VOCAB)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            length = int(rng.integers(*lengths))
            tokens = np.empty(length, dtype=np.uint16)
            tokens[0] = rng.integers(VOCAB)
            noise = rng.random(length) < 0.1
            for i in range(1, length):
                tokens[i] = rng.integers(VOCAB) if noise[i] else following[tokens[i - 1]]
            writer.add_document(tokens)


def checkpoint_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = CheckpointReader(path)
    return {name: reader.read(name) for name in reader.tensors}


def assert_same_tensors(one: Path, other: Path) -> None:
    """Two checkpoints hold the same bits: weights, optimizer and random state."""
    ours, theirs = checkpoint_tensors(one), checkpoint_tensors(other)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optim.") for name in ours)
    assert any(name.startswith("rng.") for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def assert_like_one_gpu(shared: dict[str, Any], alone: dict[str, Any]) -> None:
    """The curves of a run on two GPUs are one GPU's, as far as bf16 goes: it changes a choice of blocks here and there,
    and training carries that on."""
    assert shared["loss"][0] == pytest.approx(alone["loss"][0], rel=1e-3)
    assert shared["grad_norm"][0] == pytest.approx(alone["grad_norm"][0], rel=2e-2)
    assert shared["loss"] == pytest.approx(alone["loss"], rel=5e-2)
    assert shared["loss_tokens"] == alone["loss_tokens"]


def assert_same_training(got: dict[str, Any], want: dict[str, Any]) -> None:
    """The curves of a run are those of another one: counts exactly, numbers up to rounding."""
    for key, values in want.items():
        exact = key in ("step", "tokens", "loss_tokens", "ranks_with_zero_loss_tokens")
        assert got[key] == (values if exact else pytest.approx(values, rel=1e-4)), key


class Run:
    """A recipe on disk and the means to train it, here or in processes of its own."""

    def __init__(self, folder: Path, corpora: Path) -> None:
        self.folder = folder
        self.recipe: dict[str, Any] = {
            "name": "test",
            "run_dir": str(folder / "run"),
            "seed": 3,
            "model": {
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 64,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
            },
            "attention": {"full_layers": "last:1", "moba": {"block_size": 16, "topk": 2}},
            "data": {
                "train": [
                    {"path": str(corpora / "one"), "weight": 3},
                    {"path": str(corpora / "two"), "weight": 1},
                ],
                "validation": [{"path": str(corpora / "valid")}],
            },
            "batch_tokens": 512,
            "optim": {"lr": 0.01, "schedule": {"warmup_tokens": 1000}},
            "stages": [
                {
                    "name": "short",
                    "seq_len": 64,
                    "tokens": 6 * 512,
                    "micro_batch_size": 4,
                    "attention": {"default": "full"},
                },
                {
                    "name": "long",
                    "seq_len": 128,
                    "tokens": 6 * 512,
                    "micro_batch_size": 2,
                    "rope": {"kind": "abf", "theta": 50000},
                },
            ],
            "checkpoint": {"every": 4},
            "evaluation": {"every": 6, "sequences": 5},
            "telemetry": {"console": False, "report": False, "wandb": {"mode": "disabled"}},
        }

    @property
    def run_dir(self) -> Path:
        return Path(self.recipe["run_dir"])

    @property
    def newest_checkpoint(self) -> Path:
        """There is one."""
        path = latest_checkpoint(self.run_dir / "checkpoints")
        assert path is not None
        return path

    def take_over(self, other: "Run", step: int) -> None:
        """Begin where a kill after `step`, which `other` has saved, would leave this run: with all the later records,
        without the later checkpoints."""
        shutil.copytree(other.run_dir, self.run_dir)
        saved = {int(path.name.removeprefix("step_")): path for path in self.run_dir.glob("checkpoints/step_*")}
        assert step in saved
        for path in (path for at, path in saved.items() if at > step):
            shutil.rmtree(path)

    def write_recipe(self) -> Path:
        """The recipe as a file."""
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.recipe))
        return path

    def train_here(self, *arguments: str) -> int:
        """Train to the end on one rank in this process, which spares the start of another; returns the exit code."""
        return main([str(self.write_recipe()), *arguments])

    def use_short_documents(self) -> None:
        """Train on documents of 20 to 79 tokens, without validation, whose pass would be compiled as well."""
        write_corpus(self.folder / "short", 60, 0, lengths=(20, 80))
        self.recipe["data"] = {"train": [{"path": str(self.folder / "short")}]}

    def start(self, ranks: int, *arguments: str) -> ForkedProgram:
        """Launch training on the CPU; one rank runs without torchrun."""
        return ForkedProgram(self._command(ranks, arguments), self.folder / "output")

    def start_on_gpu(self, ranks: int, *arguments: str) -> subprocess.Popen[str]:
        """Launch training on GPUs; one rank runs without torchrun."""
        return subprocess.Popen(
            [sys.executable, *self._command(ranks, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )

    def _command(self, ranks: int, arguments: Sequence[str]) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return [*torchrun, "-m", "moba_train.train", str(self.write_recipe()), *arguments]

    def train_on_gpu(self, ranks: int = 1, *arguments: str, seconds: float = 240) -> tuple[int, str]:
        """Train to the end on GPUs, which may take so many seconds; returns (exit code, all output)."""
        process = self.start_on_gpu(ranks, *arguments)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            raise
        return process.returncode, output

    def records(self, record_type: str = "metrics") -> list[dict[str, Any]]:
        """The records of one type in the run's metrics.jsonl."""
        return [record for record in read_records(self.run_dir / "metrics.jsonl") if record["type"] == record_type]

    def dump(self, step: int) -> dict[str, Any]:
        """What was written down of the spike in a step."""
        found: dict[str, Any] = from_json((dump_folder(self.run_dir) / f"step_{step:08d}.json").read_text())
        return found

    def losses(self) -> list[float]:
        """Training loss of every step."""
        return [record["loss"] for record in self.records()]
