"""What a checkpoint's own recipe may make us read: a checkpoint may come from elsewhere, the files here are ours."""

import os
from collections.abc import Iterator
from pathlib import Path

from moba_train.config.schema import RunConfig
from moba_train.data.indexed import corpus_file
from moba_train.errors import CheckpointError

ROOTS = "MOBA_TRAIN_DATA_ROOTS"


def check_paths(config: RunConfig, checkpoint: Path) -> None:
    """Raises CheckpointError when the recipe of `checkpoint` names a tokenizer or validation corpus whose files, links
    followed, lie neither below the working folder nor below one in $MOBA_TRAIN_DATA_ROOTS (separated by colons).
    """
    allowed = [Path.cwd(), *map(Path, filter(None, os.environ.get(ROOTS, "").split(os.pathsep)))]
    roots = [root.resolve() for root in allowed]
    for key, given, file in _files(config):
        try:
            inside = any(file.resolve().is_relative_to(root) for root in roots)
        except (OSError, ValueError, RuntimeError):  # a loop of links, a null byte
            inside = False
        if not inside:
            raise CheckpointError(
                f"checkpoint {checkpoint}: its recipe reads {key} {given!r}, outside of "
                f"{' and '.join(map(str, roots))}; if you trust it, allow the folder: {ROOTS}={file.absolute().parent}"
            )


def _files(config: RunConfig) -> Iterator[tuple[str, str, Path]]:
    """(key, value, file) of every file that evaluation and generation open."""
    if config.data.tokenizer is not None:
        yield "data.tokenizer", config.data.tokenizer, Path(config.data.tokenizer)
    for index, source in enumerate(config.data.validation):
        for suffix in ("idx", "bin", "json"):
            yield f"data.validation[{index}].path", source.path, corpus_file(source.path, suffix)
