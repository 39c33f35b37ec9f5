"""The tables of benchmarks/measured/attention.md are what the result file says, and say nothing that was not
measured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attention_table import BARS, RESULT, TABLES, insert, render, render_short, summary
from benchmarks.record import END

ROOT = Path(__file__).parents[2]


def column(forward: float, both: float, peak: float | None = None) -> dict[str, Any]:
    times = {"forward_ms": {"median": forward}, "both_ms": {"median": both}}
    return times if peak is None else {**times, "peak_gib": peak}


def result(row: str, **columns: dict[str, Any]) -> dict[str, Any]:
    return {"row": row, "columns": columns}


def file(*results: dict[str, Any]) -> dict[str, Any]:
    return {"device": "some GPU", "torch": "2", "commit": "0123456789", "command": "python", "results": list(results)}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_holds_the_tables_of_the_committed_results() -> None:
    page = "benchmarks/measured/attention.md"
    text = (ROOT / page).read_text()
    assert insert(text, json.loads(RESULT.read_text())) == text, f"python -m benchmarks.attention_table --write {page}"


def test_summary_compares_with_cudnn_and_with_the_bar() -> None:
    found = summary(result("8K:512/3", auto=column(1, 1.9, 0.6), cudnn=column(1, 3.8, 0.5)))
    assert found["speedup"] == pytest.approx(2)
    assert found["memory_ratio"] == pytest.approx(1.2)
    assert found["bar"] == {"both_ms": BARS["8K:512/3"], "reached": True}
    missed = summary(result("8K:512/3", auto=column(1, 2.1, 0.6), cudnn={"error": "OutOfMemoryError"}))
    assert missed == {"bar": {"both_ms": 2.0, "reached": False}}
    assert "bar" not in summary(result("8K:512/3,routing=sink", auto=column(1, 2, 1)))


def test_plain_rows_and_variants_have_a_table_each() -> None:
    text = render(
        file(
            result("8K:512/3", auto=column(1.234, 1.9, 0.6), cudnn=column(1, 3.8, 0.5), flash2={"error": "no"}),
            result("1M:4096/12", auto=column(1600, 6700.4, 57)),
            {**result("8K:512/3,routing=sink", auto=column(1, 2, 1)), "routed": 0.999},
            {"row": "16K:512/3", "error": "it failed"},
        )
    )
    plain, varied, source = text.split("\n\n")
    head, _, first, second = plain.splitlines()
    assert "dense, FlashAttention-4" not in head, "it was not measured"
    values = dict(zip(cells(head), cells(first), strict=True))
    assert values["MoBA, ours"] == "1.23 / 1.90"
    assert values["dense, FlashAttention-2"] == "fails"
    assert (values["× cuDNN"], values["bar"], values["peak GiB (of cuDNN's)"]) == ("2.0", "2 ✓", "0.6 (1.20)")
    values = dict(zip(cells(head), cells(second), strict=True))
    assert (values["MoBA, ours"], values["bar"]) == ("1600 / 6700", "6600 ✗")
    assert values["dense, cuDNN"] == values["× cuDNN"] == "–", "what was not measured is not a number"
    assert cells(varied.splitlines()[2])[0] == "8K:512/3, routing=sink"
    assert "99.9 %" in varied
    assert source == "some GPU, torch 2, commit 0123456: `python`."


def test_the_short_table_compares_with_the_fastest_dense_kernel() -> None:
    text = render_short(
        file(
            result(
                "8K:512/3", auto=column(1, 2, 0.6), cudnn=column(1, 4, 0.5), flash4=column(2, 3), flash2={"error": ""}
            ),
            result("1M:4096/12", auto=column(1600, 6700, 57)),
            result("8K:512/3,routing=sink", auto=column(1, 2, 1)),
        )
    )
    head, _, *rows = map(cells, text.splitlines())
    first, second = (dict(zip(head, row, strict=True)) for row in rows)
    assert (first["fastest dense kernel"], first["speed-up"]) == ("2.00 / 3.00", "1.5")
    assert (second["fastest dense kernel"], second["speed-up"]) == ("not measured", "")


@pytest.mark.parametrize("marker", TABLES)
def test_inserting_replaces_what_was_there_and_needs_both_markers(marker: str) -> None:
    data = file(result("8K:512/3", auto=column(1, 1.9, 0.6), cudnn=column(1, 3.8, 0.5)))
    once = insert(f"a\n{marker}\nold\n{END}\nb\n", data)
    assert re.fullmatch(rf"a\n{re.escape(marker)}\s+\| tokens .*\s+{re.escape(END)}\nb\n", once, re.DOTALL)
    assert "old" not in once
    assert insert(once, data) == once
    for incomplete in (marker, END):
        with pytest.raises(ValueError, match="no place for"):
            insert(incomplete, data)
