"""Loss in FP8 and in bf16 on real text: the real trainer, a small model, several seeds.

    python -m benchmarks.float8_loss --output benchmarks/results/float8-loss-h200.json
    python -m benchmarks.float8_loss --corpus data/long --base-steps 1500 --output benchmarks/results/...
    python -m benchmarks.pictures float8-loss float8-loss-continued

The text is a corpus of `moba-data corpus`, else the Python source of this environment's packages, as bytes, whose last
files are held out. Arms: bf16, bf16 once more, and FP8 with one scale for a tensor and for a row. Seeds change initial
weights and order of data alike in all arms. With `--base-steps` all arms go on from one model that was trained in bf16
for so long, past the steep falls of the loss, which any rounding moves; then seeds change the order alone. Full
attention's sums have no fixed order on a GPU, so that the second bf16 run says how much of a difference is chance; a
low rate and a long warm-up are to keep that small. Runs share the GPU, `--at-once` of them.
"""

import argparse
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.options import need_gpus
from benchmarks.plotting import BLUE, GREEN, GREY, INK, band, zero_line
from benchmarks.python_sources import BYTES, write_text
from benchmarks.record import markdown, save
from benchmarks.trainer_run import launch, side_by_side
from data_tools.corpus_manifest import read_manifest
from moba_train.telemetry.jsonl import read_records

ARMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16 again": {},
    "fp8 tensorwise": {"linear": "fp8"},
    "fp8 rowwise": {"linear": "fp8", "fp8": {"scaling": "rowwise"}},
}
MODEL = {"vocab_size": BYTES, "hidden_size": 512, "intermediate_size": 1408, "layers": 8, "heads": 8, "kv_heads": 2}
CORPUS_MODEL = {"hidden_size": 384, "intermediate_size": 1024, "layers": 4, "heads": 6, "kv_heads": 2}
"""With the vocabulary of a corpus of `moba-data corpus`."""
BASE = "base"
"""The run that the arms go on from."""
MEAN_STEPS = 20
_COLOURS = {"bf16": INK, "bf16 again": GREY, "fp8 tensorwise": BLUE, "fp8 rowwise": GREEN}


