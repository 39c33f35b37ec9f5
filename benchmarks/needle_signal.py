"""Why MoBA's gate finds needles: observed misses beside those of FlashMoBA's signal-to-noise model (arXiv:2511.11571).

    bash launch/smollm2.sh signal       # evaluates a published model, then calls this
    python -m benchmarks.needle_signal RUN/evaluation.json --output RESULT.json
    python -m benchmarks.pictures smollm2-signal --results RESULT.json --output PLOT.svg

Reads what `moba-train eval --tasks needle_signal` found (docs/how-to/evaluate.md): a row for each layer, head and gate.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plotting import BLUE, GREEN, GREY, INK, PURPLE, powers_of_two
from benchmarks.record import markdown, save
from moba_train.tools.needle.needle_signal import MODELS

Row = Mapping[str, Any]
RETRIEVAL_MASS = 0.1
"""Mean probability of the needle's key from which a head counts as one that retrieves. With the gates of other heads a
needle is neither found nor lost."""
STYLES = ("--", "-.", "--", ":")
COLOURS = {"paper": PURPLE, "spread": GREY, "cluster": GREEN, "scores": BLUE}


def retrieving(rows: Sequence[Row]) -> list[Row]:
    """The rows of heads that look at the needle."""
    return [row for row in rows if row["mass"] >= RETRIEVAL_MASS]


def by_gate(rows: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """Rows by block size and topk, finest blocks first."""
    gates = sorted({(row["block_size"], row["topk"]) for row in rows})
    return {gate: [row for row in rows if (row["block_size"], row["topk"]) == gate] for gate in gates}


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each gate, over all heads and over those that retrieve: mean rates, and each model's mean absolute error over
    heads."""
    found = []
    for (block_size, topk), own in by_gate(rows).items():
        for which, heads in (("all", own), ("retrieval", retrieving(own))):
            if not heads:
                continue
            line: dict[str, Any] = {"block_size": block_size, "topk": topk, "which": which, "heads": len(heads)}
            for rate in ("outranked", "missed"):
                line[rate] = statistics.mean(row[rate] for row in heads)
                for model in MODELS:
                    name = f"{rate}_{model}"
                    line[name] = statistics.mean(row[name] for row in heads)
                    line[f"{name}_error"] = statistics.mean(abs(row[name] - row[rate]) for row in heads)
            found.append(line)
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Misses, observed and predicted, with each model's mean absolute error over heads."""
    shown = [["gate", "heads", "missed", *(f"{model} (error)" for model in MODELS)]]
    for line in lines:
        gate = f"{line['block_size']}/{line['topk']}, {line['which']}"
        cells = [f"{line[f'missed_{model}']:.3f} ({line[f'missed_{model}_error']:.3f})" for model in MODELS]
        shown.append([gate, str(line["heads"]), f"{line['missed']:.3f}", *cells])
    return shown


def draw_heads(axes: Axes, rows: Sequence[Row], model: str) -> None:
    """Observed over predicted rates at which another block is scored higher; heads that retrieve stand out."""
    looking = {id(row) for row in retrieving(rows)}
    for here, size, alpha in ((False, 4.0, 0.25), (True, 10.0, 0.9)):
        own = [row for row in rows if (id(row) in looking) is here]
        colour = COLOURS[model] if here else GREY
        x, y = ([row[key] for row in own] for key in (f"outranked_{model}", "outranked"))
        axes.scatter(x, y, color=colour, lw=0, s=size, alpha=alpha, rasterized=True)
    axes.plot([0, 1], [0, 1], color=INK, lw=0.8)
    axes.set_xlabel(f"predicted by {model}")
    axes.set_ylabel("another block scored higher")


def draw_misses(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    """Misses over block sizes, of heads that retrieve where there are any: observed, and by each model."""
    which = "retrieval" if any(line["which"] == "retrieval" for line in lines) else "all"
    own = [line for line in lines if line["which"] == which]
    sizes = [line["block_size"] for line in own]
    axes.plot(sizes, [line["missed"] for line in own], "o-", color=INK, label="observed")
    for model, style in zip(COLOURS, STYLES, strict=True):
        axes.plot(sizes, [line[f"missed_{model}"] for line in own], style, color=COLOURS[model], label=model)
    powers_of_two(axes, sizes)
    axes.set_xlabel("block size")
    axes.set_ylabel(f"block missed, {which} heads")
    axes.set_ylim(-0.05, 1.3)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.legend(loc="upper left", ncols=2, columnspacing=1)


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """Draw the heads under the formula and under `scores`, and misses over block sizes."""
    heads = content["results"]["heads"]
    rows = [dict(zip(heads, values, strict=True)) for values in zip(*heads.values(), strict=True)]
    draw_signal(figure, rows, content["results"]["summary"])


def draw_signal(figure: Figure, rows: Sequence[Row], lines: Sequence[Mapping[str, Any]]) -> None:
    """The three panels, of rows and their `summary`."""
    left, middle, right = figure.subplots(1, 3)
    draw_heads(left, rows, "paper")
    draw_heads(middle, rows, "scores")
    draw_misses(right, lines)


def columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The rows' values by name, to four digits, more than the samples tell."""
    return {key: [_rounded(row[key]) for row in rows] for key in rows[0]}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path, help="evaluation.json with needle_signal")
    parser.add_argument("--attention", default="full", help="with which attention the model ran; default: full")
    parser.add_argument("--length", help="tokens of the samples; default: the longest")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    found = json.loads(given.evaluation.read_text())["needle_signal"]
    if given.attention not in found["rows"]:
        parser.error(f"--attention: given {given.attention}; {given.evaluation} has {', '.join(found['rows'])}")
    lengths = found["rows"][given.attention]
    length = given.length or max(lengths, key=int)
    if length not in lengths:
        parser.error(f"--length: given {length}; {given.evaluation} has {', '.join(lengths)}")
    rows = lengths[length]
    settings = {key: found[key] for key in ("gates", "samples", "head_dim")}
    lines = summary(rows)
    save(
        given.output,
        {**settings, "attention": given.attention, "length": int(length)},
        {"summary": lines, "heads": columns(rows)},
    )
    print(markdown(table(lines)))


if __name__ == "__main__":
    main()
