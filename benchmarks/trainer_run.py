"""The real trainer as benchmarks run it: a recipe of random tokens, launched by torchrun like any other."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moba_train.data.indexed import IndexedDatasetWriter

MODELS = Path(__file__).parent.parent / "configs" / "models"
WARM_UP_STEPS = 5
"""The first steps compile and allocate: no number is taken from them."""


def model_shape(model: str) -> dict[str, Any]:
    """The section `model` of a file of configs/models."""
    shape: dict[str, Any] = yaml.safe_load((MODELS / f"{model}.yaml").read_text())["model"]
    return shape


def write_corpus(prefix: Path, tokens: int, vocab_size: int) -> None:
    """Documents of 4K to 64K random tokens."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        while writer.tokens < tokens:
            size = int(2 ** rng.uniform(12, 16))
            writer.add_document(rng.integers(vocab_size, size=size, dtype=np.int32))


def recipe(
    model: str, corpus: Path, run_dir: Path, seq_len: int, sequences: int, steps: int, /, **other: Any
) -> dict[str, Any]:
    """One stage of `steps` optimizer steps of `sequences` sequences, saved at its end alone; `other` keys replace."""
    return {
        "extends": str(MODELS / f"{model}.yaml"),
        "name": "benchmark",
        "run_dir": str(run_dir),
        "data": {"train": [{"path": str(corpus)}]},
        "batch_tokens": sequences * seq_len,
        "stages": [{"name": "only", "seq_len": seq_len, "tokens": steps * sequences * seq_len}],
        "checkpoint": {"every": 10**6},
        "telemetry": {"wandb": {"mode": "disabled"}, "console": False},
        **other,
    }


def launch(content: dict[str, Any], file: Path, ranks: int, **how: Any) -> subprocess.CompletedProcess[str]:
    """Write the recipe `content` to `file` and train it on so many ranks; `how` goes to `subprocess.run`."""
    file.write_text(yaml.safe_dump(content))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*torchrun, "-m", "moba_train.train", str(file)], text=True, **how)
