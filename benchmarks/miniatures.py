"""Results of the recipes' miniatures, one row for each stage, read from the runs of launch/miniature.sh.

    for name in short-then-long continue-1m hybrid-90-10 sft-1m 16k-from-scratch 128k-from-scratch; do
        bash launch/miniature.sh $name
    done
    python -m benchmarks.miniatures runs/mini --output benchmarks/results/miniatures-h200.json

Run it on the machine that trained them: the result file names this machine.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.record import markdown, save
from moba_train.config.base import format_count
from moba_train.telemetry.jsonl import read_records

RECIPES = ("short-then-long", "continue-1m", "hybrid-90-10", "sft-1m", "16k-from-scratch", "128k-from-scratch")


def run_results(folder: Path) -> dict[str, Any]:
    """Training time in seconds, tokens and stages of a run, and the evaluation of its last checkpoint."""
    records = read_records(folder / "metrics.jsonl")
    evaluation = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    curves = evaluation.get("position_wise", {}).get("curves", {})
    return {
        "seconds": records[-1]["time"] - records[0]["time"],
        "tokens": records[-1]["tokens"],
        "stages": [
            stage_results(start, [record for record in records if record["stage"] == start["stage"]])
            for start in records
            if start["type"] == "stage"
        ],
        "validation_loss": evaluation["validation_loss"],
        "trailing_loss": {name: curve["mean"][-1] for name, curve in curves.items()},
        "trailing_loss_error": {name: curve["standard_error"][-1] for name, curve in curves.items()},
    }


def stage_results(start: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Length, steps, speed and losses (nats per token) of a stage; None for losses that the recipe does not measure."""
    metrics = [record for record in records if record["type"] == "metrics"]
    rates = sorted(record["tokens_per_s"] for record in metrics)
    return {
        "name": start["stage"],
        "message": start["message"],
        "seq_len": start["seq_len"],
        "steps": records[-1]["step"] - start["step"],
        "tokens_per_s": rates[len(rates) // 2],
        "loss_step": last(records, "loss_step"),
        "validation_loss": last(records, "eval_loss"),
        "trailing_loss": last(records, "trailing_loss"),
        "trailing_gap": last(records, "trailing_gap"),
        "trailing_gap_error": last(records, "trailing_gap_error"),
        "spikes": sum(record["type"] == "spike" for record in records),
        "stage_exits": {record["step"]: record["message"] for record in records if record["type"] == "stage_exit"},
    }


def last(records: list[dict[str, Any]], key: str) -> Any:
    """The newest value of `key`, or None."""
    return next((record[key] for record in reversed(records) if key in record), None)


def table(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown table with a line for each stage of each run."""
    rows = [["recipe", "stage", "length", "steps", "tokens/s", "loss step", "validation loss", "trailing loss"]]
    for name, run in results.items():
        for stage in run["stages"]:
            losses = [stage[key] for key in ("loss_step", "validation_loss", "trailing_loss")]
            step, *others = ("–" if loss is None else f"{loss:.3f}" for loss in losses)
            signed = step if step.startswith(("-", "–")) else f"+{step}"
            size = [format_count(stage["seq_len"], base=1024), str(stage["steps"])]
            rows.append([name, stage["name"], *size, f"{stage['tokens_per_s'] / 1000:.0f}k", signed, *others])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    results = {name: run_results(given.folder / name) for name in RECIPES}
    print(table(results))
    for name, run in results.items():
        print(f"{name}: {run['seconds']:.0f} s of training, trailing loss {run['trailing_loss']}")
    save(given.output, {"recipes": [f"configs/recipes/mini/{name}.yaml" for name in RECIPES]}, results)


if __name__ == "__main__":
    main()
