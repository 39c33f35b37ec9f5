"""`moba-train lm-eval`: run tasks of the package lm-eval on a checkpoint, with one attention or two.

lm-eval's tasks measure their samples with a tokenizer of transformers, so the run's own is written as one.
"""

import json
import logging
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate

from moba_train.config.base import format_count
from moba_train.data.tokenizer import (
    CHAT_TEMPLATES,
    TOKENIZER_CONFIG,
)
from moba_train.errors import DataError, UserError
from moba_train.evals.evaluation import EvaluationResult, name_of, variants
from moba_train.foreign_files import parse_json
from moba_train.model.build import build_attention
from moba_train.output_files import write_atomically
from moba_train.tools.chat.load import Template, load_chat_template
from moba_train.tools.convert.hf_tokenizer import TOKENIZER_JSON, export_tokenizer
from moba_train.tools.evaluate import (
    load_on_this_machine,
    measured_json,
    recipe_layers,
    training_of,
    warn_of_length,
    write_results,
)
from moba_train.tools.inference.cache import Decode
from moba_train.tools.inference.corpus_marks import CorpusMarks, corpus_marks, ends_of_text
from moba_train.tools.lm_eval.language_model import NativeLM
from moba_train.tools.lm_eval.tasks import SHORTEST, Loaded, load_tasks
from moba_train.tools.needle.full_answers import modes_of
from moba_train.tools.saved_recipe import SavedRun
from moba_train.tools.text_tokenizer import GENERATION_CONFIG, SPECIAL_TOKENS_MAP, HuggingFaceTokenizer

_CLASS = "PreTrainedTokenizerFast"
_TRIAL = "A trial text: 0 a\n"
_UNLIMITED = 10**30
"""Number by which transformers marks no limit: tasks measure texts before they shorten them."""
_FILES = (TOKENIZER_JSON, SPECIAL_TOKENS_MAP, *CHAT_TEMPLATES, GENERATION_CONFIG)


@dataclass(frozen=True)
class LmEvalOptions:
    """Tasks and the way to run them; None leaves a choice to the task or to the checkpoint."""

    tasks: tuple[str, ...]
    """Names of tasks, groups and tags of the package; `*` stands for any text."""
    attention: Literal["own", "full", "both"] = "own"
    decode: Decode = "full"
    answer: Decode = "own"
    """full: each attention but full also with full attention for the answers that are scored."""
    limit: float | None = None
    """Samples of each task; below 1: this share of them."""
    num_fewshot: int | None = None
    batch_size: int = 8
    """Prompts that are continued together."""
    seq_len: int | None = None
    """Tokens of the longest text that the model reads, instead of the stage's length."""
    lengths: tuple[int, ...] = ()
    """Lengths of the samples of RULER's tasks; empty: `seq_len`."""
    include_path: Path | None = None
    """Folder with tasks of the user's own."""
    apply_chat_template: bool = False
    overrides: tuple[str, ...] = ()
    """`key.path=value`, laid over the checkpoint's recipe."""
    output: Path | None = None
    """Folder for `evaluation.json`; the result is written into the run's folder in any case."""

    def to_json(self) -> dict[str, Any]:
        """The options that bear on the numbers, as JSON values."""
        others = ("batch_size", "include_path", "output")
        return {name: value for name, value in asdict(self).items() if name not in others}


