"""Tokens per second and memory of the real trainer on a mixture of experts, and on the dense model whose tokens pass
through as many weights, by turns.

    python -m benchmarks.experts --output benchmarks/results/experts-h200.json
    python -m benchmarks.experts --gpus 4 --ep 4 --output benchmarks/results/experts-h200-x4.json

On a GPU the mixture has 5.1B parameters, 64 experts of 768 columns in each of 16 layers, of which 8 are active: 0.9B
without embeddings. The dense model has a feed-forward of 6,144 columns. Without a GPU both are tiny. Sequences are
packed documents of random tokens, attention is MoBA (blocks of 512 keys, top 8) or, by --attention, full.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.trainer_run import WARM_UP_STEPS, launch_until, recipe, write_corpus
from moba_train.telemetry.jsonl import read_records

ON_GPU = {"hidden_size": 2048, "layers": 16, "heads": 32, "kv_heads": 4, "head_dim": 128, "vocab_size": 32_000}
ON_CPU = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab_size": 256}
KEYS = ("tokens_per_s_per_device", "step_s", "mfu", "memory_gib", "expert_load_max")


def shapes(on_gpu: bool) -> dict[str, dict[str, Any]]:
    """The section `model` of each arm."""
    shape = (ON_GPU if on_gpu else ON_CPU) | {"qk_norm": True, "tie_embeddings": True}
    width, active, experts = (768, 8, 64) if on_gpu else (16, 2, 8)
    moe = {"experts": experts, "active": active, "intermediate_size": width}
    return {
        "dense": shape | {"intermediate_size": active * width},
        "experts": shape | {"intermediate_size": active * width, "moe": moe},
    }


def measure(arm: str, model: dict[str, Any], folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Spreads of the metrics of a few steady steps."""
    run_dir = folder / arm
    steps = WARM_UP_STEPS + arguments.steps
    content = recipe(
        "tiny", folder / "corpus", run_dir, arguments.length, arguments.sequences * arguments.gpus, steps + 2,
        model=model,
        attention={"default": arguments.attention, "moba": {"block_size": arguments.length // 16, "topk": 8}},
        parallel={"ep": arguments.ep if arm == "experts" else 1},
        compile=torch.cuda.is_available(),
        activation_checkpointing=arguments.policy,
        checkpoint={"every": None},
    )  # fmt: skip
    metrics = run_dir / "metrics.jsonl"

    def records() -> list[dict[str, Any]]:
        return [record for record in read_records(metrics) if "loss" in record] if metrics.exists() else []

    launch_until(lambda: len(records()) >= steps, content, folder / f"{arm}.yaml", arguments.gpus)
    steady = records()[WARM_UP_STEPS:]
    return {key: spread([record[key] for record in steady]) for key in KEYS if key in steady[0]}


def main() -> None:
    """Measure both arms, save the results and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="parallel.ep of the mixture")
    parser.add_argument("--length", type=int, default=8192 if torch.cuda.is_available() else 256, help="tokens")
    parser.add_argument("--sequences", type=int, default=2, help="sequences of a GPU and step")
    parser.add_argument("--steps", type=int, default=15, help="steps that are measured")
    parser.add_argument("--attention", choices=["moba", "full"], default="moba")
    parser.add_argument("--policy", choices=["none", "selective", "full", "budget"], default="selective")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        need_gpus(parser, arguments.gpus)
    arms = shapes(torch.cuda.is_available())
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = (arguments.steps + WARM_UP_STEPS + 4) * arguments.sequences * arguments.gpus * arguments.length
        write_corpus(folder / "corpus", 2 * tokens, arms["dense"]["vocab_size"])
        for arm, model in arms.items():
            results[arm] = measure(arm, model, folder, arguments)
            save(arguments.output, {key: value for key, value in vars(arguments).items() if key != "output"}, results)
    rows = [["model", *KEYS]]
    for arm, found in results.items():
        rows.append([arm, *(f"{found[key]['median']:.4g}" if key in found else "" for key in KEYS)])
    print(markdown(rows))


if __name__ == "__main__":
    main()
