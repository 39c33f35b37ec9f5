"""Distils the gates of `seer` and `msa` from a published model, as JSON and as a plot.

    bash launch/smollm2.sh prepare      # weights and corpus, once
    python -m benchmarks.gate_distillation --output runs/smollm2/gates.json --plot runs/smollm2/gates.svg
    python -m benchmarks.gate_distillation --draw runs/smollm2/gates.json --plot docs/images/gate-distillation.svg

Trains each recipe with the real trainer: its first stage warms the gates up under full attention with the model frozen,
its second attends to the blocks that they select. The result has the loss, the auxiliary loss of each layer, the loss
on validation data, and by gate probes the recall of each layer: the share of full attention's probability that lies in
the selected blocks, and the share of the blocks with the most probability that are selected. Words of the form
key=value are laid over all recipes.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.plotting import GREY, STYLE, plain, stamp
from benchmarks.record import save
from moba_train.config.load import load_config
from moba_train.resolve.run import resolve_unchecked
from moba_train.telemetry.jsonl import read_records
from moba_train.train import main as train

RECIPES = [Path("configs/recipes/distill-seer.yaml"), Path("configs/recipes/distill-msa.yaml")]
RECALLS = {
    "block_recall": "blocks of largest mass selected",
    "mass_recall": "attention's probability in selected blocks",
}
COLOURS = ["#d9480f", "#1c7ed6", "#2b8a3e", "#9c5fd1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="laid over each recipe, as moba-train does")
    parser.add_argument("--recipes", type=Path, nargs="+", default=RECIPES)
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2/gates"), help="folder of the runs, made anew")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--plot", type=Path, help="picture, SVG or PNG")
    parser.add_argument("--draw", type=Path, help="result file to draw, instead of training")
    given = parser.parse_args()
    if given.draw is not None:
        if given.plot is None:
            parser.error("--draw needs --plot, where the picture goes")
        draw(given.draw, given.plot)
        return
    if given.output is None:
        parser.error("--output is needed, where the results go")
    results = [distil(recipe, given.runs / recipe.stem, given.overrides) for recipe in given.recipes]
    save(given.output, {"recipes": list(map(str, given.recipes)), "overrides": given.overrides}, results)
    if given.plot is not None:
        draw(given.output, given.plot)


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


def draw(source: Path, plot: Path) -> None:
    """Draw the auxiliary loss and both recalls of every run over the steps; the mean over layers, and each layer
    thin."""
    text = source.read_text()
    runs = json.loads(text)["results"]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
        for run, colour in zip(runs, COLOURS, strict=False):
            _draw_auxiliary(panels[0], run, colour)
            for axes, recall in zip(panels[1:], RECALLS, strict=True):
                _draw_recall(axes, run, recall, colour)
        panels[0].set(title="KL divergence of the gates, nats", yscale="log")
        for axes, title in zip(panels[1:], RECALLS.values(), strict=True):
            axes.set(title=title, ylim=(0, 1))
        for axes in panels:
            plain(axes)
            axes.set_xlabel("optimizer steps")
            for run in runs[:1]:
                for stage in run["stages"][1:]:
                    axes.axvline(stage["first_step"], color=GREY, lw=0.8, ls="--")
        panels[1].legend(frameon=False)
        metadata = {"Description": stamp(text), **({"Date": None} if plot.suffix == ".svg" else {})}
        plot.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(plot, metadata=metadata, transparent=True)
        plt.close(figure)


def _draw_auxiliary(axes: Axes, run: dict[str, Any], colour: str) -> None:
    steps = [step for step in run["steps"] if step["auxiliary_loss"]]
    for layer in sorted({layer for step in steps for layer in step["auxiliary_loss"]}, key=int):
        here = [(step["step"], step["auxiliary_loss"][layer]) for step in steps if layer in step["auxiliary_loss"]]
        axes.plot(*zip(*here, strict=True), color=colour, alpha=0.2, lw=0.6)
    means = [sum(step["auxiliary_loss"].values()) / len(step["auxiliary_loss"]) for step in steps]
    axes.plot([step["step"] for step in steps], means, color=colour, lw=1.8)


def _draw_recall(axes: Axes, run: dict[str, Any], recall: str, colour: str) -> None:
    probes = run["probes"]
    for index in range(len(probes[0]["layers"]) if probes else 0):
        here = [(probe["step"], probe["layers"][index][recall]) for probe in probes if index < len(probe["layers"])]
        axes.plot(*zip(*here, strict=True), color=colour, alpha=0.2, lw=0.6)
    axes.plot(
        [probe["step"] for probe in probes], [probe[recall] for probe in probes], "o-", ms=3, color=colour, lw=1.8
    )
    axes.lines[-1].set_label(run["recipe"].removeprefix("distill-"))


if __name__ == "__main__":
    main()