def open_hf_tokenizer(
    tokenizer: str | None, marks: CorpusMarks, seq_len: int, folder: Path, roots: Sequence[Path]
) -> Any:
    """The run's tokenizer, data.tokenizer, as a tokenizer of transformers, which is written into the empty `folder`.

    It makes the ids of training, and puts the same mark before a text as the documents of training had. lm-eval loads
    it with `trust_remote_code`, so no file of it names code. Raises DataError when it cannot be read from below
    `roots`, or has no form that transformers can load.
    """
    from transformers import PreTrainedTokenizerFast

    export = export_tokenizer(tokenizer, marks, "llama", seq_len, roots)
    if TOKENIZER_JSON not in export.files:
        raise DataError(f"moba-train lm-eval cannot use the tokenizer: {'; '.join(export.warnings)}")
    for name in _FILES:
        if name in export.files:
            write_atomically(folder / name, export.files[name])
    # transformers reads it in this process, without limits.
    HuggingFaceTokenizer(folder / TOKENIZER_JSON).encode(_TRIAL)
    options = parse_json(export.files.get(TOKENIZER_CONFIG, b"{}"))
    options = {key: value for key, value in options.items() if key != "auto_map"}
    options |= {"tokenizer_class": _CLASS, "model_max_length": _UNLIMITED}
    write_atomically(folder / TOKENIZER_CONFIG, json.dumps(options))
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the packages raise plain Exception
        raise DataError(f"transformers cannot load the tokenizer {tokenizer}: {error}") from error


logger = logging.getLogger(__name__)

NAME = "lm_eval"
"""Key of the results in the JSON file."""

Metrics = dict[str, dict[str, float]]
"""Values by task and metric, and their standard errors under the name `<metric>_stderr`."""


def evaluate_with_lm_eval(
    saved: SavedRun, roots: Sequence[Path], options: LmEvalOptions, echo: Callable[[str], object]
) -> None:
    """Run the tasks with each attention on the same weights, and write the results into the run's folder.

    saved: the recipe with the options laid over it (tools/evaluated_recipe.py)
    roots: folders below which the recipe's tokenizer may lie
    echo: gets the lines to print

    Raises UserError for options and tasks that cannot work here.
    """
    training = training_of(saved)
    stage = saved.stage
    attentions = variants(stage.attention, recipe_layers(saved), options.attention)
    lengths = _sample_lengths(options, stage.seq_len)
    warn_of_length(stage.seq_len, training)
    with tempfile.TemporaryDirectory() as folder:
        marks = corpus_marks(saved, roots)
        tokenizer = open_hf_tokenizer(saved.config.data.tokenizer, marks, stage.seq_len, Path(folder), roots)
        template = _template(folder) if options.apply_chat_template else None
        stop_tokens = ends_of_text(folder)
        _set_seeds()
        loaded = load_tasks(options.tasks, options.include_path, tokenizer, lengths)
    model = load_on_this_machine(saved)
    found: dict[str, Metrics] = {}
    details: dict[str, Any] = {}
    modes = [(mode, layers) for name, layers in attentions.items() for mode in modes_of(name, options.answer)]
    for (name, in_full), layers in modes:
        model.set_attention(build_attention(layers, saved.config.model.head_width))
        lm = NativeLM(
            model,
            tokenizer,
            stage.seq_len,
            batch_size=options.batch_size,
            decode=options.decode,
            in_full=in_full,
            template=template,
            stop_tokens=stop_tokens,
        )
        answered = _evaluate(lm, loaded, options)
        found[name] = _metrics(answered)
        details = _details(answered) | {"cut": {task: count for task, count in lm.cut.items() if count}}
        _warn_of_cut(lm)
    own = name_of(stage.attention) if name_of(stage.attention) in found else next(iter(found))
    numbers = dict(_numbers(found[own]))
    data = {"attention": own, "sample_lengths": lengths, "scores": found, **details}
    result = EvaluationResult(numbers, f"lm-eval: {len(loaded['tasks'])} tasks", list(_table(found)), data)
    for line in result.table:
        echo(line)
    content = measured_json(saved, training, options.to_json(), own, attentions, {NAME: result})
    write_results(content | {"validation": [], "ranks": 1}, saved.path, options.output, echo)


