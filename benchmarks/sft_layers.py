"""Supervised fine-tuning with MoBA when few tokens carry loss, and how full attention in the last layers helps.

    python -m benchmarks.sft_layers --output benchmarks/results/sft-layers-h200.json --plot docs/sft-layers.svg

A small model learns to recall facts on short documents with full attention in all layers, then is pretrained on long
ones with MoBA in all layers, every token carrying loss. Then it is fine-tuned on conversations of which 1 % of the
tokens carry loss (benchmarks/recall_documents.py), with full attention in the last 1, 2, 4 or half of the layers, in
none, in all, and, to tell the number of full layers from their place, in the first half. Everything else is equal:
initial weights, data and their order, learning rate, steps. Each seed has its own pretraining and its own data.
`--controls` are fine-tuned with loss on every token.

It measures, on held-out conversations, the mean loss of the loss tokens and the fraction of them that is predicted
right; during fine-tuning, the gradient norm of every layer; before it, the fraction of the document's tokens that a
loss gradient reaches, and how well the base recalls with one full layer alone. Seeds run in parallel. `--minutes` is a
hard limit: runs in progress are dropped there.
"""

import argparse
import copy
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.recall_documents import Recall, conversations, pretraining_documents
from benchmarks.record import save
from benchmarks.sft_layers_plot import draw
from benchmarks.sft_training import Deadline, Documents, OutOfTimeError, evaluate, gradient_reach, train
from moba_train.attention.kind import AttentionKind
from moba_train.attention.moba.attention import MobaAttention
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.model import ModelConfig
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.transformer import Transformer

HELD_OUT = 64
"""Documents and conversations that are never trained on."""
EVALUATIONS = 8
"""Evaluations in each fine-tuning run."""
BASE_EVERY = 100
"""Steps of pretraining between evaluations."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """One size of the experiment."""

    model: ModelConfig
    moba: MobaAttention.Options
    data: Recall
    batch: int
    """Documents of a step."""
    base_steps: int
    """Steps of each stage of pretraining, at most."""
    steps: int
    """Steps of fine-tuning."""
    base_lr: float
    lr: float
    short: tuple[int, ...] = ()
    """Document lengths of earlier pretraining stages with full attention in all layers: the model learns recall over
    short distances first."""


def _model(data: Recall, hidden_size: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=data.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=heads // 2,
        init_std=hidden_size**-0.5,
    )


_LONG = Recall(length=2048, facts=32, mentions=4, asked=5, values=4, text_ids=64, keys=64, value_ids=127)
_SHORT = Recall(length=256, facts=10, mentions=4, asked=2, values=2, text_ids=32, keys=32, value_ids=63)
_BLOCKS = MobaAttention.Options(block_size=64)
SETUPS = {
    "gpu": Setup(_model(_LONG, 256, 8, 4), _BLOCKS, _LONG, 16, 600, 300, 2e-3, 2e-3, short=(256, 1024)),
    "cpu": Setup(_model(_SHORT, 64, 4, 4), MobaAttention.Options(block_size=8), _SHORT, 8, 2000, 200, 3e-3, 1e-3),
}


def attention_layers(setup: Setup, full: str | list[int]) -> list[AttentionKind]:
    """MoBA, and full attention in the layers that `full` names, as in a recipe's `attention.full_layers`."""
    config = AttentionConfig(full_layers=full, moba=setup.moba)
    return build_attention(resolve_layers(config, setup.model.layers), setup.model.head_width)


