"""Distils the gates of `seer` and `msa` from a published model.

    bash launch/smollm2.sh prepare      # weights and corpus, once
    python -m benchmarks.gate_distillation --output runs/smollm2/gates.json

Trains each recipe with the real trainer: its first stage warms the gates up under full attention with the model frozen,
its second attends to the blocks that they select. The result has the loss, the auxiliary loss of each layer, the loss
on validation data, and by gate probes the recall of each layer: the share of full attention's probability that lies in
the selected blocks, and the share of the blocks with the most probability that are selected. Words of the form
key=value are laid over all recipes.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.record import save
from moba_train.config.load import load_config
from moba_train.resolve.run import resolve_unchecked
from moba_train.telemetry.jsonl import read_records
from moba_train.train import main as train

RECIPES = [Path("configs/recipes/distill-seer.yaml"), Path("configs/recipes/distill-msa.yaml")]
RECALLS = ("block_recall", "mass_recall")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="laid over each recipe, as moba-train does")
    parser.add_argument("--recipes", type=Path, nargs="+", default=RECIPES)
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2/gates"), help="folder of the runs, made anew")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    given = parser.parse_args()
    results = [distil(recipe, given.runs / recipe.stem, given.overrides) for recipe in given.recipes]
    save(given.output, {"recipes": list(map(str, given.recipes)), "overrides": given.overrides}, results)


def distil(recipe: Path, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Train a recipe in `run_dir` and read what it logged. Raises RuntimeError when training fails."""
    shutil.rmtree(run_dir, ignore_errors=True)
    began = time.perf_counter()
    status = train([str(recipe), f"run_dir={run_dir}", "telemetry.report=false", *overrides])
    if status:
        raise RuntimeError(f"training of {recipe} ended with status {status}")
    return read_run(run_dir) | {"recipe": recipe.stem, "seconds": round(time.perf_counter() - began, 1)}


def read_run(run_dir: Path) -> dict[str, Any]:
    """Stages, curves and probes of a finished run."""
    stages = resolve_unchecked(load_config(run_dir / "config.yaml")).stages
    records = read_records(run_dir / "metrics.jsonl")
    steps, probes, losses = [], [], []
    for record in records:
        if record["type"] == "metrics":
            steps.append(_step(record))
        elif record["type"] == "gate_probe":
            layers = [{key: one[key] for key in ("layer", *RECALLS)} for one in record["gate_probe"]["layers"]]
            probes.append({key: record[key] for key in ("step", "stage", *RECALLS)} | {"layers": layers})
        elif record["type"] == "validation_loss":
            losses.append({key: record[key] for key in ("step", "stage", "eval_loss")})
    named = [
        {"name": stage.name, "first_step": stage.first_step, "batch_tokens": stage.batch_tokens} for stage in stages
    ]
    return {"stages": named, "steps": steps, "probes": probes, "validation": losses}


def _step(record: dict[str, Any]) -> dict[str, Any]:
    """Losses of a step; layers without an auxiliary loss are left out."""
    prefix = "auxiliary_loss_layer_"
    by_layer = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}
    return {"step": record["step"], "loss": record["loss"], "auxiliary_loss": by_layer}


if __name__ == "__main__":
    main()
