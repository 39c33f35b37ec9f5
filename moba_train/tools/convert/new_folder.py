"""A folder that a conversion makes, which is not left behind when it fails or is interrupted."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from moba_train.errors import CheckpointError


def check_new_folder(output: Path) -> None:
    """Raise CheckpointError when `output` is a file, or a folder that is not empty."""
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output}: is a file; give a new folder")
    if output.exists() and any(output.iterdir()):
        raise CheckpointError(f"{output}: is not empty; give a new folder")


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[None]:
    """Make `output`. When anything is raised inside, also by Ctrl-C, remove all that was written into it.

    Raises CheckpointError as `check_new_folder`, and when something cannot be written.
    """
    check_new_folder(output)
    existed = output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        _empty(output, existed)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{output}: cannot be written ({error})") from error
        raise


def _empty(output: Path, keep: bool) -> None:
    """Remove the contents of `output`, and `output` unless `keep`, as far as that is possible."""
    with contextlib.suppress(OSError):
        for path in output.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if not keep:
            output.rmdir()
