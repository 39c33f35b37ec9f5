"""Work goes on when what it prints is read by a program that ends, or lies on a full disk: the files have it all."""

import os
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
    process = ForkedProgram(command, None)
    process.wait()
    return process.returncode


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize(("program", "ranks"), [(full, 0), (full, 2), (head, 0), (head, 2), (closed, 1)])
def test_training_outlasts_its_output(program: Callable[[Path, list[str]], int | None], ranks: int, run: Run) -> None:
    """Alone, and with a launcher, which passes closed streams on."""
    run.recipe["telemetry"]["console"] = True
    recipe = str(run.write_recipe())
    alone = ["-m", "moba_train.train", recipe]
    launched = ["-m", "moba_train.tools.cli", "train", recipe, "--gpus", str(ranks)]
    assert program(run.folder, launched if ranks else alone) == 0
    assert [record["step"] for record in run.records()] == [*range(1, 13)]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_command_that_writes_files_outlasts_its_output(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose(0, 5000))
    files = ["-i", str(tmp_path / "a.txt"), "-o", str(tmp_path / "tok.model")]
    assert full(tmp_path, ["-m", "data_tools.__main__", "train-tokenizer", *files, "--vocab-size", "300"]) == 0
    assert (tmp_path / "tok.model").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize("command", ["schema", "env"])
def test_a_command_whose_lines_are_all_that_it_makes_says_that_they_are_lost(command: str, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    done = ForkedProgram(["-m", "moba_train.tools.cli", command], Path("/dev/full"), errors)
    done.wait()
    assert done.returncode == 2
    assert errors.read_text() == "error: No space left on device for the output of this command\n"
