"""Cost of sparse attention, split into budget, selector and weights: one table and one picture of several evaluations.

    bash launch/smollm2.sh split      # evaluates a published model and one trained at 32K, then calls this
    python -m benchmarks.oracle_split NAME=FOLDER/evaluation.json ... --output RESULT.json --plot PLOT.svg

Reads what `moba-train eval --tasks oracle` found (docs/how-to/evaluate.md). A row is a model and a budget.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plotting import BLUE, FULL, MOBA, saved
from benchmarks.record import markdown, save
from moba_train.config.base import format_count

Row = Mapping[str, Any]
COLOURS = {"budget": BLUE, "selector": MOBA, "weights": FULL}


def rows(model: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each budget of one evaluation: nats of trailing loss with their standard errors, and the share of
    needles with full attention, the ideal selection and the gate."""
    attentions = found["attentions"]
    length = found["seq_len"]
    full = attentions["full"]
    shown = []
    for budget in found["budgets"]:
        label = budget["label"]
        losses = {name: budget["loss"].get(name) for name in ("budget", "selector")}
        losses["weights"] = found["weights"] and found["weights"]["loss"]
        needles = {
            name: attentions[key]["scores"].get("needle")
            for name, key in (("full", "full"), ("ideal", f"oracle {label}"), ("gate", f"gate {label}"))
            if key in attentions
        }
        keys = budget["block_size"] * budget["topk"]
        shown.append(
            {"model": model, "length": length, "label": label, "keys": keys, "loss": losses, "needles": needles}
            | {"full_loss": full["mean"][-1]}
        )
    return shown


def table(found: Sequence[Row]) -> list[list[str]]:
    """Errors in nats, and needles with full attention, the ideal selection and the gate."""
    head = ["model", "blocks", "keys", "full: loss", "+ budget", "+ selector", "+ weights"]
    shown = [[*head, "needles: full", "ideal", "gate"]]
    for row in found:
        name = f"{row['model']}, {format_count(row['length'], 1024)}"
        losses = [_error(row["loss"][key]) for key in COLOURS]
        needles = [_share(row["needles"].get(key)) for key in ("full", "ideal", "gate")]
        shown.append([name, row["label"], str(row["keys"]), f"{row['full_loss']:.3f}", *losses, *needles])
    return shown


def _error(pair: Sequence[float | None] | None) -> str:
    if pair is None or pair[0] is None:
        return "–"
    return f"{pair[0]:+.3f}" + ("" if pair[1] is None else f" ± {pair[1]:.3f}")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """For each model, bars of what each budget adds to full attention's loss, and needles beside them."""
    by_model: dict[str, list[Row]] = {}
    for row in content["results"]:
        by_model.setdefault(f"{row['model']}, {format_count(row['length'], 1024)}", []).append(row)
    panels = figure.subplots(len(by_model), 2, sharex="col", sharey="row", squeeze=False)
    for (losses, needles), (name, own) in zip(panels, by_model.items(), strict=True):
        _draw_losses(losses, own)
        _draw_needles(needles, own)
        losses.set_ylabel(name)
    panels[-1][0].set_xlabel("nats above full attention")
    panels[-1][1].set_xlabel("share of needles")
    drawn = [axes.get_legend_handles_labels() for axes in panels.flat]
    marks = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
    figure.legend(marks.values(), marks.keys(), loc="outside upper center", ncols=len(marks))


def _draw_losses(axes: Axes, own: Sequence[Row]) -> None:
    places = range(len(own))
    left = [0.0] * len(own)
    for name, colour in COLOURS.items():
        pairs = [row["loss"][name] for row in own]
        values = [0.0 if pair is None or pair[0] is None else pair[0] for pair in pairs]
        if any(values):
            axes.barh(places, values, left=left, color=colour, label=name)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.set_yticks(places, [row["label"] for row in own])
    axes.invert_yaxis()


def _draw_needles(axes: Axes, own: Sequence[Row]) -> None:
    for name, mark, colour in (("full", "|", FULL), ("ideal", "o", BLUE), ("gate", "x", MOBA)):
        points = [
            (row["needles"][name], place) for place, row in enumerate(own) if row["needles"].get(name) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), mark, color=colour, label=name)
    axes.set_xlim(-0.05, 1.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluations", nargs="+", metavar="NAME=FILE", help="a model's name and its evaluation.json")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    parser.add_argument("--plot", type=Path, help="SVG file")
    given = parser.parse_args()
    found = []
    for one in given.evaluations:
        name, is_named, file = one.partition("=")
        if not is_named:
            parser.error(f"NAME=FILE: given {one}; allowed: a name, = and a path")
        evaluation = json.loads(Path(file).read_text())
        if "oracle" not in evaluation:
            parser.error(f"{file}: holds {', '.join(evaluation['tasks'])}; allowed: a result of --tasks oracle")
        found += rows(name, evaluation["oracle"])
    save(given.output, {"evaluations": given.evaluations}, found)
    if given.plot is not None:
        text = given.output.read_text()
        with saved(given.plot, text, 1 + 0.25 * len(found)) as figure:
            draw(figure, json.loads(text))
    print(markdown(table(found)))


if __name__ == "__main__":
    main()
