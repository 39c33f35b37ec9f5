"""Policies for activations in the real trainer: tokens per second, predicted and measured memory, the same losses.

    python -m benchmarks.activations --model llama-1b --seq-len 32K --output benchmarks/results/activations-1b-h200.json

Every policy trains the same few steps, compiled, one sequence for each GPU (or for all, with --cp). Fails where the
predicted memory is more than 10 % off, or where the losses are not those of the first policy to 1 %.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.options import length
from benchmarks.record import save, spread
from benchmarks.trainer_run import launch_until, model_shape, recipe, write_corpus
from moba_train.telemetry.jsonl import read_records

STEPS, WARM_UP = 8, 4
POLICIES: dict[str, dict[str, Any]] = {
    "none": {"activation_checkpointing": "none"},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "full, offload": {"activation_checkpointing": "full", "activation_offload": True},
    "selective, offload": {"activation_checkpointing": "selective", "activation_offload": True},
    "budget": {},
    "budget, offload": {"activation_offload": True},
}


def measure(policy: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train until `STEPS` steps are logged; what was decided and predicted, and what came out."""
    run_dir = folder / "-".join(policy.split(", "))
    sequences = arguments.gpus // arguments.cp
    changes = {
        "compile": not arguments.eager,
        "parallel": {"cp": arguments.cp},
        "attention": arguments.attention,
        "stages": [{"name": "only", "seq_len": arguments.seq_len, "tokens": 1000 * sequences * arguments.seq_len}],
        **POLICIES[policy],
    }
    variant = recipe(arguments.model, folder / "corpus", run_dir, arguments.seq_len, sequences, STEPS, **changes)

    def losses() -> list[dict[str, Any]]:
        file = run_dir / "metrics.jsonl"
        return [record for record in read_records(file) if "loss" in record] if file.exists() else []

    launch_until(lambda: len(losses()) >= STEPS, variant, run_dir.with_suffix(".yaml"), arguments.gpus)
    decided = [record for record in read_records(run_dir / "metrics.jsonl") if record["type"] == "activations"]
    steady = losses()[WARM_UP:STEPS]
    keys = ("tokens_per_s_per_device", "memory_gib")
    return {key: spread([record[key] for record in steady]) for key in keys if key in steady[0]} | {
        "decided": decided[0]["message"] if decided else "nothing recomputed",
        "predicted_gib": decided[0]["predicted_memory_gib"] if decided else None,
        "loss": [record["loss"] for record in losses()[:STEPS]],
    }


def problems(results: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as it must be."""
    found = []
    first = next(iter(results.values()))["loss"]
    for policy, result in results.items():
        if any(abs(one - other) > 0.01 * other for one, other in zip(result["loss"], first, strict=True)):
            found.append(f"{policy}: losses {result['loss']}, those of the first policy {first}")
        if "memory_gib" in result:
            measured = result["memory_gib"]["median"]
            if abs(result["predicted_gib"] - measured) > 0.1 * measured:
                found.append(f"{policy}: {result['predicted_gib']:.1f} GiB predicted, {measured:.1f} GiB measured")
    return found


def main() -> None:
    """Run the policies and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="a file in configs/models")
    parser.add_argument("--seq-len", type=length, default=32768)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--attention", type=yaml.safe_load, default={"default": "full"}, help="the recipe's, as YAML")
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["none", "selective", "full", "full, offload"]
    )
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        vocabulary = model_shape(arguments.model)["vocab_size"]
        write_corpus(Path(name) / "corpus", 4 * STEPS * arguments.gpus * arguments.seq_len, vocabulary)
        for policy in arguments.policies:
            results[policy] = measure(policy, Path(name), arguments)
    if arguments.output:
        settings = {key: value for key, value in vars(arguments).items() if key != "output"}
        save(arguments.output, settings, results)
    for policy, result in results.items():
        speed = result.get("tokens_per_s_per_device", {}).get("median", 0)
        memory = result.get("memory_gib", {}).get("median", 0)
        print(f"{policy:20} {speed:9.0f} tokens/s/GPU {memory:6.1f} GiB; {result['decided']}")
    if found := problems(results):
        sys.exit("\n".join(found))
    print(f"memory and losses agree ({torch.__version__})")


if __name__ == "__main__":
    main()
