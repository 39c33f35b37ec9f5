"""What a checkpoint's own recipe may make us read: a checkpoint may come from elsewhere, the files here are ours."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from moba_train.config.schema import RunConfig
from moba_train.data.indexed import corpus_file
from moba_train.data.loss_mask import mask_prefix
from moba_train.data.tokenizer import TOKENIZER_CONFIG, tokenizer_file
from moba_train.errors import CheckpointError, ForeignFileError
from moba_train.foreign_files import check_below, open_foreign, working_roots


def check_paths(config: RunConfig, checkpoint: Path, roots: Sequence[Path] | None = None) -> None:
    """Raises CheckpointError when the recipe of `checkpoint` names a tokenizer or validation corpus whose files, links
    followed, are not regular files below one of `roots`: by default the working folder, and those in
    $MOBA_TRAIN_DATA_ROOTS.
    """
    roots = working_roots() if roots is None else roots
    for key, given, file in _files(config):
        try:
            check_below(file, roots)
            with contextlib.suppress(OSError):  # a file that is missing is reported by its reader
                open_foreign(file, None, roots).close()
        except ForeignFileError as error:
            raise CheckpointError(f"checkpoint {checkpoint}: its recipe reads {key} {given!r}: {error}") from None


def evaluation_corpora(config: RunConfig) -> dict[str, str]:
    """The corpora that evaluation reads, by the keys that name them."""
    named = {f"evaluation.{name}.corpus": section.corpus for name, section in config.evaluation.asking().items()}
    return {
        **{f"data.validation[{index}].path": source.path for index, source in enumerate(config.data.validation)},
        **{key: path for key, path in named.items() if path is not None},
    }


def _files(config: RunConfig) -> Iterator[tuple[str, str, Path]]:
    """(key, value, file) of every file that evaluation and generation open."""
    if config.data.tokenizer is not None:
        file = tokenizer_file(config.data.tokenizer)
        yield "data.tokenizer", config.data.tokenizer, file
        yield "data.tokenizer", config.data.tokenizer, file.parent / TOKENIZER_CONFIG
    for key, path in evaluation_corpora(config).items():
        for prefix in (path, mask_prefix(path)):
            for suffix in ("idx", "bin", "json"):
                yield key, path, corpus_file(prefix, suffix)