def _sample_lengths(options: LmEvalOptions, seq_len: int) -> list[int]:
    """Lengths of the samples that RULER's tasks make. Raises UserError for those that the model cannot read."""
    for length in options.lengths:
        if seq_len < SHORTEST:
            raise UserError(
                f"--lengths: given {length}; RULER's samples have at least {SHORTEST} tokens, and the model reads "
                f"{seq_len}; allowed: with --seq-len {SHORTEST} or more"
            )
        if not SHORTEST <= length <= seq_len:
            raise UserError(
                f"--lengths: given {length}; allowed: {SHORTEST} to {seq_len}, the longest text that the model reads; "
                "--seq-len changes that"
            )
    return list(options.lengths) or [max(seq_len, SHORTEST)]


def _template(folder: str) -> Template:
    try:
        return load_chat_template(folder)
    except DataError as error:
        raise UserError(f"--apply-chat-template: the tokenizer has none: {error}") from error


def _set_seeds() -> None:
    """Set the seeds of lm-eval's own command, for tasks that draw their samples."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)  # noqa: NPY002  # the tasks use this generator
    torch.manual_seed(DEFAULT_OTHER_SEED)


def _evaluate(lm: NativeLM, loaded: Loaded, options: LmEvalOptions) -> dict[str, Any]:
    """Results of all tasks, equal to those of lm-eval's own command."""
    for task in loaded["tasks"].values():
        shots = task.get_config("num_fewshot")
        if shots is None or (options.num_fewshot is not None and shots != 0):  # 0: the task is made for none
            task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    found: dict[str, Any] = evaluate(
        lm, loaded, limit=options.limit, log_samples=False, apply_chat_template=options.apply_chat_template
    )
    return found


def _metrics(answered: Mapping[str, Any]) -> Metrics:
    """Numbers of each task and group."""
    found: Metrics = {}
    for task, values in answered["results"].items():
        named = {key.removesuffix(",none"): value for key, value in values.items() if "," in key}
        # RULER's tasks give -1 for lengths without samples.
        numbers = {
            key: float(value)
            for key, value in named.items()
            if isinstance(value, int | float) and not (key.isdigit() and value == -1)
        }
        numbers = {key: value for key, value in numbers.items() if key.removesuffix("_stderr") in numbers}
        if numbers:
            found[task] = numbers
    return found


def _details(answered: Mapping[str, Any]) -> dict[str, Any]:
    """Circumstances of the numbers, by task: samples, versions and examples in the prompt."""
    samples = {task: count["effective"] for task, count in answered["n-samples"].items()}
    return {
        "samples": samples,
        "versions": {task: str(version) for task, version in answered["versions"].items()},
        "num_fewshot": dict(answered["n-shot"]),
    }


def _numbers(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Yield the metrics as `<task>/<metric>`, without standard errors."""
    for task, values in metrics.items():
        for key, value in values.items():
            if "_stderr" not in key:
                yield f"{task}/{key}", value


def _table(found: Mapping[str, Metrics]) -> Iterator[str]:
    """Yield a line for each metric, with a column for each attention."""
    first = next(iter(found.values()))
    keys = [tuple(number.rsplit("/", 1)) for number, _ in _numbers(first)]
    width = max([len("task"), *(len(task) for task, _ in keys)]) + 2
    middle = max([len("metric"), *(len(metric) for _, metric in keys)]) + 2
    yield f"{'task':<{width}}{'metric':<{middle}}" + "".join(f"{name:>20}" for name in found)
    for task, metric in keys:
        cells = [_cell(metrics[task], metric) for metrics in found.values()]
        yield f"{task:<{width}}{metric:<{middle}}" + "".join(f"{cell:>20}" for cell in cells)


def _cell(metrics: Mapping[str, float], metric: str) -> str:
    name, *filters = metric.split(",")
    error = metrics.get(",".join([f"{name}_stderr", *filters]))
    return f"{metrics[metric]:.4f}" + (f" +- {error:.4f}" if error is not None and math.isfinite(error) else "")


def _warn_of_cut(lm: NativeLM) -> None:
    if count := sum(lm.cut.values()):
        logger.warning(
            "%s texts were longer than the model reads (%d tokens) and lost their beginning; --seq-len changes that",
            format_count(count, 1000),
            lm.max_length,
        )
