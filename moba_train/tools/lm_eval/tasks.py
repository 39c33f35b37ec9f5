"""Tasks of the package lm-eval by name, with errors that name the task, and without downloads that it does not need.

Some of lm-eval's generators of RULER's samples never end, not even at Ctrl-C, if their smallest sample is longer than
the length asked for. So that is checked first.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from moba_train.config.explain import did_you_mean
from moba_train.errors import UserError
from moba_train.tools.lm_eval import INSTALL

logger = logging.getLogger(__name__)

Loaded = dict[str, dict[str, Any]]
"""`tasks` and `groups` by name, and the names in each group, as `TaskManager.load` returns them."""
_UNREACHABLE = {
    *("ConnectionError", "ConnectError", "ConnectTimeout", "DatasetNotFoundError", "LocalEntryNotFoundError"),
    *("MaxRetryError", "OfflineModeIsEnabled", "Timeout", "URLError", "gaierror"),
}
"""Classes of errors that packages raise when they cannot download."""


def load_tasks(names: Sequence[str], include: Path | None, tokenizer: Any, lengths: Sequence[int]) -> Loaded:
    """Tasks, groups and tags of these names, with their samples. `*` in a name stands for any text.

    include: folder with further tasks
    tokenizer: of transformers, loaded from a folder, from which RULER's tasks also load it
    lengths: of RULER's samples, in tokens

    Raises UserError for unknown names, and for tasks that cannot be loaded here.
    """
    if include is not None and not include.is_dir():
        raise UserError(f"--include-path {include}: is not a folder; give one with lm-eval's YAML files of tasks")
    metadata = {"tokenizer": str(tokenizer.name_or_path), "max_seq_lengths": list(lengths)}
    manager = TaskManager(include_path=include, metadata=metadata)
    loaded: Loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    matching = _matching(manager, names)
    try:
        check_sample_lengths(matching, tokenizer, lengths)
    except ImportError as error:
        raise UserError(f"--tasks: RULER {_reason(error)}") from error
    for name in matching:
        for part, entries in _load(manager, name).items():
            loaded[part].update(entries)
    for name, task in loaded["tasks"].items():
        _check(name, task)
    return loaded


def _matching(manager: TaskManager, names: Sequence[str]) -> list[str]:
    """Names of all tasks that are asked for. Raises UserError for a name that no task matches."""
    found: dict[str, None] = {}
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            raise UserError(
                f"--tasks: lm-eval has no task, group or tag {name!r}{did_you_mean(name, manager.all_tasks)}; "
                "`lm_eval ls tasks` lists them, --include-path adds a folder"
            )
        found |= dict.fromkeys(matching)
    return list(found)


def _load(manager: TaskManager, name: str) -> Loaded:
    """One task, group or tag. Raises UserError when it cannot be loaded."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some tasks print how they make their samples
            try:
                # RULER's tasks ask for data when they are imported, which only some of them need.
                with patch("nltk.download") if find_spec("nltk") else contextlib.nullcontext():
                    return dict(manager.load([name]))
            except LookupError as error:
                if type(error) is not LookupError:  # not nltk's
                    raise
                importlib.import_module("nltk").download("punkt_tab", quiet=True)
                return dict(manager.load([name]))
    except Exception as error:  # a task is a program: it can fail in any way
        logger.debug("task %s", name, exc_info=True)
        raise UserError(f"task {name} {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Reason why a task cannot be loaded, as text that follows its name."""
    causes = list(_causes(error))
    text = " ".join(str(error).split())
    if any(type(cause).__name__ in _UNREACHABLE for cause in causes):
        return (
            "needs data from the network that is not on this machine, and the network was not reached: "
            f"{type(error).__name__}: {text}"
        )
    if any(isinstance(cause, ImportError) for cause in causes):
        return f"needs a package that is not installed: {text}; `{INSTALL}` installs those of RULER"
    return f"cannot be loaded: {type(error).__name__}: {text}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _check(name: str, task: Task) -> None:
    """Raise UserError for tasks that cannot run here."""
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"task {name} runs code that the model writes, which moba-train lm-eval does not; convert the checkpoint "
            "with `moba-train convert moba-to-hf`, and run lm_eval in a sandbox"
        )
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"task {name} has images or sound; our models read text only")


SHORTEST = 1024
"""Shortest samples of RULER's tasks, in tokens."""
_VT_EXAMPLE = 500
"""Largest number of tokens of the solved example before a variable-tracking task."""
_SPARE = 1.1
"""Factor for the length of samples, because those of equally many words differ by a few percent."""
_GROUPS = ("ruler", "longcxt")
"""Groups and tags that contain the tasks."""


def check_sample_lengths(names: Sequence[str], tokenizer: Any, lengths: Sequence[int]) -> None:
    """Raise UserError when a task among `names` cannot make samples of one of these `lengths`."""
    checks = {"ruler_vt": _variable_tracking, "ruler_cwe": _common_words}
    for task, needed in checks.items():
        if task not in names and not any(group in names for group in _GROUPS):
            continue
        for length in lengths:
            for what, tokens, room in needed(tokenizer, length):
                if tokens > room:
                    raise UserError(
                        f"task {task}: {what} has {tokens} tokens with this tokenizer, and {room} are possible in "
                        f"samples of {length}; give other --lengths, or leave the task out"
                    )


def _variable_tracking(tokenizer: Any, length: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, tokens and largest possible number of tokens of the smallest solved example, and of the smallest
    sample with it."""
    from lm_eval.tasks.ruler.vt_utils import generate_input_output

    example = _tokens(tokenizer, generate_input_output(5, 1, 4, is_icl=True)[0]) + 30
    yield "its solved example", example, _VT_EXAMPLE
    tokens = example + _tokens(tokenizer, generate_input_output(10, 1, 4)[0]) + 30
    yield "its smallest sample", tokens, length


def _common_words(tokenizer: Any, length: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, tokens and largest possible number of tokens of the smallest sample with its solved example."""
    from lm_eval.tasks.ruler.cwe_utils import generate_input_output

    example, text, answers = generate_input_output(10, length)
    tokens = _tokens(tokenizer, " ".join([example, text, *answers])) + 120
    yield "its smallest sample", tokens, length


def _tokens(tokenizer: Any, text: str) -> int:
    return int(_SPARE * len(tokenizer(text, verbose=False).input_ids))
