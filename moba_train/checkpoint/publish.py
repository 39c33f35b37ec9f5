"""Publication of a checkpoint, and the search for one. Files and folders only: no torch here.

A checkpoint is written into a hidden folder, `.tmp-step_00000100-<random>`, and ends with `manifest.json`, which names
every file with its size and SHA-256. Only then is the folder renamed to `step_00000100`, and only after that is the
one-line file `latest` replaced. Everything is fsynced before the rename that depends on it, so a process killed at any
moment leaves the checkpoints that were already published as they were.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from moba_train.checkpoint.files import UnreadableError, open_regular, retried
from moba_train.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    STEP_FOLDER,
    FileEntry,
    check_sizes,
    listed,
    read_meta,
    size_problems,
    step_name,
    write_json,
)
from moba_train.errors import CheckpointError, ForeignFileError
from moba_train.foreign_files import read_foreign
from moba_train.output_files import make_folder, remove_leftovers, sync_folder, temporary_path, write_atomically

LATEST = "latest"

_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"
_SET_ASIDE = "set-aside-"

Accept = Callable[[dict[str, Any]], bool]
"""Says if a checkpoint with this meta is wanted."""

logger = logging.getLogger(__name__)


def is_good(meta: dict[str, Any]) -> bool:
    """True if the run was healthy when it saved: `good` in the meta, true by default."""
    return meta.get("good", True) is True


def is_finite(meta: dict[str, Any]) -> bool:
    """True if the save found no NaN or infinite value; `not_finite` in the meta names the tensors that hold some."""
    return not meta.get("not_finite")


def saved_step(meta: dict[str, Any]) -> int | None:
    """The step that a run saved, by the meta; None where that names none, as in a checkpoint from elsewhere."""
    progress = meta.get("progress")
    step = progress.get("step") if isinstance(progress, dict) else None
    return step if type(step) is int else None


def make_temporary_folder(folder: Path, step: int) -> Path:
    """An empty folder in which to write the checkpoint of `step`, to be published in `folder`.

    Its name is unique, so a process left over from an earlier restart attempt cannot write into it. `folder` is made
    again if it is missing, but not the folder around it.
    """
    try:
        folder.mkdir()
        sync_folder(folder.parent)
        logger.warning("%s was missing and has been made again", folder)
    except FileExistsError:
        pass  # where it is not a folder, the next line fails
    temporary = temporary_path(folder / step_name(step))
    temporary.mkdir()
    return temporary


def publish(temporary: Path, step: int, files: dict[str, FileEntry]) -> Path:
    """Makes a finished temporary folder the newest checkpoint of the folder it lies in.

    `files` names every file that was written, each already fsynced by its writer. Returns the published path. Raises
    OSError if the file system refuses, CheckpointError if a file differs from its entry. A `latest` that cannot be
    replaced is only a warning: the checkpoint is found without it.
    """
    final = temporary.parent / step_name(step)
    install(temporary, final, step, files)
    try:
        write_atomically(final.parent / LATEST, f"{final.name}\n")
    except OSError as error:
        logger.warning("%s is published, but %s still names another one: %s", final, LATEST, error)
    return final


def install(temporary: Path, final: Path, step: int, files: dict[str, FileEntry]) -> None:
    """Makes a finished temporary folder the checkpoint `final` in the same folder, replacing one that has this name.

    Arguments and errors as of `publish`, which also makes it the newest.
    """
    folder = temporary.parent
    if problems := size_problems(temporary, files):
        raise CheckpointError(
            f"{temporary.name} is not as it was written: {listed(problems)}. "
            "Every rank must see the same files: the folder must lie on a file system that all nodes share."
        )
    # Last, so that a folder with a manifest is complete whatever killed the process.
    write_json(temporary / MANIFEST, {"format_version": FORMAT_VERSION, "step": step, "files": files})
    # Names of files are on disk only once their folder is synced; a rename may otherwise be seen before them.
    sync_folder(temporary)
    replaced = folder / (_REPLACED + final.name)
    if final.exists():
        final.rename(replaced)  # `clean_up` puts it back if this process dies before the next line
    temporary.rename(final)
    sync_folder(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def prepare(folder: Path) -> None:
    """Creates `folder` for checkpoints, unless it exists, and removes what a killed process left in it."""
    make_folder(folder)
    sync_folder(folder.parent)
    clean_up(folder)


def clean_up(folder: Path) -> None:
    """Removes what a killed process left behind. To be called only while no other run saves into `folder`.

    A rank of an earlier start that has not died yet may still be writing: what cannot be removed now stays until the
    next start.
    """
    for path in folder.glob(f"{_REPLACED}step_*"):
        replacement = folder / path.name.removeprefix(_REPLACED)
        if replacement.exists():
            remove(path)
        else:
            path.rename(replacement)
    for path in folder.glob(f"{_TEMPORARY}step_*"):
        remove(path)
    remove_leftovers(folder)


def remove(path: Path) -> None:
    """Removes a file or folder as far as the file system allows; the rest is a warning."""
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        logger.warning("%s could not be removed and is left behind: %s", path, error)


def retire(path: Path) -> None:
    """Removes a published checkpoint, unless a process reads it (`hold`): then a later call may."""
    with ExitStack() as stack:
        with suppress(OSError):  # there are file systems without locks
            manifest = os.open(path / MANIFEST, os.O_RDWR | os.O_NOFOLLOW)  # NFS needs a file that may be written to
            stack.callback(os.close, manifest)
            try:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        hidden = path.rename(path.with_name(_TEMPORARY + path.name))  # a leftover, which `clean_up` removes
    remove(hidden)


def hold(path: Path) -> BinaryIO | None:
    """A file that keeps a run in progress from removing the checkpoint at `path` while it is open. None if that cannot
    be, for a reason that the reader of the checkpoint will meet."""
    with suppress(OSError, CheckpointError):
        manifest = open_regular(path / MANIFEST)
        fcntl.flock(manifest, fcntl.LOCK_SH)
        return manifest
    return None


def set_aside(path: Path) -> Path:
    """Renames a published checkpoint so that it is no longer found, counted or removed, and a person can look at it.
    A checkpoint of the same step that was set aside before is removed. Returns the new path."""
    aside = path.with_name(_SET_ASIDE + path.name)
    if aside.exists():
        remove(aside)
    return path.rename(aside)


def latest_checkpoint(folder: Path, accept: Accept | None = None) -> Path | None:
    """The newest checkpoint in `folder` with the file sizes of its manifest and a meta that `accept` agrees to; None if
    there is none.

    A damaged checkpoint is passed over with a warning that names the damage. Only sizes are compared;
    `verify_checkpoint` reads every byte. Raises UnreadableError when one that may be wanted could not be read, unless
    a run in progress has removed it.
    """
    for step, path in reversed(published(folder)):
        try:
            check_sizes(path)
            if accept is None or accept(read_meta(path)):
                return path
        except CheckpointError as error:
            if (step, path) not in published(folder):  # a run in progress has removed it, and has newer ones
                return latest_checkpoint(folder, accept)
            if isinstance(error, UnreadableError):
                raise
            logger.warning("Passing over a damaged checkpoint and taking the one before. %s", error)
    return None


def named_latest(folder: Path) -> str | None:
    """Name of the checkpoint that the file `latest` in `folder` names; None where it cannot be read."""
    with suppress(OSError, ForeignFileError):
        return read_foreign(folder / LATEST, 1024, links=False).decode(errors="replace").strip()
    return None


def find_checkpoint(path: Path) -> tuple[Path, BinaryIO | None]:
    """`path` itself when it is a checkpoint, else the newest valid checkpoint of the run folder `path`; and its `hold`,
    for as long as it is read. Raises CheckpointError when there is none."""
    while newest := path if (path / MANIFEST).is_file() else latest_checkpoint(path / "checkpoints"):
        held = hold(newest)
        if (newest / MANIFEST).is_file():  # else a run in progress has removed it before it was held
            return newest, held
    problem = f"neither a checkpoint nor a run folder with a valid one in {path}/checkpoints"
    hint = ""
    if not path.exists():
        problem = f"there is no such folder{'' if path.is_absolute() else f' (from {Path.cwd()})'}"
    elif (path / "config.json").is_file():
        hint = "; `moba-train convert hf-to-moba` makes a checkpoint of a Hugging Face folder"
    for replaced in (*(path / "checkpoints").glob(f"{_REPLACED}*"), path.parent / f"{_REPLACED}{path.name}"):
        if replaced.exists():
            step = replaced.name.removeprefix(_REPLACED)
            hint = f"; a process was killed as it replaced {step}: run its command again"
    around = [path] if path.parent.name != "checkpoints" else [path, path.parent]
    for folder in around:  # the folder of all of them, also below a fallback_dir, or one that retention has removed
        if steps := [str(step) for step, _ in published(folder)]:
            hint = f"; {folder} has the checkpoints of steps {', '.join(steps)}"
    raise CheckpointError(f"{path}: {problem}{hint}")


def newest_first(*folders: Path) -> list[Path]:
    """The published checkpoints of all `folders` from the highest step down; of equal steps those of earlier folders
    come first."""
    steps = [entry for folder in folders for entry in published(folder)]
    return [path for _, path in sorted(steps, key=lambda entry: -entry[0])]


def published(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every published checkpoint, oldest first. Raises UnreadableError when `folder` exists, but could
    not be read."""
    try:
        names = retried(lambda: os.listdir(folder) if folder.is_dir() else [])
    except OSError as error:
        raise UnreadableError.from_problem(folder, error) from error
    matches = filter(None, map(STEP_FOLDER.fullmatch, names))
    return sorted((int(match[1]), folder / match[0]) for match in matches)
