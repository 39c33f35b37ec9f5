"""Work goes on when what it prints is read by a program that ends, or lies on a full disk: the files have it all."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data_tools.prose import prose
from tests.forked_program import ForkedProgram
from tests.run.tiny_run import Run


def full(_folder: Path, command: list[str]) -> int | None:
    """Exit code of a program that prints to a full disk."""
    process = ForkedProgram(command, Path("/dev/full"))
    process.wait()
    return process.returncode


def head(folder: Path, command: list[str]) -> int | None:
    """Exit code of a program whose first line alone is read: `2>&1 | head -1`."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    process = ForkedProgram(command, pipe)
    with pipe.open() as reader:
        assert reader.readline()
    process.wait()
    return process.returncode


def closed(_folder: Path, command: list[str]) -> int | None:
    """Exit code of a program without standard streams: `<&- >&- 2>&-`."""
    line = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, *command]
    return subprocess.run(line, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, timeout=120, check=False).returncode


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("program", [full, head, closed])
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_outlasts_its_output(program: Callable[[Path, list[str]], int | None], ranks: int, run: Run) -> None:
    run.recipe["telemetry"]["console"] = True
    recipe = str(run.write_recipe())
    alone = ["-m", "moba_train.train", recipe]
    launched = ["-m", "moba_train.tools.cli", "train", recipe, "--gpus", str(ranks)]
    assert program(run.folder, alone if ranks == 1 else launched) == 0
    assert [record["step"] for record in run.records()] == [*range(1, 13)]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_command_that_writes_files_outlasts_its_output(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose(0, 5000))
    files = ["-i", str(tmp_path / "a.txt"), "-o", str(tmp_path / "tok.model")]
    program = [sys.executable, "-c", "from data_tools.cli import app; app()"]
    with Path("/dev/full").open("w") as disk:
        command = [*program, "train-tokenizer", *files, "--vocab-size", "300"]
        assert subprocess.run(command, stdout=disk, stderr=disk, check=False).returncode == 0
    assert (tmp_path / "tok.model").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("command", ["schema", "env"])
def test_a_command_whose_lines_are_all_that_it_makes_says_that_they_are_lost(command: str) -> None:
    with Path("/dev/full").open("w") as disk:
        program = [sys.executable, "-m", "moba_train.tools.cli", command]
        done = subprocess.run(program, stdout=disk, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device for the output of this command\n")
