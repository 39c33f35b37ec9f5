"""Loss in FP8 beside bf16 on real text: the real trainer, a small model, several seeds.

    python -m benchmarks.float8_loss --output benchmarks/results/float8-loss-h200.json
    python -m benchmarks.float8_loss --plot docs/float8-loss.svg --output benchmarks/results/float8-loss-h200.json

The text is the Python source of this environment's packages, as bytes; the last files are held out. Arms: bf16, and
FP8 with one scale for a tensor and for a row. Seeds change initial weights and order of data alike in all arms, so that
the distance between seeds says how much of a difference is chance.
"""

import argparse
import json
import random
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import need_gpus
from benchmarks.plotting import GREY, STYLE, plain, stamp
from benchmarks.record import save
from benchmarks.trainer_run import launch
from moba_train.data.indexed import IndexedDatasetWriter
from moba_train.telemetry.jsonl import read_records

ARMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8 tensorwise": {"linear": "fp8"},
    "fp8 rowwise": {"linear": "fp8", "fp8": {"scaling": "rowwise"}},
}
MODEL = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1408, "layers": 8, "heads": 8, "kv_heads": 2}
_COLOURS = {"bf16": GREY, "fp8 tensorwise": "#d9480f", "fp8 rowwise": "#1c7ed6"}


def write_text(folder: Path, tokens: int) -> None:
    """Write `train`, at least `tokens` bytes where there are as many, and `valid`, 2 % of that."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    random.Random(0).shuffle(files)
    for name, wanted in (("valid", tokens // 50), ("train", tokens)):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            while files and writer.tokens < wanted:
                text = np.frombuffer(files.pop().read_bytes(), dtype=np.uint8)
                if text.size:
                    writer.add_document(text.astype(np.uint16))


def recipe(folder: Path, arm: str, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """One run of an arm."""
    return {
        "name": "float8",
        "run_dir": str(folder / f"{arm}-{seed}"),
        "seed": seed,
        "model": MODEL,
        "precision": {"compute": "bf16", **ARMS[arm]},
        "compile": settings.compile,
        "attention": {"default": "moba", "full_layers": "last:1", "moba": {"block_size": 256, "topk": 3}},
        "data": {"train": [{"path": str(folder / "train")}], "validation": [{"path": str(folder / "valid")}]},
        "batch_tokens": settings.batch_tokens,
        "stages": [
            {
                "name": "only",
                "seq_len": settings.seq_len,
                "tokens": settings.steps * settings.batch_tokens,
                "micro_batch_size": settings.micro_batch,
            }
        ],
        "optim": {"lr": 1e-3, "schedule": {"kind": "cosine", "warmup_tokens": settings.batch_tokens * 20}},
        "evaluation": {"every": settings.steps, "sequences": 64},
        "checkpoint": {"every": 10**6},
        "telemetry": {"wandb": {"mode": "disabled"}, "console": False},
    }


def run(folder: Path, arm: str, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Train once: the training loss of every step, and the validation loss at the end."""
    content = recipe(folder, arm, seed, settings)
    launch(content, folder / "recipe.yaml", 1, check=True)
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


def draw(source: Path, plot: Path) -> None:
    """Draw the curves of the first seed, and their distance from bf16, as an SVG."""
    import matplotlib.pyplot as plt

    text = source.read_text()
    runs = json.loads(text)["results"]["runs"]
    seed = runs[0]["seed"]
    curves = {run["arm"]: np.array(run["losses"]) for run in runs if run["seed"] == seed}
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for arm, losses in curves.items():
            steps = np.arange(1, len(losses) + 1)
            left.plot(steps, losses, color=_COLOURS[arm], lw=1.2, label=arm)
            if arm != "bf16":
                window = np.ones(20) / 20
                relative = np.convolve(losses / curves["bf16"] - 1, window, mode="valid")
                right.plot(steps[19:], 100 * relative, color=_COLOURS[arm], lw=1.2, label=arm)
        left.set_title("training loss, nats a byte", color=GREY, fontsize=10, loc="left")
        right.set_title("above bf16, %, mean of 20 steps", color=GREY, fontsize=10, loc="left")
        right.axhline(0, color=GREY, lw=0.8)
        for panel in (left, right):
            panel.set_xlabel("step", color=GREY)
            plain(panel)
        left.legend(frameon=False, labelcolor=GREY, fontsize=9)
        figure.savefig(plot, format="svg", transparent=True, metadata={"Description": stamp(text), "Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of a forward pass")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plot", type=Path, help="draw --output into this SVG and train nothing")
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    if settings.plot:
        draw(settings.output, settings.plot)
        return
    need_gpus(parser)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder, settings.steps * settings.batch_tokens)
        for seed in range(settings.seeds):
            for arm in ARMS:
                runs.append(run(folder, arm, seed, settings))
                given = {key: value for key, value in vars(settings).items() if key not in ("output", "plot")}
                save(settings.output, given | {"model": MODEL}, {"summary": summary(runs), "runs": runs})
                print(f"{arm:<16} seed {seed}: validation loss {runs[-1]['validation_loss']:.4f}", flush=True)
    for arm, numbers in summary(runs).items():
        shares = ", ".join(f"{share:+.2%}" for share in numbers["loss_over_bf16"])
        print(f"{arm:<16} loss of the last tenth against bf16: {shares}")


if __name__ == "__main__":
    main()