def recipe(folder: Path, arm: str, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """One run of an arm, or of the base that all arms go on from."""
    text = settings.corpus or folder
    shape = CORPUS_MODEL | {"vocab_size": read_manifest(text)["tokenizer"]["vocab_size"]} if settings.corpus else MODEL
    steps = settings.base_steps if arm == BASE else settings.steps
    return {
        "name": "float8",
        "run_dir": str(folder / f"{arm}-{seed}"),
        "seed": seed,
        "model": shape,
        "precision": {"compute": "bf16", **ARMS.get(arm, {})},
        **({"init_from": str(folder / f"{BASE}-0")} if settings.base_steps and arm != BASE else {}),
        "compile": settings.compile,
        "attention": {"default": "moba", "full_layers": "last:1", "moba": {"block_size": 256, "topk": 3}},
        "data": {"train": [{"path": str(text / "train")}], "validation": [{"path": str(text / "valid")}]},
        "batch_tokens": settings.batch_tokens,
        "stages": [
            {
                "name": "only",
                "seq_len": settings.seq_len,
                "tokens": steps * settings.batch_tokens,
                "micro_batch_size": settings.micro_batch,
            }
        ],
        "optim": {
            "lr": 5e-4,
            "schedule": {"kind": "cosine", "warmup_tokens": steps // 5 * settings.batch_tokens},
        },
        "evaluation": {"every": steps, "sequences": 64},
        "checkpoint": {"every": 10**6},
        "telemetry": {"console": False, "report": False},
    }


def run(folder: Path, arm: str, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Train once: the training loss of every step, and the validation loss at the end."""
    content = recipe(folder, arm, seed, settings)
    launch(content, Path(f"{content['run_dir']}.yaml"), 1, check=True)
    records = read_records(Path(content["run_dir"]) / "metrics.jsonl")
    losses = [record["loss"] for record in records if record["type"] == "metrics"]
    validation = [record["eval_loss"] for record in records if record["type"] == "validation_loss"]
    return {"arm": arm, "seed": seed, "losses": losses, "validation_loss": validation[-1]}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """For each arm, over its seeds: validation loss, and the mean loss of the last tenth of the steps relative to bf16
    with the same seed, as a share."""
    by_seed = {(run["arm"], run["seed"]): run for run in runs}
    found: dict[str, Any] = {}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        last = [(_end(run) / _end(by_seed["bf16", run["seed"]]) - 1) for run in own if ("bf16", run["seed"]) in by_seed]
        found[arm] = {"validation_loss": [run["validation_loss"] for run in own], "loss_over_bf16": last}
    return found


def _end(run: dict[str, Any]) -> float:
    losses = run["losses"][-max(1, len(run["losses"]) // 10) :]
    return sum(losses) / len(losses)


def table(runs: list[dict[str, Any]]) -> str:
    """The summary; the error is the standard error of the mean over the seeds."""
    rows = [["arm", "validation loss of the seeds", "last tenth of the steps against bf16", "mean"]]
    for arm, numbers in summary(runs).items():
        shares = numbers["loss_over_bf16"]
        mean = f"{statistics.mean(shares):+.2%}" if shares else "–"
        if len(shares) > 1:
            mean += f" +- {statistics.stdev(shares) / len(shares) ** 0.5:.2%}"
        losses = ", ".join(f"{loss:.4f}" for loss in numbers["validation_loss"])
        rows.append([arm, losses, ", ".join(f"{share:+.2%}" for share in shares), mean])
    return markdown(rows)


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Draw the curves of the first seed, and the distances of all seeds from bf16 as a band."""
    runs = content["results"]["runs"]
    curves = {(run["arm"], run["seed"]): np.array(run["losses"]) for run in runs}
    left, right = figure.subplots(1, 2)
    window = np.ones(MEAN_STEPS) / MEAN_STEPS
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = {seed: losses for (other, seed), losses in curves.items() if other == arm and ("bf16", seed) in curves}
        colour = _COLOURS[arm]
        first = own[runs[0]["seed"]]
        left.plot(np.arange(1, len(first) + 1), first, color=colour, lw=1, label=arm)
        if arm != "bf16":
            relative = [100 * (losses / curves["bf16", seed] - 1) for seed, losses in own.items()]
            smooth = [np.convolve(losses, window, mode="valid") for losses in relative]
            seeds = f"{len(own)} seed{'s' if len(own) > 1 else ''}"
            band(right, np.arange(MEAN_STEPS, len(first) + 1), smooth, colour, f"{arm}, {seeds}", lw=1.2)
    zero_line(right)
    left.set_ylabel(f"training loss, nats a {'token' if content['settings'].get('corpus') else 'byte'}")
    right.set_ylabel(f"above bf16, %, mean of {MEAN_STEPS} steps")
    for panel in (left, right):
        panel.set_xlabel("step")
        panel.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--corpus", type=Path, help="a folder of `moba-data corpus`; a smaller model learns it")
    parser.add_argument("--base-steps", type=int, default=0, help="0: every arm begins with new weights")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of a forward pass")
    parser.add_argument("--at-once", type=int, default=4, help="runs that share the GPU; 4")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    need_gpus(parser)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if settings.corpus is None:
            write_text(folder, max(settings.steps, settings.base_steps) * settings.batch_tokens)
        given = {key: value for key, value in vars(settings).items() if key not in ("output", "corpus")}
        given["model"] = recipe(folder, "bf16", 0, settings)["model"]
        given["corpus"] = read_manifest(settings.corpus)["id"] if settings.corpus else None
        if settings.base_steps:
            print(f"base: validation loss {run(folder, BASE, 0, settings)['validation_loss']:.4f}", flush=True)
        jobs = [functools.partial(run, folder, arm, seed, settings) for seed in range(settings.seeds) for arm in ARMS]
        for found in side_by_side(jobs, settings.at_once):
            runs = sorted([*runs, found], key=lambda run: (run["seed"], list(ARMS).index(run["arm"])))
            save(settings.output, given, {"summary": summary(runs), "runs": runs})
            loss = f"{found['validation_loss']:.4f}"
            print(f"{found['arm']:<16} seed {found['seed']}: validation loss {loss}", flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
