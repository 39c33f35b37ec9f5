"""Tokens per second and MFU of the real trainer on a model shape, all GPUs of this machine.

    python -m benchmarks.training --gpus 2 --output benchmarks/results/training-1b-h200-x2.json

Each variant is a recipe, launched by torchrun; the numbers are read from its metrics.jsonl. Tokens are random (never
zeros); the first steps, which compile and allocate, are left out.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.options import length, need_gpus
from benchmarks.record import save, spread
from benchmarks.trainer_run import WARM_UP_STEPS, launch, model_shape, recipe, write_corpus
from moba_train.telemetry.jsonl import read_records

_FULL = {"attention": {"default": "full"}}
_MOBA = {"attention": {"full_layers": "last:3", "moba": {"block_size": 512, "topk": 3}}}
_COMPILED = {"compile": True}
_FP8 = {"precision": {"linear": "fp8"}}
_FP8_ROWWISE = {"precision": {"linear": "fp8", "fp8": {"scaling": "rowwise"}}}
_RECOMPUTED = {"activation_checkpointing": "full"}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": _FULL,
    "full, compiled": _FULL | _COMPILED,
    "full, compiled, fp8": _FULL | _COMPILED | _FP8,
    "full, compiled, fp8 rowwise": _FULL | _COMPILED | _FP8_ROWWISE,
    "full, recomputed": _FULL | _RECOMPUTED,
    "MoBA 512/3, last 3 full": _MOBA,
    "MoBA 512/3, last 3 full, compiled": _MOBA | _COMPILED,
    "MoBA 512/3, last 3 full, compiled, fp8": _MOBA | _COMPILED | _FP8,
    "MoBA 512/3, last 3 full, recomputed": _MOBA | _RECOMPUTED,
}
"""Recipe keys of the variants; compiled: torch.compile of every block; fp8: linear layers in FP8; recomputed: full
activation checkpointing."""


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps; returns spreads of the steady steps' metrics, or the error and the log."""
    sequences = arguments.gpus * arguments.sequences_per_gpu
    run_dir = folder / "run"
    own = {"micro_batch_size": arguments.sequences_per_gpu, "parallel": {"tp": arguments.tp}, **VARIANTS[name]}
    variant = recipe(arguments.model, folder / "corpus", run_dir, arguments.seq_len, sequences, arguments.steps, **own)
    done = launch(variant, folder / "recipe.yaml", arguments.gpus, capture_output=True)
    records = read_records(run_dir / "metrics.jsonl") if done.returncode == 0 else []
    shutil.rmtree(run_dir, ignore_errors=True)  # its last checkpoint is many gigabytes
    if done.returncode:
        return {
            "error": next((line for line in done.stderr.splitlines() if "rror" in line), ""),
            "log": done.stderr[:4000],
        }
    records = [record for record in records if "loss" in record]
    steady = records[WARM_UP_STEPS:]
    keys = ("tokens_per_s_per_device", "mfu", "mfu_dense", "step_s", "data_s", "memory_gib")
    return {key: spread([record[key] for record in steady]) for key in keys if key in steady[0]} | {
        "steps": len(steady)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer; the others, sequences")
    parser.add_argument("--seq-len", type=length, default=8192)
    parser.add_argument("--sequences-per-gpu", type=int, default=2, help="sequences per GPU and optimizer step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    need_gpus(parser, arguments.gpus)
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        needed = arguments.steps * arguments.gpus * arguments.sequences_per_gpu * arguments.seq_len
        write_corpus(Path(temporary) / "corpus", 2 * needed, model_shape(arguments.model)["vocab_size"])
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
