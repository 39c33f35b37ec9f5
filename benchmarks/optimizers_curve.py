"""Muon and AdamW at equal tokens on real text: the real trainer, a small model, several rates and seeds.

    python -m benchmarks.optimizers_curve --output benchmarks/results/optimizers-curve-h200.json
    python -m benchmarks.pictures optimizers-curve
    python -m benchmarks.optimizers_curve --quick --output ...     on a CPU, in a few minutes

The text is the Python source of this environment's packages, as bytes; the last files are held out. Every optimizer
runs at each of the learning rates with every seed, so that neither is judged by a rate that suits the other.
"""

import argparse
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.float8_loss import MODEL
from benchmarks.options import need_gpus
from benchmarks.plotting import BLUE, INK, band, name
from benchmarks.python_sources import BYTES, write_text
from benchmarks.record import markdown, save
from benchmarks.trainer_run import launch, side_by_side
from moba_train.telemetry.jsonl import read_records

ARMS = ("adamw", "muon")
QUICK_MODEL = {"vocab_size": BYTES, "hidden_size": 64, "intermediate_size": 160, "layers": 2, "heads": 4, "kv_heads": 2}
QUICK = {"steps": 40, "seeds": 1, "rates": [2e-3], "seq_len": 256, "batch_tokens": 2048, "micro_batch": 4}
_COLOURS = {"adamw": INK, "muon": BLUE}


def run(folder: Path, arm: str, rate: float, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Train once: the training loss of every step, and the validation loss at the end."""
    tokens = settings.steps * settings.batch_tokens
    content: dict[str, Any] = {
        "name": "optimizers",
        "run_dir": str(folder / f"{arm}-{rate:g}-{seed}"),
        "seed": seed,
        "model": QUICK_MODEL if settings.quick else MODEL,
        "compile": not settings.quick,
        "attention": {"default": "full"},
        "data": {"train": [{"path": str(folder / "train")}], "validation": [{"path": str(folder / "valid")}]},
        "batch_tokens": settings.batch_tokens,
        "stages": [
            {"name": "only", "seq_len": settings.seq_len, "tokens": tokens, "micro_batch_size": settings.micro_batch}
        ],
        "optim": {"kind": arm, "lr": rate, "schedule": {"kind": "cosine", "warmup_tokens": tokens // 20}},
        "evaluation": {"every": settings.steps, "sequences": 64},
        "checkpoint": {"every": 10**6},
        "telemetry": {"console": False, "report": False},
    }
    launch(content, Path(f"{content['run_dir']}.yaml"), 1, check=True)
    records = read_records(Path(content["run_dir"]) / "metrics.jsonl")
    steps = [record for record in records if record["type"] == "metrics"]
    validation = [record["eval_loss"] for record in records if record["type"] == "validation_loss"]
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "losses": [record["loss"] for record in steps],
        "step_s": statistics.median(record["step_s"] for record in steps[len(steps) // 2 :]),
        "validation_loss": validation[-1],
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each arm and rate, over the seeds: validation loss; and the step at which the arm's median curve reaches the
    last loss (mean of a tenth of the steps) of AdamW's best rate, if it does."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for found in runs:
        groups.setdefault((found["arm"], found["rate"]), []).append(found)
    smooth = {key: _smoothed(group) for key, group in groups.items()}
    ends = [curve[-1] for (arm, _), curve in smooth.items() if arm == "adamw"]
    rows = []
    for (arm, rate), group in groups.items():
        below = np.flatnonzero(smooth[arm, rate] <= min(ends)) if ends else np.array([])
        rows.append(
            {
                "arm": arm,
                "rate": rate,
                "validation_loss": [found["validation_loss"] for found in group],
                "step_s": statistics.median(found["step_s"] for found in group),
                "reaches_adamw_at_step": int(below[0]) + _window(group) if below.size else None,
            }
        )
    return rows


def _window(group: list[dict[str, Any]]) -> int:
    return max(1, len(group[0]["losses"]) // 10)


def _smoothed(group: list[dict[str, Any]]) -> np.ndarray:
    """Mean over a tenth of the steps of the median over seeds."""
    return _mean_of_steps(np.median([found["losses"] for found in group], axis=0), _window(group))


def _mean_of_steps(losses: np.ndarray, window: int) -> np.ndarray:
    return np.convolve(losses, np.ones(window) / window, mode="valid")


def table(runs: list[dict[str, Any]]) -> str:
    """The summary, best rate of each arm in bold."""
    rows = summary(runs)
    means = {(row["arm"], row["rate"]): statistics.mean(row["validation_loss"]) for row in rows}
    shown = [["optimizer", "lr", "validation loss of the seeds", "mean", "AdamW's last loss at step", "s a step"]]
    for row in rows:
        mean = means[row["arm"], row["rate"]]
        best = mean == min(value for (arm, _), value in means.items() if arm == row["arm"])
        losses = ", ".join(f"{loss:.4f}" for loss in row["validation_loss"])
        reached = str(row["reaches_adamw_at_step"] or "-")
        text = f"**{mean:.4f}**" if best else f"{mean:.4f}"
        shown.append([row["arm"], f"{row['rate']:g}", losses, text, reached, f"{row['step_s']:.3f}"])
    return markdown(shown)


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Draw the curve of each arm at its best rate, a band over the seeds."""
    runs = content["results"]["runs"]
    axes = figure.subplots()
    for arm in ARMS:
        own = [row for row in summary(runs) if row["arm"] == arm]
        rate = min(own, key=lambda row: statistics.mean(row["validation_loss"]))["rate"]
        group = [found for found in runs if (found["arm"], found["rate"]) == (arm, rate)]
        window = _window(group)
        curves = [_mean_of_steps(np.array(found["losses"]), window) for found in group]
        steps = np.arange(len(curves[0])) + window
        band(axes, steps, curves, _COLOURS[arm])
        name(axes, f"{arm}, lr {rate:g}", (steps[-1], np.mean(curves, axis=0)[-1]), _COLOURS[arm])
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3])
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of a forward pass")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the GPU; step times then say little; 1")
    parser.add_argument("--quick", action="store_true", help=f"a tiny model on any device, with {QUICK}")
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    if settings.quick:
        vars(settings).update(QUICK)
    else:
        need_gpus(parser)
    runs: list[dict[str, Any]] = []
    given = {key: value for key, value in vars(settings).items() if key != "output"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder, settings.steps * settings.batch_tokens)
        jobs = [
            functools.partial(run, folder, arm, rate, seed, settings)
            for seed in range(settings.seeds)
            for rate in settings.rates
            for arm in ARMS
        ]
        for found in side_by_side(jobs, settings.at_once):
            runs = sorted([*runs, found], key=lambda run: (run["arm"], run["rate"], run["seed"]))
            save(settings.output, given, {"summary": summary(runs), "runs": runs})
            loss = f"{found['validation_loss']:.4f}"
            print(f"{found['arm']:<6} lr {found['rate']:g} seed {found['seed']}: {loss}", flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
