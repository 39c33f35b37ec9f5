"""Recipe of a checkpoint as `moba-train eval` is asked to evaluate it: the options are laid over it, and checked."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moba_train.checkpoint.recipe import trained_tokenizer
from moba_train.config.data import DataConfig, SourceConfig
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.explain import did_you_mean
from moba_train.config.load import shadowed_overrides
from moba_train.config.optim import ScheduleConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.tokenizer import tokenizer_file, tokenizer_hashes
from moba_train.errors import ConfigError, DataError, UserError
from moba_train.evals.evaluation import Evaluation, EvaluationSetting
from moba_train.evals.registry import EVALUATIONS, asked_evaluations
from moba_train.foreign_files import folder_roots
from moba_train.resolve.attention import attention_problems
from moba_train.resolve.data import recorded_tokenizers, tokenizer_mismatch
from moba_train.resolve.evaluations import evaluation_settings
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.convert.hf import imported_recipe
from moba_train.tools.hf.config import CONFIG, is_hf_folder, read_family
from moba_train.tools.saved_recipe import (
    SavedPaths,
    SavedRun,
    check_paths,
    corpora_and_tokenizer,
    named_files,
    read_checkpoint,
    with_overrides,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of `moba-train eval`; None leaves a choice to the recipe."""

    attention: Literal["full", "own", "both"] = "both"
    tasks: tuple[str, ...] | None = None
    """Names of evaluations, whether the recipe has them or not; None: those that it has."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, laid over the checkpoint's recipe."""
    data: tuple[str, ...] = ()
    """Corpora instead of `data.validation`."""
    seq_len: int | None = None
    """Tokens of a sequence, instead of the stage's."""
    cp: int | None = None
    """Ranks that share a sequence; None: as many as in the checkpoint's stage, or one if that number does not divide
    the ranks."""
    output: Path | None = None
    """Folder for `evaluation.json` and `evaluation.html`; the result is written into the run's folder in any case."""

    def to_json(self) -> dict[str, Any]:
        """The options that bear on the numbers, as JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "output"}


def open_for_evaluation(path: Path, options: EvaluationOptions) -> SavedRun:
    """The checkpoint `path`, the newest valid one of the run folder `path`, or the Hugging Face model `path`, with the
    recipe and the stage to evaluate it in.

    Paths in the recipe are found from any folder (`SavedPaths`); those in the options are the user's own. Raises
    UserError as `open_checkpoint`, and for options that cannot work.
    """
    saved, paths = _opened(path)
    config = changed(saved, options)
    if paths is None:
        trained = tokenizer_hashes(config.data.tokenizer) if config.data.tokenizer is not None else []
    else:
        others = (file for files in named_files(saved.config.evaluation).values() for file in files)
        named = {*corpora_and_tokenizer(saved.config), *others} - {*options.data}
        check_paths(config, named, saved.path, paths.roots)
        paths.check_corpora([source for source in config.data.validation if source.path in named])
        trained = [digest] if (digest := trained_tokenizer(saved.path)) else []
    check_tokenizer(config.data, trained)
    return saved.with_recipe(config)


def open_to_generate(
    path: Path, tokenizer: Path | None = None, overrides: tuple[str, ...] = (), seq_len: int | None = None
) -> tuple[SavedRun, list[Path]]:
    """The model as from `open_for_evaluation`, for a command that reads no corpus but needs the tokenizer; and the
    folders below which the tokenizer's files may lie.

    tokenizer: one that the user names instead of the recipe's; seq_len: instead of the stage's

    Raises UserError as `open_for_evaluation`, and when there is no tokenizer.
    """
    evaluation = EvaluationOptions(tasks=(), overrides=overrides, seq_len=seq_len)
    located, paths = _opened(path)
    roots = folder_roots(path) if paths is None else paths.roots
    config = changed(located, evaluation)
    if tokenizer is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(tokenizer)})})
    if config.data.tokenizer is None:
        raise DataError(f"{path}: names no tokenizer (data.tokenizer); give --tokenizer FILE")
    if config.data.tokenizer != located.config.data.tokenizer:  # the user names it
        roots = [*roots, *folder_roots(tokenizer_file(config.data.tokenizer).parent)]
    elif paths is not None:
        paths.check_tokenizer()
        check_paths(config, {config.data.tokenizer}, located.path, roots)
    return located.with_recipe(config), roots


def changed(saved: SavedRun, options: EvaluationOptions) -> RunConfig:
    """The recipe of `saved` with the options laid over it. Raises UserError for options that do not fit."""
    index = saved.stage.index
    config = saved.config
    if options.seq_len is not None:
        config = _with_length(config, saved.stage, options.seq_len)
    tasks = evaluations_named(options.tasks or ())
    setting = evaluated_setting(config, index)
    defaults: dict[str, Any] = {}
    for name, evaluation in EVALUATIONS.usable().items():
        wanted = evaluation in tasks or any(override.startswith(f"{evaluation.key}.") for override in options.overrides)
        if wanted and evaluation.Options is not None and config.evaluation.options_of(name) is None:
            defaults[name] = evaluation.default_options(setting)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update=defaults)})
    config = with_overrides(config, options.overrides)
    if problems := shadowed_overrides(config.stages, options.overrides, [index]):
        raise ConfigError(problems)
    if options.data:
        corpora = [SourceConfig(path=path) for path in options.data]
        config = config.model_copy(update={"data": config.data.model_copy(update={"validation": corpora})})
    _check(config, index, options.tasks)
    return config


def evaluated_setting(config: RunConfig, index: int) -> EvaluationSetting:
    """Setting of the stage `index` alone, without its exit criterion, and without tensor and pipeline parallelism,
    which `moba-train eval` does not use. Raises ConfigError as `resolve_unchecked`."""
    setting = evaluation_settings(resolve_unchecked(config))[index]
    stage = replace(setting.stage, evaluate=True, until=None)
    return replace(setting, stage=stage, longest_length=stage.seq_len, tp=1, pp=1)


def _with_length(config: RunConfig, stage: Stage, seq_len: int) -> RunConfig:
    """The recipe with another length in one stage, and a batch that fits it: evaluation reads no batch."""
    stages = list(config.stages)
    micro_batch_size = max(1, stage.micro_batch_size * stage.seq_len // seq_len)
    stages[stage.index] = stages[stage.index].model_copy(
        update={
            "seq_len": seq_len,
            "micro_batch_size": micro_batch_size,
            "batch_tokens": seq_len * micro_batch_size,
            "tokens": stage.planned_tokens,
        }
    )
    return config.model_copy(update={"stages": stages})


def _check(config: RunConfig, index: int, tasks: Iterable[str] | None) -> None:
    """Raise ConfigError when the stage cannot be evaluated with this recipe. Other stages count for the model's
    parameters alone; the exit criterion and the learning rate's schedule, which may span all stages, do not count."""
    attention = attention_problems(config, None, allow_idle=True, training=False)
    if problems := list(attention):
        raise ConfigError(problems)
    stage = config.stages[index].model_copy(update={"until": None, "schedule": None, "evaluate": True})
    optim = config.optim.model_copy(update={"schedule": ScheduleConfig()})
    ignored = {"optim": optim, "init_from": None, "evaluation": EvaluationConfig()}
    resolve(config.model_copy(update={"stages": [stage], **ignored}), allow_idle=True, training=False)
    asked = asked_evaluations(config.evaluation, config.data.validation)
    named = None if tasks is None else evaluations_named([*tasks])
    setting = evaluated_setting(config, index)
    problems = [
        problem
        for evaluation, options in asked.items()
        if named is None or evaluation in named
        for problem in evaluation.problems(options, setting)
    ]
    if problems:
        raise ConfigError(problems)


