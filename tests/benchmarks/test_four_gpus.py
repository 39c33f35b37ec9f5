"""`benchmarks/four_gpus.sh` runs programs that there are, with rows that they take."""

import shlex
import subprocess
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.training_rows import Row, parse_row

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """Run the script with a program in Python's place that writes down what it is given and ends with `status`."""

    def run(*parts: str, status: int = 0) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\nexit {status}\n')
        python.chmod(0o755)
        command = ["bash", "benchmarks/four_gpus.sh", str(tmp_path / "results"), *parts]
        environment = {"PATH": "/usr/bin:/bin", "MOBA_PYTHON": str(python)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        calls = tmp_path / "calls"
        return done, list(map(shlex.split, calls.read_text().splitlines())) if calls.exists() else []

    return run


def test_every_part_names_programs_and_rows_that_there_are(run):
    done, calls = run()
    assert done.returncode == 0, done.stderr
    modules = [[word for before, word in pairwise(call) if before == "-m"] for call in calls]
    programs = [next(name for name in names if name != "torch.distributed.run") for names in modules]
    assert {*programs} == {
        "benchmarks.training",
        "benchmarks.training_profile",
        "benchmarks.checkpoint_layouts",
        "benchmarks.context_parallel",
        "benchmarks.context_skew",
        "benchmarks.context_timeline",
        "pytest",
    }
    assert all(find_spec(program) for program in programs)
    rows = [word for call in calls for word in call if word[:1].isdigit() and ":" in word]
    assert len(rows) == 14 + 1 + 5
    assert {parse_row(row, Row()).seq_len for row in rows} == {8192, 131_072}


def test_a_part_that_fails_is_named_and_the_others_run(run):
    done, calls = run("profile", "tests", status=3)
    assert done.returncode == 1
    assert len(calls) == 3
    assert "failed: training-profile-8b-tp2-cp2-h200-x4 context-tests context-soak" in done.stdout


def test_an_unknown_part_is_refused_before_anything_runs(run, tmp_path):
    done, calls = run("9k")
    assert (done.returncode, calls) == (2, [])
    assert "PART: given '9k'; allowed: 8k, 128k, profile, layouts, context, tests" in done.stderr
    assert not (tmp_path / "results").exists()
