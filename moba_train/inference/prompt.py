"""The prompt of `moba-train generate`: where it comes from, and how far it has been read by the model."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moba_train.errors import UserError

REPORT_EVERY = 5.0
"""Seconds between lines about a prompt that is being read; a shorter reading says nothing."""


def read_prompt(file: Path) -> str:
    """The text in `file`, exactly as it is; `-`: standard input. Raises UserError when it cannot be read as UTF-8."""
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {file}: is not UTF-8 text, at byte {error.start:,}") from None
    except OSError as error:
        raise UserError(f"--prompt-file {file}: cannot be read: {error.strerror or error}") from None
    if not text:
        raise UserError(f"--prompt-file {file}: is empty; allowed: text to continue")
    return text


class PrefillProgress:
    """Says how much of a prompt of this many `tokens` the model has read, and how fast: `generate`'s `on_prefill`."""

    def __init__(self, tokens: int, say: Callable[[str], object]) -> None:
        self._tokens = tokens
        self._say = say
        self._began = self._said = time.monotonic()
        self._read = 0

    def __call__(self, tokens: int) -> None:
        """Count these further tokens; they may still be computed on the GPU."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._read += tokens
        now = time.monotonic()
        was_silent = self._said == self._began
        if now - self._said < REPORT_EVERY and (self._read < self._tokens or was_silent):
            return
        self._said = now
        share = self._read / self._tokens
        rate = self._read / max(now - self._began, 1e-9)
        self._say(f"reading the prompt: {self._read:,} of {self._tokens:,} tokens ({share:.0%}), {rate:,.0f} tokens/s")
