"""How a checkpoint becomes visible, and how one is found again. Files and folders only: no torch here.

A checkpoint is written into `.tmp-step_00000100` and ends with `manifest.json`, which names every file with its size
and SHA-256. Only then is the folder renamed to `step_00000100`, and only after that is the one-line file `latest`
replaced. Everything is fsynced before the rename that depends on it, so a process killed at any moment leaves the
checkpoints that were already published as they were.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from moba_train.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
META = "meta.json"
LATEST = "latest"

_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")

Accept = Callable[[dict[str, Any]], bool]
"""Whether a checkpoint with this meta is wanted."""

logger = logging.getLogger(__name__)


class FileEntry(TypedDict):
    """What the manifest says of one file: `size` in bytes, `sha256` in hex."""

    size: int
    sha256: str


def is_good(meta: dict[str, Any]) -> bool:
    """Whether the run was healthy when it saved: the meta's `good`, true where it is not given."""
    return meta.get("good", True) is True


def step_name(step: int) -> str:
    """The folder name of a step; names sort like steps."""
    return f"step_{step:08d}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is published in `folder`."""
    return folder / (_TEMPORARY + step_name(step))


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of one file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` and fsyncs the file."""
    with path.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def publish(folder: Path, step: int, files: dict[str, FileEntry]) -> Path:
    """Makes the finished temporary folder of `step` the newest checkpoint of `folder`.

    `files` names every file that was written, each already fsynced by its writer. Returns the published path. Raises
    OSError if the disk refuses, CheckpointError if a file is not as its writer described it.
    """
    temporary, final = temporary_folder(folder, step), folder / step_name(step)
    if problems := _size_problems(temporary, files):
        raise CheckpointError(
            f"{temporary.name} is not as it was written: {_listed(problems)}. "
            "Every rank must see the same files: put run_dir on a file system that all nodes share."
        )
    write_json(temporary / MANIFEST, {"format_version": FORMAT_VERSION, "step": step, "files": files})
    _fsync_folder(temporary)
    replaced = folder / (_REPLACED + final.name)
    if final.exists():
        final.rename(replaced)  # `clean_up` puts it back if we die before the next line
    temporary.rename(final)
    _fsync_folder(folder)
    _move_latest(folder, final.name)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def apply_retention(folder: Path, keep_last: int, keep_every: int | None) -> None:
    """Removes all checkpoints but the `keep_last` newest, the multiples of `keep_every`, the one `latest` names and the
    newest good one."""
    checkpoints = _published(folder)
    pointer = folder / LATEST
    keep = {path.name for _, path in checkpoints[-keep_last:]}
    keep |= {pointer.read_text(encoding="utf-8").strip()} if pointer.exists() else set()
    keep |= {path.name for step, path in checkpoints if keep_every and step % keep_every == 0}
    good = latest_checkpoint(folder, is_good)
    keep |= {good.name} if good else set()
    for _, path in checkpoints:
        if path.name not in keep:
            # Renamed first: killed half way, the rest is a leftover to clean up and not a damaged checkpoint.
            doomed = path.rename(path.with_name(_TEMPORARY + path.name))
            shutil.rmtree(doomed)


def clean_up(folder: Path) -> None:
    """Removes what a killed process left behind. Only while no other process saves into `folder`."""
    for path in folder.glob(_REPLACED + "*"):
        published = folder / path.name.removeprefix(_REPLACED)
        if published.exists():
            shutil.rmtree(path)
        else:
            path.rename(published)
    for path in folder.glob(_TEMPORARY + "*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def latest_checkpoint(folder: Path, accept: Accept | None = None) -> Path | None:
    """The newest checkpoint in `folder` whose manifest and file sizes are right and whose meta `accept` takes, if any.

    A damaged one is passed over with a warning that names its damage. Sizes only: `verify_checkpoint` reads every byte.
    """
    for _, path in reversed(_published(folder)):
        try:
            check_sizes(path)
            if accept is None or accept(read_meta(path)):
                return path
        except CheckpointError as error:
            logger.warning("Passing over a damaged checkpoint and taking the one before. %s", error)
    return None


def check_sizes(path: Path) -> None:
    """Compares every file with its size in the manifest. Raises CheckpointError naming all that differ."""
    _raise_if_damaged(path, _size_problems(path, _read_manifest(path)))


def verify_checkpoint(path: Path, rank: int = 0, ranks: int = 1) -> None:
    """Reads every byte and compares with the manifest. Raises CheckpointError naming each damaged, missing or extra
    file. With `ranks` > 1, only this rank's share of the files is read."""
    files = _read_manifest(path)
    problems = _size_problems(path, files)
    for name in sorted(files.keys() - problems.keys())[rank::ranks]:
        try:
            if hash_file(path / name)["sha256"] != files[name]["sha256"]:
                problems[name] = "its SHA-256 is not the manifest's"
        except OSError as error:
            problems[name] = f"cannot be read ({error})"
    for name in sorted({entry.name for entry in path.iterdir()} - files.keys() - {MANIFEST}):
        problems[name] = "extra file, not in the manifest"
    _raise_if_damaged(path, problems)


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON object that the checkpoint was saved with."""
    return _read_json(path / META)


def _published(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every published checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    matches = [(_STEP_FOLDER.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use another checkpoint of this run") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds {type(content).__name__}, must hold a JSON object")
    return content


def _read_manifest(path: Path) -> dict[str, FileEntry]:
    manifest = _read_json(path / MANIFEST)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / MANIFEST}: format_version is {manifest.get('format_version')!r}, "
            f"this version of moba_train reads {FORMAT_VERSION}"
        )
    files = manifest.get("files")
    entries = files.values() if isinstance(files, dict) else [None]
    if not all(isinstance(entry, dict) and {"size", "sha256"} <= set(entry) for entry in entries):
        raise CheckpointError(f"{path / MANIFEST}: `files` must map each file name to its size and sha256")
    return files  # type: ignore[return-value]  # checked just above


def _size_problems(path: Path, files: dict[str, FileEntry]) -> dict[str, str]:
    """What is wrong, by file name."""
    problems = {}
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            problems[name] = "missing"
            continue
        if size != entry["size"]:
            problems[name] = f"{size} bytes, the manifest says {entry['size']}"
    return problems


def _raise_if_damaged(path: Path, problems: dict[str, str]) -> None:
    if problems:
        raise CheckpointError(f"checkpoint {path} is damaged: {_listed(problems)}; use another checkpoint of this run")


def _listed(problems: dict[str, str]) -> str:
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


def _move_latest(folder: Path, name: str) -> None:
    temporary = folder / (_TEMPORARY + LATEST)
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(name + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / LATEST)
    _fsync_folder(folder)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(path: Path) -> Path:
    """`path` itself when it is a checkpoint, else the newest valid one of the run folder `path`."""
    if (path / MANIFEST).is_file():
        return path
    newest = latest_checkpoint(path / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{path}: neither a checkpoint nor a run folder with a valid one in {path}/checkpoints")
    return newest
