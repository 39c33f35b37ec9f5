"""Tokens per second and MFU of the real trainer on a model shape, all GPUs of this machine.

    python -m benchmarks.training --gpus 2 --output benchmarks/results/training-1b-h200-x2.json

Each variant is a recipe, launched by torchrun like any other; the numbers are read from its metrics.jsonl. Tokens are
random (never zeros); the first steps, which compile and allocate, are left out.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.record import save, spread
from moba_train.data.indexed import IndexedDatasetWriter
from moba_train.telemetry.jsonl import read_records

WARM_UP_STEPS = 5
MODEL = Path(__file__).parent.parent / "configs" / "models"

_FULL = {"attention": {"default": "full"}}
_MOBA = {"attention": {"full_layers": "last:3", "moba": {"block_size": 512, "topk": 3}}}
_RECOMPUTED = {"activation_checkpointing": "full"}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": _FULL,
    "full, compiled": _FULL | {"compile": True},
    "full, recomputed": _FULL | _RECOMPUTED,
    "MoBA 512/3, last 3 full": _MOBA,
    "MoBA 512/3, last 3 full, compiled": _MOBA | {"compile": True},
    "MoBA 512/3, last 3 full, recomputed": _MOBA | _RECOMPUTED,
}
"""`compiled`: torch.compile of every block; `recomputed`: activation_checkpointing full."""


def write_corpus(prefix: Path, tokens: int, vocab_size: int) -> None:
    """Documents of 4K to 64K random tokens."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        while writer.tokens < tokens:
            length = int(2 ** rng.uniform(12, 16))
            writer.add_document(rng.integers(vocab_size, size=length, dtype=np.int32))


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps and summarise them."""
    variant = VARIANTS[name]
    sequences = arguments.gpus * arguments.sequences_per_gpu
    recipe = {
        "extends": str(MODEL / f"{arguments.model}.yaml"),
        "name": "benchmark",
        "run_dir": str(folder / f"run{list(VARIANTS).index(name)}"),
        "data": {"train": [{"path": str(folder / "corpus")}]},
        "batch_tokens": sequences * arguments.seq_len,
        "micro_batch_size": arguments.sequences_per_gpu,
        "stages": [
            {"name": "only", "seq_len": arguments.seq_len, "tokens": arguments.steps * sequences * arguments.seq_len}
        ],
        "checkpoint": {"every": 10**6},
        "telemetry": {"wandb": {"mode": "disabled"}, "console": False},
        **variant,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.gpus)]
    done = subprocess.run(
        [*launch, "-m", "moba_train.train", str(path), "--stop-at-step", str(arguments.steps)],
        capture_output=True,
        text=True,
        check=False,
    )
    run_dir = Path(recipe["run_dir"])
    records = read_records(run_dir / "metrics.jsonl") if done.returncode == 0 else []
    shutil.rmtree(run_dir, ignore_errors=True)  # its last checkpoint is many gigabytes
    if done.returncode:
        return {"error": next(line for line in done.stderr.splitlines() if "rror" in line), "log": done.stderr[:4000]}
    records = [record for record in records if "loss" in record]
    steady = records[WARM_UP_STEPS:]
    keys = ("tokens_per_s_per_device", "mfu", "mfu_dense", "step_s", "data_s", "memory_gib")
    return {key: spread([record[key] for record in steady]) for key in keys if key in steady[0]} | {
        "steps": len(steady)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--sequences-per-gpu", type=int, default=2, help="sequences per GPU and optimizer step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        vocab_size = yaml.safe_load((MODEL / f"{arguments.model}.yaml").read_text())["model"]["vocab_size"]
        needed = arguments.steps * arguments.gpus * arguments.sequences_per_gpu * arguments.seq_len
        write_corpus(Path(temporary) / "corpus", 2 * needed, vocab_size)
        for name in arguments.variants:
            results[name] = measure(name, Path(temporary), arguments)
            shown = results[name].get("error") or {
                key: value["median"] for key, value in results[name].items() if key != "steps"
            }
            print(f"{name:<45} {shown}", flush=True)
            settings = {key: value for key, value in vars(arguments).items() if key not in ("output", "variants")}
            save(arguments.output, settings, results)


if __name__ == "__main__":
    main()
