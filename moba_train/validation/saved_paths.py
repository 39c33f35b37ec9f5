"""Where the files lie that a checkpoint's own recipe names, whatever folder a command is started from.

A recipe names its tokenizer and corpora relative to the folder in which the run was started. They are looked for in the
working folder, then there (the run folder's path shows it where the recipe's `run_dir` is a relative one), and then in
the run folder.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from moba_train.checkpoint.recipe import run_folder, trained_tokenizer
from moba_train.config.data import SourceConfig
from moba_train.config.schema import RunConfig
from moba_train.data.indexed import corpus_file
from moba_train.data.tokenizer import tokenizer_file, tokenizer_hash
from moba_train.errors import DataError, ForeignFileError
from moba_train.foreign_files import check_below, working_roots


class SavedPaths:
    """Finds the files of one checkpoint's recipe.

    `roots` are the folders below which they may lie: the working folder, those in $MOBA_TRAIN_DATA_ROOTS, the run
    folder, and the folder in which the run was started.
    """

    def __init__(self, config: RunConfig, checkpoint: Path) -> None:
        self._config = config
        self._checkpoint = checkpoint
        run = run_folder(checkpoint)
        origin = _origin(run, config.run_dir)
        self._folders = [Path.cwd(), *([origin] if origin else []), run]
        self.roots = [*working_roots(), *(folder.resolve() for folder in self._folders[1:])]

    def located(self) -> RunConfig:
        """The recipe, with the tokenizer and the corpora where they were found."""
        data = self._config.data
        changes = {
            "tokenizer": self._tokenizer()[0] or data.tokenizer,
            "train": [self._source(source) for source in data.train],
            "validation": [self._source(source) for source in data.validation],
        }
        evaluation = self._config.evaluation.with_corpora(lambda path: self._corpus(path) or path)
        return self._config.model_copy(update={"data": data.model_copy(update=changes), "evaluation": evaluation})

    def check_tokenizer(self) -> None:
        """Raises DataError, naming all places that were looked at, when the recipe's tokenizer is in none of them."""
        given = self._config.data.tokenizer
        if given is None:
            raise DataError(f"{self._checkpoint}: its recipe names no data.tokenizer; give --tokenizer FILE")
        found, looked = self._tokenizer()
        if found is None:
            raise DataError(
                f"{self._checkpoint}: the tokenizer of its recipe, data.tokenizer {given!r}, was not found; looked for "
                f"{'; '.join(looked)}; give --tokenizer FILE"
            )

    def check_corpora(self, config: RunConfig) -> None:
        """Raises DataError, naming all places that were looked at, when a validation corpus of `config` is in none."""
        for index, source in enumerate(config.data.validation):
            if self._corpus(source.path) is None:
                looked = "; ".join(str(corpus_file(path, "idx")) for path in self._places(source.path))
                raise DataError(
                    f"data.validation[{index}].path: given {source.path!r}, which was not found; looked for {looked}; "
                    "give --data CORPUS"
                )

    def _tokenizer(self) -> tuple[str | None, list[str]]:
        """The recipe's tokenizer, None where it was not found, and what was looked at in vain."""
        given = self._config.data.tokenizer
        trained = trained_tokenizer(self._checkpoint)
        looked: list[str] = []
        for path in self._places(given) if given is not None else ():
            if not tokenizer_file(path).is_file():
                looked.append(str(path))
            elif trained and self._may_be_read(path) and tokenizer_hash(path) != trained:
                looked.append(f"{path} (another one than the run trained with)")
            else:
                return str(path), looked
        return None, looked

    def _may_be_read(self, path: Path) -> bool:
        try:
            check_below(tokenizer_file(path), self.roots)
        except ForeignFileError:
            return False
        return True

    def _source(self, source: SourceConfig) -> SourceConfig:
        return source.model_copy(update={"path": self._corpus(source.path) or source.path})

    def _corpus(self, given: str) -> str | None:
        return next((str(path) for path in self._places(given) if corpus_file(path, "idx").is_file()), None)

    def _places(self, given: str) -> Iterator[Path]:
        """Where `given` may be; its name alone counts in the run folder, where an imported model has its tokenizer."""
        places = [Path(given) if folder == Path.cwd() else folder / given for folder in self._folders]
        yield from dict.fromkeys([*places, self._folders[-1] / Path(given).name])


def _origin(run: Path, run_dir: str) -> Path | None:
    """The folder in which a run was started that lies in `run` and was to lie in `run_dir`; None where that cannot be
    known, or would be a folder that holds the home of the user."""
    parts = Path(run_dir).parts
    if Path(run_dir).is_absolute() or ".." in parts or run.parts[-len(parts) :] != parts:
        return None
    origin = Path(*run.parts[: -len(parts)])
    home = Path(os.path.expanduser("~"))  # Path.home() fails without HOME where the system does not know the user
    return None if home.is_relative_to(origin) else origin
