"""Metrics of two runs: which numbers count as equal."""

import json
import math
from pathlib import Path

import pytest

from moba_train.errors import UserError
from moba_train.tools.compare import compare


def metrics(path: Path, *losses: float) -> Path:
    records = [
        {"type": "metrics", "step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, start=1)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("one", "other", "tolerance", "equal"),
    [
        (2.0, 2.0, 0.0, True),
        (2.0, math.nextafter(2.0, 3.0), 0.0, False),
        (2.0, 2.02, 0.011, True),
        (2.0, 2.02, 0.009, False),
        (math.nan, math.nan, 0.0, True),
        (math.inf, math.inf, 0.0, True),
        (math.inf, -math.inf, 1.0, False),
        (2.0, math.nan, 1.0, False),
        (math.inf, 2.0, 1.0, False),
    ],
)
def test_numbers_are_equal_within_a_relative_tolerance(
    one: float, other: float, tolerance: float, equal: bool, tmp_path: Path
) -> None:
    ours, theirs = metrics(tmp_path / "a.jsonl", 1.0, one), metrics(tmp_path / "b.jsonl", 1.0, other)
    found = compare(ours, theirs, tolerance)
    assert found.compared == 2
    assert [text.partition(":")[0] for text in found.differing] == ([] if equal else ["step 2"])


def test_a_step_of_one_run_alone_differs(tmp_path: Path) -> None:
    ours, theirs = metrics(tmp_path / "a.jsonl", 1.0, 2.0), metrics(tmp_path / "b.jsonl", 1.0)
    assert compare(ours, theirs).differing == [f"step 2: only in {ours}"]


def test_a_file_without_steps_is_not_compared(tmp_path: Path) -> None:
    """Each step of the other file would count as missing there."""
    history, other = tmp_path / "metrics.jsonl", tmp_path / "corpus.jsonl"
    history.write_text(json.dumps({"type": "metrics", "step": 1, "loss": 2.0, "grad_norm": 1.0}) + "\n")
    other.write_text(json.dumps({"text": "a document"}) + "\n")
    with pytest.raises(UserError, match=r"corpus.jsonl: has no step of a training"):
        compare(history, other)
