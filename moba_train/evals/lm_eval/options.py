"""What `moba-train lm-eval` is asked for."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moba_train.errors import UserError
from moba_train.inference.cache import Decode

INSTALL = 'pip install "moba-train[eval]"'


@dataclass(frozen=True)
class LmEvalOptions:
    """Tasks, and how they are run; None leaves it to the task or to the checkpoint."""

    tasks: tuple[str, ...]
    """Names of tasks, groups and tags of the package; `*` stands for any text."""
    attention: Literal["own", "full", "both"] = "own"
    decode: Decode = "full"
    limit: float | None = None
    """Samples of each task; below 1: this share of them."""
    num_fewshot: int | None = None
    batch_size: int = 8
    """Prompts that are continued together."""
    batch_tokens: int = 32_768
    """Tokens of one forward pass for log-likelihoods; a longer text has a pass of its own."""
    seq_len: int | None = None
    """Longest text that the model reads, in place of the stage's length."""
    lengths: tuple[int, ...] = ()
    """Lengths of the samples of RULER's tasks; empty: `seq_len`."""
    include_path: Path | None = None
    """Folder with tasks of the user's own."""
    apply_chat_template: bool = False
    tokenizer: Path | None = None
    """In place of the recipe's."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, laid over the checkpoint's recipe."""
    output: Path | None = None
    """Folder for `evaluation.json`; the result is written beside the checkpoint in any case."""

    def to_json(self) -> dict[str, Any]:
        """The options that bear on the numbers, as JSON values."""
        return {
            "attention": self.attention,
            "tasks": list(self.tasks),
            "decode": self.decode,
            "limit": self.limit,
            "num_fewshot": self.num_fewshot,
            "seq_len": self.seq_len,
            "lengths": list(self.lengths),
            "apply_chat_template": self.apply_chat_template,
            "overrides": list(self.overrides),
        }


def check_installed() -> None:
    """Raises UserError, with the command that installs it, when a package that the command needs is missing."""
    for module in ("lm_eval.evaluator", "transformers"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(f"moba-train lm-eval needs the package lm-eval ({error}); run `{INSTALL}`") from error