def pretrain(setup: Setup, seed: int, device: torch.device, deadline: Deadline) -> tuple[Transformer, Record]:
    """The model that all variants of a seed begin with, every token of its documents carrying loss."""
    generator = torch.Generator(device).manual_seed(1000 + seed)
    model = Transformer(setup.model).to(device)
    initialize_weights(model, seed)
    began = time.monotonic()
    curve: list[tuple[int, int, float, float]] = []
    for length in (*setup.short, setup.data.length):
        sizes = setup.data.with_length(length)
        batch = setup.batch * setup.data.length // length
        places = torch.arange(1, length, device=device)
        documents, held_out = (
            Documents.from_tokens(pretraining_documents(sizes, count, generator), places, batch)
            for count in (min(setup.base_steps * batch, 2**25 // length), max(HELD_OUT, batch))
        )
        model.set_attention(attention_layers(setup, "none" if length == setup.data.length else "all"))

        def enough(step: int, length: int = length, held_out: Documents = held_out) -> bool:
            curve.append((length, step, *evaluate(model, held_out, setup.data)))
            return curve[-1][3] > 0.95 * (1 - 1 / setup.data.mentions)

        train(model, documents, setup.base_steps, setup.base_lr, setup.base_lr, deadline, BASE_EVERY, enough)
    record: Record = {"seed": seed, "curve": curve, "seconds": time.monotonic() - began}
    asked = Documents.from_tokens(*conversations(setup.data, HELD_OUT, generator), setup.batch)
    record["one_full_layer"] = []
    for layer in range(setup.model.layers):
        model.set_attention(attention_layers(setup, [layer]))
        record["one_full_layer"].append(evaluate(model, asked, setup.data))
    return model, record


def fine_tune(
    setup: Setup, base: Transformer, full: str, seed: int, every_token: bool, device: torch.device, deadline: Deadline
) -> Record:
    """One fine-tuning run of a copy of `base` with full attention in the layers that `full` names."""
    generator = torch.Generator(device).manual_seed(2000 + seed)
    tokens, places = conversations(setup.data, setup.steps * setup.batch, generator)
    training = Documents.from_tokens(tokens, places, setup.batch)
    held_out = Documents.from_tokens(*conversations(setup.data, HELD_OUT, generator), setup.batch)
    model = copy.deepcopy(base)
    model.set_attention(attention_layers(setup, full))
    training = training.with_loss_everywhere() if every_token else training
    curve = [(0, *evaluate(model, held_out, setup.data))]

    def enough(step: int) -> bool:
        curve.append((step, *evaluate(model, held_out, setup.data)))
        return False

    reach = gradient_reach(model, training)
    began = time.monotonic()
    every = max(1, setup.steps // EVALUATIONS)
    norms = train(model, training, setup.steps, setup.lr, 0.1 * setup.lr, deadline, every, enough)
    return {
        "full_layers": full,
        "loss_on": "every token" if every_token else "answers",
        "seed": seed,
        "loss": curve[-1][1],
        "recall": curve[-1][2],
        "curve": curve,
        "gradient_norm": norms.mean(0).tolist(),
        "gradient_reach": reach,
        "seconds": time.monotonic() - began,
    }


def run_seed(
    setup: Setup, seed: int, runs: list[tuple[str, bool]], device: torch.device, deadline: Deadline
) -> tuple[list[Record], list[Record]]:
    """Pretrain one seed and fine-tune it with each of `runs`, as far as the time allows: (pretraining, fine-tuning)."""
    bases: list[Record] = []
    results: list[Record] = []
    try:
        base, record = pretrain(setup, seed, device, deadline)
        bases.append(record)
        history = ", ".join(
            f"{length} at {step}: {loss:.3f} {recall:.0%}" for length, step, loss, recall in record["curve"]
        )
        print(f"seed {seed}: pretrained in {record['seconds']:.0f} s; loss and recall by length and step: {history}")
        recalls = " ".join(f"{recall:.1%}" for _, recall in record["one_full_layer"])
        print(f"seed {seed}: recall of answers with one full layer, first to last: {recalls}", flush=True)
        for layers, every_token in runs:
            run = fine_tune(setup, base, layers, seed, every_token, device, deadline)
            results.append(run)
            line = f"seed {seed}, full layers {layers}, loss on {run['loss_on']}: loss {run['loss']:.4f}"
            print(f"{line}, recall {run['recall']:.1%}, {run['seconds']:.0f} s", flush=True)
    except OutOfTimeError:
        print(f"seed {seed}: out of time after {len(results)} runs", flush=True)
    return bases, results


def run_seeds(
    setup: Setup, seeds: int, runs: list[tuple[str, bool]], device: torch.device, deadline: Deadline
) -> Iterator[tuple[list[Record], list[Record]]]:
    """`run_seed` for each seed; in parallel on a GPU, which one such model does not fill."""
    if device.type == "cpu":
        yield from (run_seed(setup, seed, runs, device, deadline) for seed in range(seeds))
        return
    with ProcessPoolExecutor(seeds, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(run_seed, setup, seed, runs, device, deadline) for seed in range(seeds)]:
            yield future.result()


def summary(results: list[Record]) -> list[Record]:
    """Means and standard errors over the seeds, one row for each variant in order of appearance."""
    rows = []
    for full, loss_on in dict.fromkeys((r["full_layers"], r["loss_on"]) for r in results):
        runs = [r for r in results if (r["full_layers"], r["loss_on"]) == (full, loss_on)]
        row: Record = {"full_layers": full, "loss_on": loss_on, "seeds": len(runs)}
        for key in ("loss", "recall"):
            values = [run[key] for run in runs]
            row[key] = statistics.mean(values)
            row[f"{key}_error"] = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        for key in ("gradient_norm", "gradient_reach"):
            row[key] = [statistics.mean(layer) for layer in zip(*(run[key] for run in runs), strict=True)]
        rows.append(row)
    return rows


def table(rows: list[Record]) -> str:
    """The summary as text for the terminal."""
    lines = ["full layers  loss on      loss            recall  seeds  gradient norm, first to last layer"]
    for row in rows:
        error = "       " if row["loss_error"] is None else f"±{row['loss_error']:.4f}"
        norms = " ".join(f"{norm:.3f}" for norm in row["gradient_norm"])
        lines.append(
            f"{row['full_layers']:<12} {row['loss_on']:<12} {row['loss']:.4f} {error}  {row['recall']:6.1%}  "
            f"{row['seeds']:<5}  {norms}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all variants with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SETUPS, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--full", nargs="*", help="values of attention.full_layers, see docs/config.md")
    parser.add_argument(
        "--controls", nargs="*", default=[], help="values of attention.full_layers for runs with loss on every token"
    )
    parser.add_argument("--base-steps", type=int, help="steps of each stage of pretraining, at most")
    parser.add_argument("--steps", type=int, help="steps of fine-tuning")
    parser.add_argument("--minutes", type=float, default=18, help="time after which runs in progress are dropped")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plot", "--picture", type=Path, help="SVG file (--picture: the name in recorded commands)")
    arguments = parser.parse_args()
    deadline = Deadline(time.monotonic() + 60 * arguments.minutes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {key: getattr(arguments, key) for key in ("base_steps", "steps")}
    setup = SETUPS[arguments.size]
    setup = replace(setup, **{key: value for key, value in given.items() if value is not None})
    half = setup.model.layers // 2
    last = [f"last:{count}" for count in sorted({1, 2, 4, half}) if count <= half]
    full = ["none", *last, "all", f"first:{half}"] if arguments.full is None else arguments.full
    runs = [(layers, False) for layers in full] + [(layers, True) for layers in arguments.controls]
    settings = {**asdict(setup), "model": setup.model.model_dump(), "moba": setup.moba.model_dump()}
    bases: list[Record] = []
    results: list[Record] = []
    for base, fine_tuned in run_seeds(setup, arguments.seeds, runs, device, deadline):
        bases += base
        results += fine_tuned
        save(arguments.output, settings, {"bases": bases, "runs": results, "summary": summary(results)})
    print(table(summary(results)))
    if results and arguments.plot:
        draw(arguments.output, arguments.plot)


if __name__ == "__main__":
    main()
