"""Draws docs/images/training.svg, tokens per second and GPU against sequence length, from results of `training`.

    python -m benchmarks.training_plot
    python -m benchmarks.training_plot --write benchmarks/measured/training.md   # also the table between its markers

Rows of several files are drawn together; of rows with one name, the last file's is. Of rows that differ only in
recomputation or layout, the fastest of a length is a point. Rows with more sequences in a step than others of their
length are left out: their optimizer counts for less.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.plotting import GREY, STYLE, plain, stamp
from benchmarks.record import insert_tables
from benchmarks.training import table
from moba_train.config.base import format_count

_FILES = (
    "h200-x2",
    "8k-copy-engines-h200-x2",
    "8k-output-unit-again-h200-x2",
    "8k-compiled-sums-h200-x2",
    "8k-compiled-sums-flash4-h200-x2",
    "8k-layouts-h200-x2",
    "1m-512-8-h200-x4",
    "1m-h200-x4",
)
RESULTS = [Path(__file__).parent / "results" / f"training-8b-{name}.json" for name in _FILES]
LEAST_S = 3.0
"""Shorter steps of a file that leaves out most of the optimizer's update (`lacks_update`; 36 ms of the 8B model on two
GPUs) are not shown: it is more than 1 % of them."""
PLOT = Path(__file__).parent.parent / "docs" / "images" / "training.svg"
MARKER = "<!-- training table: python -m benchmarks.training_plot --write FILE -->"
COLORS = {"torchtitan": "#9c6b00", "full attention": "#1c7ed6", "MoBA 4096/12": "#9c36b5", "MoBA": "#d9480f"}
"""With a contrast of at least 3 to GitHub's white and to its dark background, as GREY."""

Points = dict[int, dict[str, Any]]
"""The fastest row of each sequence length."""


def series(results: dict[str, dict[str, Any]]) -> dict[tuple[str, bool], Points]:
    """Points of each line, by what trains (a key of COLORS) and whether in FP8."""
    found: dict[tuple[str, bool], Points] = defaultdict(dict)
    measured = {name: result for name, result in results.items() if "error" not in result}
    fewest: dict[int, int] = {}
    for result in measured.values():
        length, sequences = result["seq_len"], result["sequences"]
        fewest[length] = min(sequences, fewest.get(length, sequences))
    for name, result in measured.items():
        if result["sequences"] > fewest[result["seq_len"]]:
            continue
        line = (next(key for key in COLORS if result["attention"].startswith(key)), result["fp8"] != "off")
        best = found[line].get(result["seq_len"])
        if best is None or _rate(result) > _rate(best):
            found[line][result["seq_len"]] = result | {"row": name}
    return {line: dict(sorted(found[line].items())) for line in sorted(found)}


def rows_of(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rows of result files with these texts, by name, shorter lengths first; what was not measured does not replace
    what was. Of a file that leaves out updates, without our trainer's short steps."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        content = json.loads(text)
        rows = {name: row for name, row in content["results"].items() if not _is_wrong(row, content)}
        found |= {name: row for name, row in rows.items() if "error" not in row or name not in found}
    return dict(sorted(found.items(), key=lambda item: item[1]["seq_len"]))


def _is_wrong(row: dict[str, Any], content: dict[str, Any]) -> bool:
    """Whether the update that the steps of the file leave out is too much of this row's."""
    ours = "error" not in row and row["system"] == "moba_train"
    return ours and "lacks_update" in content and row["step_s"]["median"] < LEAST_S


def draw(texts: Sequence[str], plot: Path) -> None:
    """Plot the rows of result files with these texts."""
    lines = series(rows_of(texts))
    lengths = sorted({length for points in lines.values() for length in points})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for (what, fp8), points in lines.items():
            rates = [_rate(result) for result in points.values()]
            name = next(iter(points.values()))["system"] if what == "torchtitan" else f"moba_train, {what}"
            label = f"{name}, FP8" if fp8 else name
            axes.plot([*points], rates, "o--" if fp8 else "o-", color=COLORS[what], label=label, ms=4)
            for length, result in points.items() if what == "MoBA" else ():
                kind = result["attention"].removeprefix("MoBA ").split(",")[0]
                axes.annotate(
                    kind, (length, _rate(result)), (0, 6), textcoords="offset points", ha="center", color=GREY
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [format_count(length, 1024) for length in lengths])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of a sequence", color=GREY)
        axes.set_ylabel("tokens/s/GPU", color=GREY)
        plain(axes)
        figure.legend(frameon=False, labelcolor=GREY, loc="outside upper left", ncols=2)
        figure.savefig(
            plot, format="svg", transparent=True, metadata={"Date": None, "Description": stamp("".join(texts))}
        )


def _rate(result: dict[str, Any]) -> float:
    rate: float = result["tokens_per_s_per_device"]["median"]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, nargs="+", default=RESULTS)
    parser.add_argument("--output", type=Path, default=PLOT)
    parser.add_argument("--write", type=Path, help="Markdown file with the marker")
    arguments = parser.parse_args()
    texts = [file.read_text() for file in arguments.json]
    rows = table(rows_of(texts))
    if arguments.write:
        arguments.write.write_text(insert_tables(arguments.write.read_text(), {MARKER: rows}))
    draw(texts, arguments.output)
    print(rows)


if __name__ == "__main__":
    main()
