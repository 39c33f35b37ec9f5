"""A folder from elsewhere leads no writer to a file outside of it, and lets none wait: every writer goes through one
module."""

import ast
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moba_train.checkpoint import publish
from moba_train.checkpoint.retention import Evaluated, Marks, Retention
from moba_train.errors import ForeignFileError, LaunchError
from moba_train.foreign_files import ROOTS
from moba_train.health import dump
from moba_train.output_files import (
    make_folder,
    open_to_change,
    remove_leftovers,
    temporary_path,
    write_atomically,
    write_new,
)
from moba_train.run.recipe_changes import write_recipe
from moba_train.run.restarts import Restarts
from moba_train.telemetry.jsonl import JsonlSink, read_records
from moba_train.telemetry.telemetry import Telemetry
from moba_train.tools.evaluate import write_output, write_results

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "moba_train/output_files.py": "the one module",
    "moba_train/errors.py": "files that the launcher names in the environment",
    "moba_train/checkpoint/publish.py": "a lock on a manifest, which NFS gives only where the file could be written",
}
"""Files that may open files for writing themselves."""


def writes(path: Path) -> Iterator[str]:
    """Calls in a program that make or change a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [
            argument.value
            for argument in (*node.args, *(keyword.value for keyword in node.keywords))
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        ]
        for_writing = name in ("open", "fdopen", "NamedTemporaryFile") and any(
            len(text) <= 3 and set(text) & set("wax+") for text in texts
        )
        by_flags = name == "open" and any(flag in ast.unparse(node) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT"))
        by_name = name in ("write_text", "write_bytes", "touch", "copyfile", "copy2")
        if by_name or for_writing or by_flags:
            call = ast.unparse(node)
            if "open_to_change(" not in call and "os.devnull" not in call:
                yield f"line {node.lineno}: {call}"


def test_every_file_is_made_by_one_module() -> None:
    programs = [path for folder in ("moba_train", "data_tools") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): list(writes(path)) for path in programs}
    assert {path for path, calls in found.items() if calls} == {"moba_train/output_files.py", *ELSEWHERE}, found


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file outside of the folders that are written into, which nothing may change."""
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("trap", ["link", "pipe"])
def test_what_stands_under_the_names_of_files_and_of_temporary_files_is_neither_followed_nor_waited_for(
    run_dir: Path, victim: Path, trap: str
) -> None:
    for name in ("report.html", "restarts.json", "config.yaml", "marks.json", "evaluations.json", "latest"):
        for path in (run_dir / name, run_dir / f".tmp-{name}"):
            path.symlink_to(victim) if trap == "link" else os.mkfifo(path)
    write_atomically(run_dir / "report.html", "page")
    Restarts(run_dir).begin(0, [])
    marks = Marks([])
    marks.add(8, "a", "reason")
    marks.write(run_dir)
    evaluated = Evaluated({})
    evaluated.add(8, "a", {"eval_loss": 1.0})
    evaluated.write(run_dir)
    Retention(1).apply(run_dir)
    assert publish.named_latest(run_dir) is None
    temporary = publish.make_temporary_folder(run_dir, 8)
    publish.publish(temporary, 8, {})
    with pytest.raises(LaunchError, match="allowed: a regular file"):  # a recipe is read before it is replaced
        write_recipe(run_dir, "recipe", 0)
    assert (run_dir / "report.html").read_text() == "page"
    assert (run_dir / "latest").read_text() == "step_00000008\n"
    assert Marks.read(run_dir).steps == [8]


@pytest.mark.parametrize("trap", ["link", "pipe"])
def test_a_history_and_a_lock_are_opened_only_where_they_are_files(run_dir: Path, victim: Path, trap: str) -> None:
    for name in ("metrics.jsonl", "metrics.discarded.jsonl", "lock"):
        path = run_dir / name
        path.symlink_to(victim) if trap == "link" else os.mkfifo(path)
    telemetry = Telemetry([JsonlSink(run_dir / "metrics.jsonl", None)])
    telemetry.log(1, 10, {"loss": 1.0})
    with pytest.raises(OSError, match="not a regular file; move it away"):
        open_to_change(run_dir / "lock", os.O_RDWR)
    (run_dir / "metrics.jsonl").unlink()
    telemetry.log(2, 20, {"loss": 1.0})
    telemetry.close()
    records = read_records(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records if record["type"] == "metrics"] == [1, 2]


def test_folders_of_a_run_do_not_lead_out_of_it(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(ROOTS, raising=False)
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("evaluations", "checkpoints", dump.dump_folder(run_dir).name):
        (run_dir / name).symlink_to(outside)
    content = {"step": 8, "seq_len": 64}
    with caplog.at_level(logging.WARNING):
        write_results(content, run_dir / "step_00000008", None, print)
        dump._write(dump.dump_folder(run_dir) / "step_8.json", {})
    assert caplog.text.count(f"if you trust it, allow the folder: {ROOTS}=") == 2
    with pytest.raises(ForeignFileError, match="outside of"):
        publish.prepare(run_dir / "checkpoints")
    assert not any(outside.iterdir())
    monkeypatch.setenv(ROOTS, str(outside))
    publish.prepare(run_dir / "checkpoints")
    (run_dir / "inside").symlink_to(run_dir)
    make_folder(run_dir / "inside")


def test_a_result_never_replaces_a_file(run_dir: Path, victim: Path) -> None:
    (run_dir / "evaluation.json").symlink_to(victim)
    written = write_output({"step": 8}, run_dir)
    assert json.loads(written.read_text()) == {"step": 8}
    with pytest.raises(FileExistsError):
        write_new(written, "other")


def test_a_killed_writer_leaves_nothing_for_ever(run_dir: Path) -> None:
    temporary_path(run_dir / "config.yaml").write_text("half")
    for kept in (".tmp-notes", "config.yaml", ".tmp-step_00000100-0123abcd"):
        (run_dir / kept).mkdir() if "step" in kept else (run_dir / kept).write_text("mine")
    remove_leftovers(run_dir)
    assert sorted(path.name for path in run_dir.iterdir()) == [
        ".tmp-notes",
        ".tmp-step_00000100-0123abcd",
        "config.yaml",
    ]


def test_a_failed_write_leaves_the_file_and_no_leftover(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_dir / "config.yaml"
    write_atomically(path, "before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "after")
    assert [(entry.name, entry.read_text()) for entry in run_dir.iterdir()] == [("config.yaml", "before")]


def test_names_in_another_encoding_are_written_visibly(run_dir: Path) -> None:
    write_atomically(run_dir / "report.html", "run \udce9")
    assert (run_dir / "report.html").read_text() == "run \\udce9"
