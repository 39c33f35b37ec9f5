"""A recorded run, and what tests put into copies of it.

`tests/fixtures/three_stages` is a real run of a tiny model on one CPU: stages of 64, 128 and 256 tokens, a gradient
scaled by 1,000 at step 48 and a loss that overflows at step 96 (a spike, then a rollback), stopped and resumed after
steps 85 and 125, evaluated by position with MoBA and full attention. The file in `evaluations` has numbers made up for
the tests.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parents[2] / "fixtures" / "three_stages"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A copy of the recorded run."""
    return Path(shutil.copytree(RECORDED, tmp_path / "three_stages"))


@pytest.fixture
def change_records() -> Callable[[Path, Callable[[dict[str, Any]], object]], None]:
    """Calls a function on every record of a run's metrics.jsonl, which it may change."""

    def change(run: Path, edit: Callable[[dict[str, Any]], object]) -> None:
        path = run / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            edit(record)
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))

    return change
