"""The page of public reports names tests that exist and that name their reports."""

import ast
import re
from pathlib import Path

import pytest

from tests.conformance.faults import FAULTS
from tests.guide import ROOT

PAGE = ROOT / "benchmarks" / "measured" / "conformance.md"
ROW = re.compile(r"^\| (?P<reports>[^|]+) \| [^|]+ \| [^|]+ \| \[`(?P<test>test_\w+)`\]\((?P<file>[^)]+)\) \|$", re.M)
ROWS = [match.groupdict() for match in ROW.finditer(PAGE.read_text())]


def docstrings_of(path: Path) -> dict[str, str]:
    """The tests of a file with their docstrings in one line."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: " ".join((ast.get_docstring(node) or "").split()) for node in functions}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["reports"])
def test_a_report_has_a_test_that_names_it(row: dict[str, str]) -> None:
    path = (PAGE.parent / row["file"]).resolve()
    found = docstrings_of(path)
    assert row["test"] in found
    if path.parent == Path(__file__).parent:
        assert [
            report for report in row["reports"].split(", ") if report.rpartition("#")[2] not in found[row["test"]]
        ] == []


def test_the_page_has_every_report_and_fault() -> None:
    text = PAGE.read_text()
    reports = [report for row in ROWS for report in row["reports"].split(", ")]
    assert f"This page has {len(reports)} public reports" in text
    assert [name for name in FAULTS if f"- {name}\n" not in text] == []
    named = {
        number
        for path in Path(__file__).parent.glob("test_*.py")
        for docstring in docstrings_of(path).values()
        for number in re.findall(r"#(\d{3,})", docstring)
    }
    assert named <= {report.rpartition("#")[2] for report in reports}
