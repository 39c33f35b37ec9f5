"""`benchmarks/four_gpus.sh` runs programs that there are, with rows that they take."""

import argparse
import json
import shlex
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

import moba_train.attention.registry  # noqa: F401  # the kinds' sections
from benchmarks import checkpoint_layouts
from benchmarks.training_rows import Row, parse_row
from moba_train.config.load import load_config
from moba_train.memory.memory import USABLE
from tests.resolved import check, plan_of

ROOT = Path(__file__).parents[2]


RunScript = Callable[..., tuple[subprocess.CompletedProcess[str], list[list[str]]]]
"""Runs it with parts; gives how it ended and the arguments of every program that it started."""


@pytest.fixture
def run(tmp_path: Path) -> RunScript:
    """Run the script with a program in Python's place that writes down what it is given and ends with `status`."""

    def run(
        *parts: str, status: int = 0, gpus: int = 4, output: str = ""
    ) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        python = tmp_path / "python"
        python.write_text(
            "#!/bin/sh\n"
            f'case "$2" in *device_count*) echo {gpus};; *device_name*) echo b300;; esac\n'
            '[ "$1" = -c ] && exit\n'
            f'echo "$@" >> "{tmp_path}/calls"; touch "$TMPDIR/tmpleft"\n'
            f"exit {status}\n"
        )
        python.chmod(0o755)
        command = ["bash", "benchmarks/four_gpus.sh", output or str(tmp_path / "results"), *parts]
        (tmp_path / "scratch").mkdir(exist_ok=True)
        environment = {"PATH": "/usr/bin:/bin", "MOBA_PYTHON": str(python), "TMPDIR": str(tmp_path / "scratch")}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        calls = tmp_path / "calls"
        return done, list(map(shlex.split, calls.read_text().splitlines())) if calls.exists() else []

    return run


def test_every_part_names_programs_and_rows_that_there_are(
    run: RunScript,
) -> None:
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
    assert len(rows) == 17 + 1 + 5
    assert {parse_row(row, Row()).seq_len for row in rows} == {8192, 131_072}
    outputs = [call[call.index("--output") + 1] for call in calls if "--output" in call]
    assert len({*outputs}) == len(outputs) == 10
    assert all("-b300" in output for output in outputs)


def test_a_part_that_fails_is_named_and_the_others_run(
    run: RunScript,
) -> None:
    done, calls = run("profile", "tests", status=3)
    assert done.returncode == 1
    assert len(calls) == 3
    assert "failed: training-profile-8b-tp2-cp2-b300-x4 context-tests context-soak" in done.stdout


def test_nothing_is_left_of_programs_that_took_too_long(run: RunScript, tmp_path: Path) -> None:
    run("profile", "tests", status=124)
    assert not list((tmp_path / "scratch").iterdir())


GPUS = 4
FITS = 139.8 * USABLE
"""GiB of an H200 that a run can use."""


def options(call: list[str]) -> dict[str, list[str]]:
    """The options of a command, with their values."""
    found: dict[str, list[str]] = {}
    for word in call:
        if word.startswith("--"):
            values = found[word] = []
        elif found:
            values.append(word)
    return found


def test_rows_are_layouts_of_the_8b_model_that_fit_four_h200(run: RunScript, tmp_path: Path) -> None:
    _, calls = run("8k", "128k", "profile", "layouts")
    checked = 0
    for call in calls:
        given = options(call)
        assert given["--model"] == ["llama3-8b"]
        for text in given.get("--rows", []) + given.get("--row", []):
            row = parse_row(text, Row())
            if row.by_torchtitan:
                continue
            content = row.recipe("llama3-8b", tmp_path / "corpus", tmp_path / "run", GPUS, 1)
            if "--sequences" in given:
                sizes = argparse.Namespace(
                    model="llama3-8b", layers=None, gpus=GPUS, sequences=int(given["--sequences"][0]), every=4
                )
                content = checkpoint_layouts.recipe(row, tmp_path / "corpus", tmp_path / "run", 28, sizes)
            file = tmp_path / "recipe.yaml"
            file.write_text(json.dumps(content))
            config = load_config(file, list(row.overrides))
            check(config, ranks=GPUS, check_files=False, ranks_per_node=GPUS)
            (stage,) = plan_of(config, GPUS, GPUS, 139.8 * 2**30).stages
            assert stage.memory.total / 2**30 < FITS, text
            checked += 1
    assert checked == 9 + 4 + 1 + 5


@pytest.mark.parametrize("gpus", [2, 0])
def test_fewer_gpus_and_the_folder_of_old_results_are_refused(run: RunScript, tmp_path: Path, gpus: int) -> None:
    done, calls = run(gpus=gpus)
    assert (done.returncode, calls) == (2, [])
    assert f"four GPUs needed; torch finds {gpus} on this machine" in done.stderr
    assert not (tmp_path / "results").exists()
    done, calls = run(output="benchmarks/results")
    assert (done.returncode, calls) == (2, [])
    assert "OUTPUT: given benchmarks/results, which has results of the same names" in done.stderr


def test_an_unknown_part_is_refused_before_anything_runs(run: RunScript, tmp_path: Path) -> None:
    done, calls = run("9k")
    assert (done.returncode, calls) == (2, [])
    assert "PART: given '9k'; allowed: 8k, 128k, profile, layouts, context, tests" in done.stderr
    assert not (tmp_path / "results").exists()
