"""Options of `moba-train lm-eval`, and checks of them that come before anything is loaded.

Some of lm-eval's generators of RULER's samples never end, not even at Ctrl-C, if their smallest sample is longer than
the length asked for. So that is checked first.
"""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from moba_train.errors import UserError
from moba_train.tools.inference.cache import Decode

INSTALL = "pip install 'lm-eval[ruler]>=0.4.13' 'transformers>=5' tokenizers"


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


def check_installed() -> None:
    """Raise UserError, with the command that installs it, when a package that the command needs is missing."""
    for module in ("lm_eval.evaluator", "transformers"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"moba-train lm-eval needs the package lm-eval ({error}); run `{INSTALL}`") from error


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
