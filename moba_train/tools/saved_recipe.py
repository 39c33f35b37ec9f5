"""A checkpoint with its own recipe, checked before anything acts on it: it may come from elsewhere, the files here are
ours.

A recipe names its tokenizer and corpora relative to the folder in which the run was started. They are looked for in the
working folder, then there (the run folder's path shows it if the recipe's `run_dir` is a relative one), and then in the
run folder.
"""

import contextlib
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from moba_train.checkpoint.manifest import check_sizes, read_meta
from moba_train.checkpoint.publish import find_checkpoint, saved_step
from moba_train.checkpoint.recipe import run_folder, saved_recipe, saved_stage, trained_tokenizer
from moba_train.checkpoint.state import load_model
from moba_train.config.data import SourceConfig
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.load import dump_config, parse_yaml, validated
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.indexed import corpus_file
from moba_train.data.loss_mask import mask_prefix
from moba_train.data.tokenizer import TOKENIZER_CONFIG, tokenizer_file, tokenizer_hash
from moba_train.errors import CheckpointError, DataError, ForeignFileError
from moba_train.foreign_files import check_below, open_foreign, working_roots
from moba_train.model.build import build_attention, build_model
from moba_train.model.spec import ModelSpec, kind_prefix
from moba_train.model.transformer import Transformer
from moba_train.resolve.initial_weights import load_initial_weights
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.hf.config import is_hf_folder
from moba_train.tools.hf.weights import load_hf_weights
from moba_train.tools.needle.options import NamesFiles


class SavedRun(NamedTuple):
    """A checkpoint with the recipe that it is used with, and the stage that it was saved in.

    `open_checkpoint` makes one that is safe to use.
    """

    path: Path
    config: RunConfig
    """The recipe that the checkpoint was saved with, or one with options laid over it."""
    spec: ModelSpec
    """The model of the recipe."""
    stage: Stage
    held: BinaryIO | None = None
    """`hold` of the checkpoint: a run in progress does not remove it before this object has gone."""

    def with_recipe(self, config: RunConfig) -> "SavedRun":
        """The checkpoint with another recipe, which has been checked, and with its stage of the same number."""
        run = resolve_unchecked(config)
        return SavedRun(self.path, config, run.setup.spec, run.stages[self.stage.index], self.held)


class Training(NamedTuple):
    """Training that the weights of a checkpoint have been through."""

    step: int
    """Optimizer steps; 0 for an imported model."""
    tokens: int | None
    """Training tokens of these steps; None for an imported model."""
    seq_len: int
    """Longest sequences of the stages so far, in tokens."""


def saved_training(checkpoint: Path) -> Training:
    """Training that the weights of `checkpoint` have been through, by its recipe and progress. Raises CheckpointError
    as `saved_stage`."""
    stages = trained_stages(checkpoint)
    step = saved_step(read_meta(checkpoint)) or 0
    return Training(step, stages[-1].tokens_after(step) if step else None, max(stage.seq_len for stage in stages))


def trained_stages(checkpoint: Path) -> Sequence[Stage]:
    """The stages up to that of `checkpoint`, as long as those were that have ended."""
    run = resolve_unchecked(saved_recipe(checkpoint))
    exited = read_meta(checkpoint)["progress"].get("exited_steps")
    ended = run.after_exit(exited if isinstance(exited, dict) else {})
    return ended.stages[: saved_stage(checkpoint, run.stages).index + 1]


def overridden_kinds(saved: SavedRun) -> list[str]:
    """Beginnings of the names of parameters that the checkpoint has of attention kinds that the recipe no longer uses,
    since overrides were laid over it."""
    before = resolve_unchecked(saved_recipe(saved.path)).setup.spec.kind_shapes
    return [kind_prefix(layer, kind) for layer, kind in before.keys() - saved.spec.kind_shapes.keys()]


def load_weights(model: Transformer, saved: SavedRun) -> None:
    """Fill `model`, sharded or not, with the weights of a checkpoint, those of adapters on their base, or of a Hugging
    Face folder. Called on all ranks. Raises CheckpointError when the checkpoint is damaged, or the base missing or
    another one."""
    if is_hf_folder(saved.path):
        load_hf_weights(model, saved.path, with_kinds=True)
        return
    if model.adapters is not None:
        load_initial_weights(model, base_folder(saved))
    load_model(model, saved.path, optional=overridden_kinds(saved))
    if model.adapters is not None:
        model.adapters.check()


def base_folder(saved: SavedRun) -> Path:
    """The folder of the model that the adapters of a checkpoint were trained on. Raises CheckpointError where its
    recipe names none that is there, or one that it must not read."""
    given = saved.config.init_from or ""
    paths = SavedPaths(saved.config, saved.path)
    folder = next((path for path in paths.places(given) if given and path.is_dir()), None)
    if folder is None:
        raise CheckpointError(
            f"{saved.path} holds adapters of the model {given!r} (init_from), which is not there; name the folder "
            "where it is now: init_from=FOLDER (convert: --init-from FOLDER)"
        )
    try:
        return check_below(folder, paths.roots)
    except ForeignFileError as error:
        raise CheckpointError(f"checkpoint {saved.path}: its recipe reads init_from {given!r}: {error}") from None


