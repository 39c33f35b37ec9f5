"""The prompt of `moba-train generate`: where it comes from, and how far it has been read by the model."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moba_train.errors import UserError
from moba_train.model.transformer import Transformer

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


@contextmanager
def prefill_progress(model: Transformer, tokens: int, say: Callable[[str], object]) -> Iterator[None]:
    """While the context is open, say how much of a prompt of this many `tokens` the model has read, and how fast.

    All tokens go through one layer after the other, so a layer that is done counts as its share of the tokens.
    """
    began = said = time.monotonic()
    done = 0

    def layer_done(*_: Any) -> None:
        nonlocal done, said
        done += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else it is only the launch that is done; nothing against a layer of 1M tokens
        now = time.monotonic()
        if done > layers or (now - said < REPORT_EVERY and (done < layers or said == began)):
            return
        said = now
        read = tokens * done // layers
        seconds = max(now - began, 1e-9)
        say(f"reading the prompt: {read:,} of {tokens:,} tokens ({read / tokens:.0%}), {read / seconds:,.0f} tokens/s")

    layers = len(model.blocks)
    hooks = [block.register_forward_hook(layer_done) for block in model.blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
