"""A checkpoint as `moba-train eval` is asked to evaluate it: its recipe with the options laid over it, checked."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moba_train.checkpoint.recipe import trained_tokenizer
from moba_train.config.data import SourceConfig
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.load import shadowed_overrides, with_overrides
from moba_train.config.optim import ScheduleConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.tokenizer import tokenizer_file, tokenizer_hashes
from moba_train.errors import ConfigError, DataError
from moba_train.evals.registry import EVALUATIONS, enabled_evaluations, evaluations_named
from moba_train.foreign_files import folder_roots
from moba_train.resolve.attention import attention_problems
from moba_train.resolve.data import recorded_tokenizers, tokenizer_mismatch
from moba_train.resolve.initial_weights import is_hf_folder
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import resolve_unchecked
from moba_train.resolve.saved_recipe import SavedPaths, SavedRun, check_paths, evaluation_corpora, read_checkpoint
from moba_train.tools.convert.hf import imported_recipe
from moba_train.tools.evaluate import EvaluationOptions
from moba_train.tools.lm_eval.options import LmEvalOptions


def open_for_evaluation(path: Path, options: EvaluationOptions) -> SavedRun:
    """The checkpoint `path`, the newest valid one of the run folder `path`, or the Hugging Face model `path`, with the
    recipe and the stage to evaluate it with.

    Paths in the recipe are found from any folder (`SavedPaths`); those in the options are the user's own. Raises
    UserError as `open_checkpoint`, and for options that cannot work.
    """
    if is_hf_folder(path):
        saved = _hugging_face(path)
        config = changed(saved, options)
        trained = tokenizer_hashes(config.data.tokenizer) if config.data.tokenizer is not None else []
    else:
        saved = read_checkpoint(path)
        paths = SavedPaths(saved.config, saved.path)
        saved = saved._replace(config=paths.located())
        config = changed(saved, options)
        own = _without(config, {*_paths(config)} - {*_paths(saved.config)} | {*options.data})
        check_paths(own.data, own.evaluation, saved.path, paths.roots)
        paths.check_corpora(own.data.validation)
        trained = [digest] if (digest := trained_tokenizer(saved.path)) else []
    check_tokenizer(config, trained)
    return saved.with_recipe(config)


def open_for_lm_eval(path: Path, options: LmEvalOptions) -> tuple[SavedRun, list[Path]]:
    """`open_for_evaluation` for a command that reads no corpus but needs the tokenizer, and the folders below which
    the tokenizer's files may lie.

    Raises UserError as `open_for_evaluation`, and when there is no tokenizer.
    """
    evaluation = EvaluationOptions(tasks=(), overrides=options.overrides, seq_len=options.seq_len)
    located = _hugging_face(path) if is_hf_folder(path) else read_checkpoint(path)
    roots = folder_roots(path)
    paths = None
    if not is_hf_folder(path):
        paths = SavedPaths(located.config, located.path)
        located = located._replace(config=paths.located())
        roots = paths.roots
    config = changed(located, evaluation)
    if options.tokenizer is not None:
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"tokenizer": str(options.tokenizer)})}
        )
    if config.data.tokenizer is None:
        raise DataError(f"{path}: names no tokenizer; give --tokenizer FILE")
    if config.data.tokenizer != located.config.data.tokenizer:  # the user names it
        roots = [*roots, *folder_roots(tokenizer_file(config.data.tokenizer).parent)]
    elif paths is not None:
        paths.check_tokenizer()
        own = _without(config, {*evaluation_corpora(config.data, config.evaluation).values()})
        check_paths(own.data, own.evaluation, located.path, roots)
    return located.with_recipe(config), roots


def changed(saved: SavedRun, options: EvaluationOptions) -> RunConfig:
    """The recipe of `saved` with the options laid over it. Raises UserError for options that do not fit."""
    stage = saved.stage
    config = saved.config
    if options.seq_len is not None:
        config = _with_length(config, stage, options.seq_len)
        stage = resolve_unchecked(config).stages[stage.index]
    tasks = evaluations_named(options.tasks or ())
    for evaluation in EVALUATIONS.values():
        overridden = any(override.startswith(f"{evaluation.key}.") for override in options.overrides)
        if overridden or evaluation in tasks:
            config = evaluation.switched_on(config, stage)
    config = with_overrides(config, options.overrides)
    if problems := shadowed_overrides(config.stages, options.overrides, [stage.index]):
        raise ConfigError(problems)
    if options.data:
        corpora = [SourceConfig(path=path) for path in options.data]
        config = config.model_copy(update={"data": config.data.model_copy(update={"validation": corpora})})
    _check(config, stage.index, options.tasks)
    return config


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
    """Raises ConfigError where the stage cannot be evaluated so: other stages count for the model's parameters only,
    the exit criterion and the learning rate's schedule, which may span all stages, not at all."""
    attention = attention_problems(
        config.model,
        config.attention,
        config.stages,
        config.parallel,
        None,
        config.deterministic,
        allow_idle=True,
        training=False,
    )
    if problems := list(attention):
        raise ConfigError(problems)
    stage = config.stages[index].model_copy(update={"until": None, "schedule": None, "evaluate": True})
    optim = config.optim.model_copy(update={"schedule": ScheduleConfig()})
    ignored = {"optim": optim, "init_from": None, "evaluation": EvaluationConfig()}
    alone = config.model_copy(update={"stages": [stage], **ignored})
    resolve(alone, allow_idle=True, training=False)
    asked = enabled_evaluations(config) if tasks is None else evaluations_named([*tasks])
    this = alone.model_copy(update={"evaluation": config.evaluation})
    if problems := [problem for evaluation in asked for problem in evaluation.problems(this)]:
        raise ConfigError([problem.replace("stages[0]", f"stages[{index}]") for problem in problems])


def _paths(config: RunConfig) -> Iterator[str]:
    """The paths that evaluation reads."""
    yield from evaluation_corpora(config.data, config.evaluation).values()
    yield from [config.data.tokenizer] if config.data.tokenizer is not None else []


def _without(config: RunConfig, named: set[str]) -> RunConfig:
    """The recipe without the paths `named`."""
    data = config.data
    changes = {
        "validation": [source for source in data.validation if source.path not in named],
        "tokenizer": None if data.tokenizer in named else data.tokenizer,
    }
    evaluation = config.evaluation.with_corpora(lambda path: None if path in named else path)
    return config.model_copy(update={"data": data.model_copy(update=changes), "evaluation": evaluation})


def _hugging_face(folder: Path) -> SavedRun:
    """The model in `folder`, which the user named, with the recipe that an import writes."""
    config = imported_recipe(folder, folder)
    run = resolve(config.model_copy(update={"init_from": None}), allow_idle=True)
    (stage,) = run.stages
    return SavedRun(folder, config, run.setup.spec, stage)


def check_tokenizer(config: RunConfig, trained: Sequence[str]) -> None:
    """Raises DataError when a validation corpus was made with another tokenizer than the model was trained with, one of
    `trained`, or without these the recipe's."""
    given = config.data.tokenizer
    file = tokenizer_file(given) if given is not None else None
    reference = "the model was trained with another one"
    if not trained:
        if file is None or not file.is_file():
            return
        reference = f"data.tokenizer is {given}"
        trained = tokenizer_hashes(file)
    sources = ((f"data.validation[{index}]", source) for index, source in enumerate(config.data.validation))
    for key, path, name, digest in recorded_tokenizers(sources):
        if digest not in trained:
            raise DataError(tokenizer_mismatch(key, path, name, digest, (reference, trained[0])))
