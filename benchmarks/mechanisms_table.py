"""The table of the mechanisms benchmark's result file.

python -m benchmarks.mechanisms_table                                                 # print it as Markdown
python -m benchmarks.mechanisms_table --write benchmarks/measured/attention-kinds.md  # between its markers
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention_rows import short
from benchmarks.record import insert_tables, markdown

RESULT = Path(__file__).parent / "results" / "mechanisms-h200.json"
MARKER = "<!-- mechanisms table: python -m benchmarks.mechanisms_table --write FILE -->"
FULL = "full"
MOST_MEMORY = 1.5
"""Times the memory of full attention from which on a row is flagged."""

Result = dict[str, Any]


def compared(result: Result, others: Sequence[Result]) -> Result:
    """`result` with its time and memory in units of full attention's at the same length, where both are measured, and
    its `flags`."""
    for full in others:
        if full["row"] == FULL and full["tokens"] == result["tokens"] and "both_ms" in full:
            break
    else:
        return result
    found: Result = {}
    times = "both_ms" if "both_ms" in result else "forward_ms"
    if times in result:
        found["time_ratio"] = result[times]["median"] / full[times]["median"]
        if result.get("pairs") and full.get("pairs"):  # 1: as fast as full attention for each pair of query and key
            found["time_per_pair"] = found["time_ratio"] * full["pairs"] / result["pairs"]
    if "both_ms" in result and result.get("peak_gib") and full.get("peak_gib"):
        found["memory_ratio"] = result["peak_gib"] / full["peak_gib"]
    flags = ["slower than full attention"] if found.get("time_ratio", 0) > 1 else []
    flags += [f"{found['memory_ratio']:.1f} x its memory"] if found.get("memory_ratio", 0) > MOST_MEMORY else []
    return result | found | ({"flags": flags} if flags else {})


def render(data: Result) -> str:
    """One line for each row, columns for each length; below, why numbers are missing, and where they come from."""
    results: list[Result] = data["results"]
    lengths = sorted({result["tokens"] for result in results})
    names = list(dict.fromkeys(result["row"] for result in results))
    by_place = {(result["row"], result["tokens"]): result for result in results}
    lines = [
        [f"`{name}`", *(_cell(by_place.get((name, tokens))) for tokens in lengths), _parameters(results, name)]
        for name in names
    ]
    table = markdown([["kind", *(f"{short(tokens)} tokens" for tokens in lengths), "own parameters"], *lines])
    legend = (
        "Forward / forward and backward in milliseconds, then peak memory in GiB; in brackets both in units of full "
        "attention's. ✗: slower than full attention, or more than 1.5 times its memory."
    )
    settings = data["settings"]
    shape = (
        f"Hidden size {settings['hidden_size']}, {settings['heads']} query heads, {settings['kv_heads']} key/value "
        f"heads of {settings['head_dim']}, {settings['dtype']}; {data['device']}, torch {data['torch']}, commit "
        f"{data['commit'][:7]}: `{data['command']}`."
    )
    missing = "\n".join(f"- {reason}" for reason in _reasons(results))
    return "\n\n".join(part for part in (table, legend, missing, shape) if part)


def _cell(result: Result | None) -> str:
    if result is None:
        return "–"
    if "forward_ms" not in result:
        return "not run" if "skipped" in result else "fails"
    both = result.get("both_ms")
    times = f"{_number(result['forward_ms']['median'])} / {_number(both['median']) if both else '–'}"
    memory = f"; {result['peak_gib']:.1f}" if result.get("peak_gib") else ""
    ratios = [f"{result[key]:.2f}" for key in ("time_ratio", "memory_ratio") if key in result]
    against_full = f" ({', '.join(ratios)})" if ratios else ""
    return f"{times}{memory}{against_full}{' ✗' if result.get('flags') else ''}"


def _parameters(results: Sequence[Result], name: str) -> str:
    counts = [result["parameters"] for result in results if result["row"] == name and "parameters" in result]
    return f"{counts[0]:,}" if counts and counts[0] else "–"


def _reasons(results: Sequence[Result]) -> list[str]:
    """Why rows have no numbers, or no backward pass; each reason once for all lengths that have it."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for key, word in (("skipped", "left out"), ("error", "fails"), ("forward_only", "forward only")):
            if key in result:
                reasons.setdefault((result["row"], f"{word}: {result[key]}"), []).append(short(result["tokens"]))
    return [f"`{name}` at {', '.join(lengths)}: {reason}" for (name, reason), lengths in reasons.items()]


def _number(value: float) -> str:
    """Three significant digits, no decimals from a hundred on."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--write", type=Path, help="Markdown file with the marker")
    arguments = parser.parse_args()
    table = render(json.loads(arguments.json.read_text()))
    if arguments.write:
        arguments.write.write_text(insert_tables(arguments.write.read_text(), {MARKER: table}))
    else:
        print(table)


if __name__ == "__main__":
    main()
