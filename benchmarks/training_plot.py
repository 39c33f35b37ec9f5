"""Tokens per second and GPU against sequence length, from results of `training`, as a picture and as a table.

    python -m benchmarks.pictures training
    python -m benchmarks.training_plot --write benchmarks/measured/training.md   # the table between its markers

Rows of several files belong together; of rows with one name, the last file's is taken. Of rows that differ only in
recomputation or layout, the fastest of a length is a point of the picture. Rows with more sequences in a step than
others of their length are left out: their optimizer counts for less.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plotting import FULL, GREY, INK, MOBA, TORCHTITAN, name, powers_of_two
from benchmarks.record import insert_tables
from benchmarks.training import table

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
MARKER = "<!-- training table: python -m benchmarks.training_plot --write FILE -->"
SHOWN = ("training-8b-h200-x2", "training-8b-8k-compiled-sums-h200-x2", "training-8b-1m-512-8-h200-x4")
"""Result files of the picture: H200 alone, and one setting a line."""
LINES = {"MoBA 512/8": MOBA, "full attention": FULL, "torchtitan": TORCHTITAN}
NAMES = {
    "MoBA 512/8": "moba_train, MoBA with 8 blocks of 512 keys",
    "full attention": "moba_train, full attention",
}
"""torchtitan's has its version, from the result."""

Points = dict[int, dict[str, Any]]
"""The fastest row of each sequence length."""


def series(results: dict[str, dict[str, Any]]) -> dict[str, Points]:
    """Points of each of the LINES, all in bf16."""
    found: dict[str, Points] = defaultdict(dict)
    measured = {row: result for row, result in results.items() if "error" not in result and result["fp8"] == "off"}
    fewest: dict[int, int] = {}
    for result in measured.values():
        length, sequences = result["seq_len"], result["sequences"]
        fewest[length] = min(sequences, fewest.get(length, sequences))
    for row, result in measured.items():
        line, length = result["attention"], result["seq_len"]
        if line not in LINES or result["sequences"] > fewest[length]:
            continue
        if length not in found[line] or _rate(result) > _rate(found[line][length]):
            found[line][length] = result | {"row": row}
    return {line: dict(sorted(points.items())) for line, points in found.items()}


def rows_of(contents: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of result files, by name, shorter lengths first; what was not measured does not replace what was. Of a
    file that leaves out updates, without our trainer's short steps."""
    found: dict[str, dict[str, Any]] = {}
    for content in contents:
        rows = {name: row for name, row in content["results"].items() if not _is_wrong(row, content)}
        found |= {name: row for name, row in rows.items() if "error" not in row or name not in found}
    return dict(sorted(found.items(), key=lambda item: item[1]["seq_len"]))


def _is_wrong(row: dict[str, Any], content: dict[str, Any]) -> bool:
    """Whether the update that the steps of the file leave out is too much of this row's."""
    ours = "error" not in row and row["system"] == "moba_train"
    return ours and "lacks_update" in content and row["step_s"]["median"] < LEAST_S


def draw(figure: Figure, *contents: dict[str, Any]) -> None:
    """Draw a line for each system and attention."""
    axes = figure.subplots()
    lines = series(rows_of(contents))
    for line, points in lines.items():
        rates = [_rate(result) for result in points.values()]
        longest = max(points)
        colour = LINES[line]
        axes.plot([*points], rates, "o-", color=colour)
        if line == "MoBA 512/8":
            name(axes, NAMES[line], (min(points), rates[0]), colour, (1, 13))
            name(axes, f"on {points[longest]['cp']} GPUs", (longest, rates[-1]), colour, (0, -12))
        else:
            offset = (6, 4 if line == "full attention" else -4)
            name(axes, NAMES.get(line, str(points[longest]["system"])), (longest, rates[-1]), colour, offset)
    powers_of_two(axes, [2**power for power in range(13, 21)])
    _mark_factor(axes, lines)
    axes.set_ylim(0, 11_000)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens in a sequence")
    axes.set_ylabel("tokens/s per H200 GPU")


def _mark_factor(axes: Axes, lines: dict[str, Points]) -> None:
    """An arrow from torchtitan to MoBA at the longest length of both, with the factor between them."""
    if lengths := lines.get("MoBA 512/8", {}).keys() & lines.get("torchtitan", {}).keys():
        length = max(lengths)
        low, high = (_rate(lines[line][length]) for line in ("torchtitan", "MoBA 512/8"))
        arrow = {"arrowstyle": "->", "color": GREY, "shrinkA": 5, "shrinkB": 5}
        axes.annotate("", (length, high), (length, low), arrowprops=arrow)
        name(axes, f"{high / low:.1f} times", (length, (low + high) / 2), INK)


def _rate(result: dict[str, Any]) -> float:
    rate: float = result["tokens_per_s_per_device"]["median"]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, nargs="+", default=RESULTS)
    parser.add_argument("--write", type=Path, help="Markdown file with the marker")
    arguments = parser.parse_args()
    rows = table(rows_of([json.loads(file.read_text()) for file in arguments.json]))
    if arguments.write:
        arguments.write.write_text(insert_tables(arguments.write.read_text(), {MARKER: rows}))
    print(rows)


if __name__ == "__main__":
    main()