def _opened(path: Path) -> tuple[SavedRun, SavedPaths | None]:
    """The checkpoint or Hugging Face model `path`; of a checkpoint with its files where they were found, and what finds
    them."""
    if is_hf_folder(path):
        return _hugging_face(path), None
    saved = read_checkpoint(path)
    paths = SavedPaths(saved.config, saved.path)
    return saved._replace(config=paths.located()), paths


def _hugging_face(folder: Path) -> SavedRun:
    """The model in `folder`, which the user named, with the recipe that an import would write."""
    config = imported_recipe(folder, folder)
    family, contents = read_family(folder)
    if unread := family.unread(contents):
        logger.warning("Nothing reads %s of %s; compare the model's logits", ", ".join(unread), folder / CONFIG)
    run = resolve(config.model_copy(update={"init_from": None}), allow_idle=True)
    (stage,) = run.stages
    return SavedRun(folder, config, run.setup.spec, stage)


def check_tokenizer(data: DataConfig, trained: Sequence[str]) -> None:
    """Raise DataError when a validation corpus was made with another tokenizer than the model was trained with.

    trained: SHA-256 of that tokenizer in its forms; none if it is not known, so that it is `data.tokenizer`
    """
    given = data.tokenizer
    file = tokenizer_file(given) if given is not None else None
    reference = "the model was trained with another one"
    if not trained:
        if file is None or not file.is_file():
            return
        reference = f"data.tokenizer is {given}"
        trained = tokenizer_hashes(file)
    sources = ((f"data.validation[{index}]", source) for index, source in enumerate(data.validation))
    for key, path, name, digest in recorded_tokenizers(sources):
        if digest not in trained:
            raise DataError(tokenizer_mismatch(key, path, name, digest, (reference, trained[0])))


def evaluations_named(names: Sequence[str]) -> list[type[Evaluation[Any]]]:
    """Evaluations of these names, each once, in the order given. Raises UserError for a name that none has."""
    for name in names:
        if name not in EVALUATIONS:
            hint = did_you_mean(name, [*EVALUATIONS])
            raise UserError(f"--tasks: there is no evaluation {name!r}{hint}; allowed: {', '.join(EVALUATIONS)}")
    return [EVALUATIONS[name] for name in dict.fromkeys(names)]
