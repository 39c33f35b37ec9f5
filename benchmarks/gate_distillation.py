"""Distils the gates of `seer` and `msa` from a published model.

    bash launch/smollm2.sh prepare      # weights and corpus, once
    python -m benchmarks.gate_distillation --output runs/smollm2/gates.json
    python -m benchmarks.pictures gate-distillation

Trains each recipe with the real trainer: its first stage warms the gates up under full attention with the model frozen,
its second attends to the blocks that they select. The result has the loss, the auxiliary loss of each layer, the loss
on validation data, and by gate probes the recall of each layer: the share of full attention's probability that lies in
the selected blocks, and the share of the blocks with the most probability that are selected. Words of the form
key=value are laid over all recipes.
"""

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plotting import BLUE, GREEN, INK, name
from benchmarks.record import save
from moba_train.config.load import load_config
from moba_train.resolve.run import resolve_unchecked
from moba_train.telemetry.jsonl import read_records
from moba_train.train import main as train

RECIPES = [Path("configs/recipes/distill-seer.yaml"), Path("configs/recipes/distill-msa.yaml")]
RECALLS = {
    "block_recall": "largest blocks that are selected",
    "mass_recall": "probability in selected blocks",
}
COLOURS = [BLUE, GREEN]


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


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Draw the auxiliary loss and both recalls of every run over the steps; the mean over layers, and each layer
    thin."""
    panels = figure.subplots(1, 3)
    for run, colour in zip(content["results"], COLOURS, strict=True):
        losses = [(step["step"], step["auxiliary_loss"]) for step in run["steps"] if step["auxiliary_loss"]]
        _draw_layers(panels[0], losses, colour)
        for axes, recall in zip(panels[1:], RECALLS, strict=True):
            by_layer = [
                (probe["step"], {one["layer"]: one[recall] for one in probe["layers"]}) for probe in run["probes"]
            ]
            end = _draw_layers(axes, by_layer, colour)
        name(panels[2], run["recipe"].removeprefix("distill-"), end, colour)
    panels[0].set_yscale("log")
    for axes, label in zip(panels, ("KL divergence of the gates, nats", *RECALLS.values()), strict=True):
        axes.set_ylabel(label)
        axes.set_xlabel("step (dashed: the gates select)")
        for stage in content["results"][0]["stages"][1:]:
            axes.axvline(stage["first_step"], color=INK, lw=0.8, ls="--")
    for axes in panels[1:]:
        axes.set_ylim(0, 1)


def _draw_layers(axes: Axes, values: list[tuple[int, dict[Any, float]]], colour: str) -> tuple[float, float]:
    """Draw (step, value by layer) pairs; returns the end of the mean's curve."""
    for layer in sorted({layer for _, by_layer in values for layer in by_layer}):
        here = [(step, by_layer[layer]) for step, by_layer in values if layer in by_layer]
        axes.plot(*zip(*here, strict=True), color=colour, alpha=0.2, lw=0.6)
    means = [(step, statistics.mean(by_layer.values())) for step, by_layer in values]
    axes.plot(*zip(*means, strict=True), color=colour, lw=1.8)
    return means[-1]


if __name__ == "__main__":
    main()
