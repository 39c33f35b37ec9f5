"""Loss by position before, during and after a model is extended to longer sequences.

    python -m benchmarks.smollm2_evaluate --output runs/smollm2/trailing.json runs/smollm2/run
    python -m benchmarks.pictures smollm2-32k --results runs/smollm2/trailing.json --output trailing.svg

Every checkpoint of the run and its initial weights are evaluated on the same samples of long validation documents, of
the last stage's length: with the attention and RoPE of the first stage ("as trained"; only before the switch), with
those of the last stage ("MoBA"), and with the last stage's RoPE and full attention ("full").
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plotting import FULL, INK, MOBA, PURPLE
from benchmarks.record import save
from moba_train.attention.full import FullAttention
from moba_train.config.attention import LayerAttention
from moba_train.config.load import load_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.evals.position_wise import position_wise_loss
from moba_train.model.build import build_attention, build_model
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.world import joined_world
from moba_train.resolve.initial_weights import load_initial_weights
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.saved_recipe import load_trained, open_checkpoint

BUCKETS = 16
"""Equal parts of a sequence."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    config = load_config(given.run / "config.yaml")
    stages = resolve_unchecked(config).stages
    first = stages[0]
    last = stages[-1]
    vocab_size = config.model.vocab_size
    samples = LongDocumentSamples(config.data.validation, last.seq_len, given.sequences, config.seed, vocab_size)
    settings = {"seq_len": last.seq_len, "trained_seq_len": first.seq_len, "sequences": len(samples)}
    rows = []
    with joined_world() as world:
        for model, stage, step in states(given.run, config, world.device):
            tokens = stage.first_token + (step - stage.first_step) * stage.batch_tokens
            for label in (["as trained"] if stage.index == 0 else []) + ["MoBA", "full"]:
                set_attention(model, config, label, first, last)
                curve = position_wise_loss(model, samples, last.seq_len // BUCKETS, DataShard(), world.device)
                rows.append(
                    {"step": step, "tokens": tokens, "stage": stage.name, "attention": label, **curve.to_json()}
                )
                print(f"step {step:4d} {stage.name:<8} {label:<11} trailing loss {curve.trailing:.4f}", flush=True)
            save(given.output, settings | {"switch_tokens": first.end_token}, rows)


def states(run: Path, config: RunConfig, device: torch.device) -> Iterator[tuple[Transformer, Stage, int]]:
    """(model, stage, optimizer steps done) for the run's initial weights and for each of its checkpoints."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    assert config.init_from is not None, "the run must have begun with weights"
    resolved = resolve_unchecked(config)
    with torch.device("meta"):
        model = build_model(resolved.setup.spec)
    model.to_empty(device=device)
    load_initial_weights(model, Path(config.init_from))
    yield model.to(dtype).eval(), resolved.stages[0], 0
    for path in sorted((run / "checkpoints").glob("step_*")):
        saved = open_checkpoint(path)
        yield load_trained(saved, device, dtype), saved.stage, int(path.name.removeprefix("step_"))


def set_attention(model: Transformer, config: RunConfig, label: str, first: Stage, last: Stage) -> None:
    """Set the model's attention and RoPE to those of `label`."""
    stage = first if label == "as trained" else last
    full = (LayerAttention("full", FullAttention.Options()),) * config.model.layers
    model.set_rope(stage.rope)
    model.set_attention(build_attention(full if label == "full" else stage.attention, config.model.head_width))


COLOURS = {"as trained": PURPLE, "MoBA": MOBA, "full": FULL}


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """The trailing loss over the run on the left, and the loss by position before and after on the right."""
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_run(left, content["settings"], content["results"])
    _draw_positions(right, content["settings"], content["results"])
    after = [value for row in content["results"] if row["attention"] != "as trained" for value in row["mean"]]
    left.set_ylim(min(after) - 0.1, max(after) + 0.7)
    for axes in (left, right):
        axes.legend(fontsize=8, ncols=2, columnspacing=1, loc="upper right")


def _draw_run(axes: Axes, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    buckets = len(rows[0]["mean"])
    width = settings["seq_len"] // buckets
    shown = {buckets - 1: "o-", settings["trained_seq_len"] // width - 1: ":"}
    for bucket, style in shown.items():
        for label, colour in COLOURS.items():
            own = [row for row in rows if row["attention"] == label]
            losses = [row["mean"][bucket] for row in own]
            millions = [row["tokens"] / 1e6 for row in own]
            axes.plot(millions, losses, style, color=colour, label=f"{label}, {_token_range(bucket, width)}")
    axes.axvline(settings["switch_tokens"] / 1e6, color=INK, lw=0.8, ls="--")
    axes.set_xlabel(f"training tokens, millions (dashed: {settings['seq_len'] // 1024}K begins)")
    axes.set_ylabel("validation loss, nats per token")


def _draw_positions(axes: Axes, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Loss by position where longer sequences begin, and at the end of the run, with standard errors."""
    width = settings["seq_len"] // len(rows[0]["mean"])
    switch, end = max(row["step"] for row in rows if row["attention"] == "as trained"), rows[-1]["step"]
    curves = ((switch, "as trained", "-"), (switch, "MoBA", "--"), (end, "MoBA", "-"), (end, "full", "-"))
    for step, label, style in curves:
        row = next(row for row in rows if (row["step"], row["attention"]) == (step, label))
        places = [(bucket + 0.5) * width / 1024 for bucket in range(len(row["mean"]))]
        when = "before" if step == switch else "after"
        errors = row["standard_error"]
        axes.errorbar(places, row["mean"], errors, fmt=style, color=COLOURS[label], lw=1.2, label=f"{when}: {label}")
    axes.axvline(settings["trained_seq_len"] / 1024, color=INK, lw=0.8, ls="--")
    axes.set_xlabel("position, K tokens (dashed: trained length before)")


def _token_range(bucket: int, width: int) -> str:
    return f"{bucket * width // 1024}K-{(bucket + 1) * width // 1024}K"


if __name__ == "__main__":
    main()
