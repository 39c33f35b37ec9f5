"""How long a save stalls training, and whether steps are slower while it is written in the background.

    python -m benchmarks.checkpoint_stall --output benchmarks/results/checkpoint-stall-cpu.json
    python -m benchmarks.checkpoint_stall --model llama3-8b --gpus 4 --seq-len 8192 --sequences-per-rank 1 \\
        --every 200 --saves 2 --output benchmarks/results/checkpoint-stall-8b-h200-x4.json

The real trainer under torchrun, from a recipe of random tokens, killed after the last save, or --beside steps after it
began; the numbers are read from its metrics.jsonl. The first form is the quick start's model and batch on two ranks of
a CPU. The disk of $TMPDIR must hold two checkpoints (8B: 2 x 90 GiB), or one where --saves is 1.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import length
from benchmarks.record import save, spread
from benchmarks.trainer_run import WARM_UP_STEPS, launch_until, model_shape, recipe, write_corpus
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.telemetry.jsonl import read_records


def train(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train until `saves` saves are done, or `beside` steps after the last one began; returns the run's records."""
    sequences = arguments.gpus * arguments.sequences_per_rank
    steps = arguments.every * (arguments.saves + 1)
    model = model_shape(arguments.model)
    metrics = folder / "run" / "metrics.jsonl"
    write_corpus(folder / "corpus", 2 * steps * sequences * arguments.seq_len, model["vocab_size"])

    def enough() -> bool:
        records = read_records(metrics) if metrics.exists() else []
        begun = [record["step"] for record in records if "checkpoint_stall_s" in record]
        if len(begun) < arguments.saves:
            return False
        steps_since = records[-1]["step"] - begun[arguments.saves - 1]
        done = sum("checkpoint_save_s" in record for record in records)
        return done >= arguments.saves or (arguments.beside is not None and steps_since >= arguments.beside)

    own = {
        "model": {"layers": arguments.layers or model["layers"]},
        "attention": {"default": "full"},
        "activation_checkpointing": "full" if torch.cuda.is_available() else "none",
        "micro_batch_size": arguments.sequences_per_rank,
        "checkpoint": {"every": arguments.every, "keep_last": 1},
    }
    content = recipe(arguments.model, folder / "corpus", folder / "run", arguments.seq_len, sequences, steps, **own)
    launch_until(enough, content, folder / "recipe.yaml", arguments.gpus)
    return read_records(metrics)


def summarise(records: list[dict[str, Any]], saves: int) -> dict[str, Any]:
    """Seconds of the first `saves` saves: steps during a save and without one, stalls, and delays.

    A delay is a stall plus the time by which the step after it, whose update waits for the copies, is longer than
    others. Stalls and delays are also given as fractions of a step. The search for NaN is a part
    of a save, on rank 0.
    """
    steps = {record["step"]: record["step_s"] for record in records if record["type"] == "metrics"}
    events = [record for record in records if record["type"] == "checkpoint"]
    all_begun = [(record["step"], record["checkpoint_stall_s"]) for record in events if "checkpoint_stall_s" in record]
    ended = [record["step"] for record in events if "checkpoint_save_s" in record][:saves]
    begun = dict(all_begun[:saves])  # it may have begun another before it was killed
    ended += [max(steps)] * (len(begun) - len(ended))
    saving = {step for first, last in zip(begun, ended, strict=True) for step in range(first + 1, last + 1)}
    quiet = [seconds for step, seconds in steps.items() if step > WARM_UP_STEPS and step not in saving]
    saved = [record["checkpoint_save_s"] for record in events if "checkpoint_save_s" in record]
    checked = [record["checkpoint_check_s"] for record in events if "checkpoint_check_s" in record]
    stalls = list(begun.values())
    busy = [steps[step] for step in sorted(saving & steps.keys())]
    step_s = statistics.median(quiet)
    after = [(steps[step + 1], stall) for step, stall in begun.items() if step + 1 in steps]
    delays = [stall + next_s - step_s for next_s, stall in after]
    return {
        "step_s": spread(quiet),
        "step_beside_save_s": spread(busy) if busy else None,
        "save_s": spread(saved) if saved else None,
        "finite_check_s": spread(checked) if checked else None,
        "finite_check_share_of_save": statistics.median(checked) / statistics.median(saved) if checked else None,
        "first_stall_s": stalls[0],
        "stall_s": spread(stalls),
        "stall_share_of_step": statistics.median(stalls) / step_s,
        "first_stall_share_of_step": stalls[0] / step_s,
        "step_after_save_s": spread([next_s for next_s, _ in after]),
        "first_delay_s": delays[0],
        "first_delay_share_of_step": delays[0] / step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a file of configs/models; tiny is the quick start's")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--gpus", type=int, default=2, help="ranks; on the CPU where there is no GPU")
    parser.add_argument("--seq-len", type=length, default=256)
    parser.add_argument("--sequences-per-rank", type=int, default=8)
    parser.add_argument("--every", type=int, default=20, help="steps between saves; a save must not take longer")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--beside", type=int, help="stop this many steps after the last save began")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = summarise(train(Path(temporary), arguments), arguments.saves)
        if path := latest_checkpoint(Path(temporary) / "run" / "checkpoints"):
            results["checkpoint_gib"] = sum(file.stat().st_size for file in path.iterdir()) / 2**30
    save(arguments.output, {key: value for key, value in vars(arguments).items() if key != "output"}, results)
    print({key: value["median"] if isinstance(value, dict) else value for key, value in results.items()})


if __name__ == "__main__":
    main()
