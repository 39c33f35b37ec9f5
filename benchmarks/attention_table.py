"""Tables from the attention benchmark's result file.

python -m benchmarks.attention_table                     # print them as Markdown
python -m benchmarks.attention_table --write PAGE ...    # replace the text between the markers of pages,
                                                         # which are in benchmarks/measured/attention.md
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.attention_rows import Case, short
from benchmarks.record import insert_tables, markdown

RESULT = Path(__file__).parent / "results" / "attention-h200.json"
BARS = {
    "8K:512/3": 2.0,
    "32K:512/3": 6.5,
    "32K:128/8": 9.0,
    "64K:128/8": 19.0,
    "128K:128/8": 42.0,
    "128K:4096/12": 690.0,
    "256K:128/8": 100.0,
    "256K:4096/12": 1500.0,
    "512K:4096/12": 3200.0,
    "1M:4096/12": 6600.0,
}
"""Milliseconds that forward and backward together, selection included, must not exceed on an H200."""
COLUMNS = {
    "auto": "MoBA, ours",
    "triton": "by Triton",
    "composed": "over a varlen kernel",
    "cudnn": "dense, cuDNN",
    "flash2": "dense, FlashAttention-2",
    "flash4": "dense, FlashAttention-4",
    "flex": "FlexAttention",
    "flash_moba": "FlashMoBA",
    "fla": "fla's MoBA",
    "moonshot": "Moonshot's MoBA",
}
DENSE = ("cudnn", "flash2", "flash4")
OTHERS = ("flex", "flash_moba", "fla", "moonshot")
"""MoBA by others, whose cells have the peak of memory as well, in GiB."""

Result = dict[str, Any]


def median(result: Result, column: str, what: str) -> float | None:
    """A measured median, or None."""
    value = result["columns"].get(column, {}).get(what)
    return None if value is None else value["median"]


def summary(result: Result) -> dict[str, Any]:
    """Comparison of one row's measurements with dense cuDNN in the same run, and with the row's bar."""
    ours = median(result, "auto", "both_ms")
    theirs = median(result, "cudnn", "both_ms")
    found: dict[str, Any] = {}
    if ours and theirs:
        found["speedup"] = theirs / ours
        mine, other = (result["columns"][name].get("peak_gib") for name in ("auto", "cudnn"))
        if mine and other:
            found["memory_ratio"] = mine / other
    if ours and result["row"] in BARS:
        found["bar"] = {"both_ms": BARS[result["row"]], "reached": ours <= BARS[result["row"]]}
    return found


def render(data: Result) -> str:
    """All tables of a result file, as Markdown."""
    results = _rows(data)
    plain = [result for result in results if Case.parse(result["row"]).is_plain]
    varied = [result for result in results if not Case.parse(result["row"]).is_plain]
    parts = [_table(plain, _plain_cells)] if plain else []
    if varied:
        parts.append(_table(varied, _varied_cells))
    parts.append(f"{data['device']}, torch {data['torch']}, commit {data['commit'][:7]}: `{data['command']}`.")
    return "\n\n".join(parts)


def render_short(data: Result) -> str:
    """A short table: MoBA next to the fastest dense kernel."""
    results = [result for result in _rows(data) if Case.parse(result["row"]).is_plain]
    return _table(results, _short_cells)


def _rows(data: Result) -> list[Result]:
    """The rows that were measured. Files from before 2026-11-22 call the backend `composed` by its old name, flash."""
    rows = [result for result in data["results"] if "columns" in result]
    names = {"flash": "composed"}
    return [row | {"columns": {names.get(name, name): cell for name, cell in row["columns"].items()}} for row in rows]


def _table(results: list[Result], cells: Any) -> str:
    columns = [name for name in COLUMNS if any(name in result["columns"] for result in results)]
    lines = [cells(result, columns) for result in results]
    head = list(lines[0])
    return markdown([head, *([line[title] for title in head] for line in lines)])


def _short_cells(result: Result, columns: list[str]) -> dict[str, str]:
    case = Case.parse(result["row"])
    ours = median(result, "auto", "both_ms")
    dense = {name: both for name in DENSE if (both := median(result, name, "both_ms")) is not None}
    fastest = min(dense, key=lambda name: dense[name], default=None)
    return {
        "tokens": short(case.tokens),
        "block/topk": f"{case.block_size}/{case.topk}",
        "MoBA": _times(result, "auto"),
        "fastest dense kernel": "not measured" if fastest is None else _times(result, fastest),
        "speed-up": "" if fastest is None or ours is None else f"{dense[fastest] / ours:.1f}",
        "peak GiB": _peak(result, {}),
    }


def _plain_cells(result: Result, columns: list[str]) -> dict[str, str]:
    case = Case.parse(result["row"])
    found = summary(result)
    cells = {"tokens": short(case.tokens), "block/topk": f"{case.block_size}/{case.topk}"}
    cells |= {COLUMNS[name]: _times(result, name) for name in columns}
    bar = found.get("bar")
    cells["× cuDNN"] = f"{found['speedup']:.1f}" if "speedup" in found else "–"
    cells["bar"] = f"{bar['both_ms']:g} {'✓' if bar['reached'] else '✗'}" if bar else "–"
    return cells | {"peak GiB (of cuDNN's)": _peak(result, found)}


def _varied_cells(result: Result, columns: list[str]) -> dict[str, str]:
    found = summary(result)
    cells = {"row": result["row"].replace(",", ", ")}
    cells |= {COLUMNS[name]: _times(result, name) for name in columns}
    cells["routed as wanted"] = f"{100 * result['routed']:.1f} %" if "routed" in result else "–"
    cells["× cuDNN"] = f"{found['speedup']:.1f}" if "speedup" in found else "–"
    return cells | {"peak GiB (of cuDNN's)": _peak(result, found)}


def _times(result: Result, column: str) -> str:
    forward, both = (median(result, column, f"{name}_ms") for name in ("forward", "both"))
    if forward is None or both is None:
        return "fails" if "error" in result["columns"].get(column, {}) else "–"
    peak = f"; {result['columns'][column]['peak_gib']:.1f}" if column in OTHERS else ""
    return f"{_number(forward)} / {_number(both)}{peak}"


def _peak(result: Result, found: dict[str, Any]) -> str:
    if "peak_gib" not in result["columns"].get("auto", {}):
        return "–"
    ratio = f" ({found['memory_ratio']:.2f})" if "memory_ratio" in found else ""
    return f"{result['columns']['auto']['peak_gib']:.1f}{ratio}"


def _number(value: float) -> str:
    """Three significant digits, no decimals from a hundred on."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


TABLES: dict[str, Callable[[Result], str]] = {
    "<!-- attention table: python -m benchmarks.attention_table --write FILE -->": render,
    "<!-- short attention table: python -m benchmarks.attention_table --write FILE -->": render_short,
}
"""The table that belongs between each marker and `END`."""


def insert(text: str, data: Result) -> str:
    """`text` with each table that it has a marker for. Raises ValueError where it has no marker, or one without END."""
    return insert_tables(text, {marker: table(data) for marker, table in TABLES.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--write", type=Path, nargs="+", default=[], help="Markdown files with markers")
    arguments = parser.parse_args()
    data = json.loads(arguments.json.read_text())
    for path in arguments.write:
        path.write_text(insert(path.read_text(), data))
    if not arguments.write:
        print(render(data))


if __name__ == "__main__":
    main()