def load_trained(saved: SavedRun, device: torch.device, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a checkpoint or Hugging Face folder on `device` in `dtype`, with its stage's attention and RoPE.

    Raises CheckpointError when the checkpoint is damaged.
    """
    with torch.device("meta"):
        model = build_model(saved.spec)
    model.to_empty(device=device)
    load_weights(model, saved)
    model.set_attention(build_attention(saved.stage.attention, saved.spec.config.head_width))
    model.set_rope(saved.stage.rope)
    return model.to(dtype).eval()


def check_paths(config: RunConfig, named: Container[str], checkpoint: Path, roots: Sequence[Path]) -> None:
    """Raises CheckpointError when a file that evaluation and generation by `config` read, of a path that the recipe of
    `checkpoint` has `named`, is no regular file below one of `roots`, links followed."""
    for key, given, file in _files(config):
        if given not in named:
            continue
        try:
            check_below(file, roots)
            with contextlib.suppress(OSError):  # a file that is missing is reported by its reader
                open_foreign(file, None, roots).close()
        except ForeignFileError as error:
            raise CheckpointError(f"checkpoint {checkpoint}: its recipe reads {key} {given!r}: {error}") from None


def corpora_and_tokenizer(config: RunConfig) -> set[str]:
    """Paths of the tokenizer and of the corpora that evaluation reads."""
    paths = {source.path for source in config.data.validation}
    return paths if config.data.tokenizer is None else {*paths, config.data.tokenizer}


def named_files(evaluation: EvaluationConfig) -> dict[str, list[str]]:
    """Other files that evaluations read, by the keys of their sections."""
    sections = {name: section for name, section in evaluation if isinstance(section, NamesFiles)}
    return {f"evaluation.{name}": section.named_files() for name, section in sections.items()}


def _files(config: RunConfig) -> Iterator[tuple[str, str, Path]]:
    """(key, value, file) of every file that evaluation and generation open."""
    if (tokenizer := config.data.tokenizer) is not None:
        file = tokenizer_file(tokenizer)
        yield "data.tokenizer", tokenizer, file
        yield "data.tokenizer", tokenizer, file.parent / TOKENIZER_CONFIG
    for index, source in enumerate(config.data.validation):
        for prefix in (source.path, mask_prefix(source.path)):
            for suffix in ("idx", "bin", "json"):
                yield f"data.validation[{index}].path", source.path, corpus_file(prefix, suffix)
    for key, paths in named_files(config.evaluation).items():
        yield from ((key, path, Path(path)) for path in paths)


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
        return self._config.model_copy(update={"data": data.model_copy(update=changes)})

    def check_tokenizer(self) -> None:
        """Raises DataError, naming all places that were looked at, when the recipe's tokenizer is in none of them."""
        found, looked = self._tokenizer()
        if found is None:
            raise DataError(
                f"{self._checkpoint}: the tokenizer of its recipe, data.tokenizer {self._config.data.tokenizer!r}, was "
                f"not found; looked for {'; '.join(looked)}; give --tokenizer FILE"
            )

    def check_corpora(self, validation: Sequence[SourceConfig]) -> None:
        """Raises DataError, naming all places that were looked at, when one of these validation corpora is in none."""
        for index, source in enumerate(validation):
            if self._corpus(source.path) is None:
                looked = "; ".join(str(corpus_file(path, "idx")) for path in self.places(source.path))
                raise DataError(
                    f"data.validation[{index}].path: given {source.path!r}, which was not found; looked for {looked}; "
                    "give --data CORPUS"
                )

    def _tokenizer(self) -> tuple[str | None, list[str]]:
        """The recipe's tokenizer, None where it was not found, and the places that were looked at in vain."""
        given = self._config.data.tokenizer
        trained = trained_tokenizer(self._checkpoint)
        looked: list[str] = []
        for path in self.places(given) if given is not None else ():
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
        return next((str(path) for path in self.places(given) if corpus_file(path, "idx").is_file()), None)

    def places(self, given: str) -> Iterator[Path]:
        """Places where `given` may be. Its name alone counts in the run folder, where an imported model has its
        tokenizer."""
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


def open_checkpoint(path: Path, init_from: Path | None = None) -> SavedRun:
    """The checkpoint `path`, or the newest valid one of the run folder `path`, with its recipe and stage.

    init_from: the model that adapters were trained on, if it is not where the recipe says

    Raises UserError when there is none, it is damaged, its recipe cannot work, describes a model that the checkpoint
    cannot hold, or names files that it must not read (`check_paths`).
    """
    saved = read_checkpoint(path)
    check_paths(saved.config, corpora_and_tokenizer(saved.config), saved.path, working_roots())
    if init_from is not None:
        saved = saved._replace(config=saved.config.model_copy(update={"init_from": str(init_from)}))
    return saved


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The recipe with `overrides` applied, as `load_config` takes them. Raises ConfigError with every problem."""
    return validated(parse_yaml(dump_config(config), "recipe"), overrides) if overrides else config


def read_checkpoint(path: Path) -> SavedRun:
    """`open_checkpoint`, without a look at the files that the recipe names."""
    checkpoint, held = find_checkpoint(path)
    config = saved_recipe(checkpoint)
    # Where the first weights came from no longer matters, and options that change nothing did no harm in training.
    run = resolve(config.model_copy(update={"init_from": None}), allow_idle=True)
    _check_size(run.setup.spec, checkpoint)
    return SavedRun(checkpoint, config, run.setup.spec, saved_stage(checkpoint, run.stages), held)


def _check_size(spec: ModelSpec, checkpoint: Path) -> None:
    """Raises CheckpointError when the files are too small for the recipe's model, before memory for it is taken."""
    parameters = spec.counts.total - spec.counts.attention_kinds - spec.counts.base
    size = sum(entry["size"] for entry in check_sizes(checkpoint).values())
    if size < 4 * parameters:  # checkpoints hold float32
        raise CheckpointError(
            f"checkpoint {checkpoint}: the parameters of its recipe's model have {4 * parameters:,} bytes, but its "
            f"files have {size:,}; use another checkpoint of this run"
        )
