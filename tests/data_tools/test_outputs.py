"""Outputs that cannot be written: an error without a traceback, and no file under the final name."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_tools.cli import app
from data_tools.outputs import replace_file, write_errors
from moba_train.errors import DataError
from tests.commands import run_app
from tests.data_tools.prose import prose


@pytest.fixture
def commands(folder: Path, tokenizer: str) -> dict[str, list[str]]:
    """A command of each kind, without its output."""
    (folder / "a.txt").write_text(prose(0, 60_000))
    chat = folder.parent / "chat.jsonl"
    messages = [{"role": "user", "content": prose(1, 60_000)}, {"role": "assistant", "content": "Yes."}]
    chat.write_text(json.dumps({"messages": messages}))
    return {
        "train-tokenizer": ["train-tokenizer", "--input", str(folder), "--vocab-size", "320"],
        "tokenize": ["tokenize", "--input", str(folder), "--tokenizer", tokenizer, "--workers", "1"],
        "long-range": ["long-range", "--input", str(folder), "--documents", "1", "--characters", "60000"],
        "sft": ["sft", "--input", str(chat), "--tokenizer", tokenizer],
    }


NAMES = ("train-tokenizer", "tokenize", "long-range", "sft")


def refused(command: list[str], output: str) -> str:
    done = run_app(app, *command, "--output", output, code=2)
    assert isinstance(done.exception, SystemExit)
    return done.output


@pytest.mark.parametrize("name", NAMES)
def test_impossible_outputs_are_refused_before_the_work(
    name: str, commands: dict[str, list[str]], tmp_path: Path
) -> None:
    said = refused(commands[name], f"{tmp_path}/out/")
    assert f"--output '{tmp_path}/out/' is not the name of a" in said
    assert f"{tmp_path}/out/" + ("corpus" if name in ("tokenize", "sft") else "NAME") in said
    said = refused(commands[name], str(tmp_path / "input/a.txt/out"))
    assert f"cannot be written: {tmp_path}/input/a.txt is not a folder" in said
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken.bin").mkdir()
    assert "is a folder; give" in refused(commands[name], str(tmp_path / "taken"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl", "input", "taken", "taken.bin"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_without_permission_is_refused(
    name: str, commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write anywhere
    assert f"no permission to write into {tmp_path}" in refused(commands[name], str(tmp_path / "new/out"))


@pytest.fixture
def small_files(commands: dict[str, list[str]]) -> Iterator[None]:
    """From here on no file may have more than 16 KiB: writing beyond that fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("name", ["tokenize", "long-range", "sft"])
def test_a_full_disk_leaves_nothing_half_written(name: str, commands: dict[str, list[str]], tmp_path: Path) -> None:
    said = refused(commands[name], str(tmp_path / "out"))
    assert f"error: cannot write {tmp_path}/out: File too large" in said
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out") and path.name != "out.parts"] == []


def test_a_full_disk_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "out").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write .*out: No space left on device; free space there, or give"):
        replace_file(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(DataError, match="cannot write other: "), write_errors("out"):
        raise PermissionError(errno.EACCES, "Permission denied", "other")
