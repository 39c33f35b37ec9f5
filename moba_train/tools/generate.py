"""Generation from text to text, for `moba-train generate`: prompt, tokenizer, generation, detokenizer."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from moba_train.data.tokenizer import tokenizer_file
from moba_train.errors import DataError, UserError
from moba_train.model.transformer import Transformer
from moba_train.tools.chat.load import load_chat_template, recorded_template
from moba_train.tools.chat.template import TemplateDefinition
from moba_train.tools.inference.across_ranks import PromptRanks, generate_across_ranks
from moba_train.tools.inference.cache import Decode
from moba_train.tools.inference.corpus_marks import NO_MARKS, CorpusMarks
from moba_train.tools.inference.generate import generate
from moba_train.tools.inference.graph import cuda_graph
from moba_train.tools.text_tokenizer import TextTokenizer

REPORT_EVERY = 5.0
"""Seconds between lines about a prompt that is being read; nothing is printed about a shorter reading."""


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


def chat_prompt(text: str, template: TemplateDefinition | None, tokenizer: Path) -> str:
    """`text` as a user's message, and the beginning of the answer, as a chat template writes them: `template`, or that
    in the folder of the tokenizer. Raises UserError without one, and when it refuses the message."""
    try:
        found = recorded_template(template) if template else load_chat_template(str(tokenizer_file(tokenizer).parent))
        return found.render([{"role": "user", "content": text}], add_generation_prompt=True)
    except (DataError, ValueError) as error:
        raise UserError(f"--chat: {error}") from error


class PrefillProgress:
    """Prints the share of a prompt of `tokens` tokens that the model has read, and the rate: `generate`'s
    `on_prefill`."""

    def __init__(self, tokens: int, say: Callable[[str], object]) -> None:
        self._tokens = tokens
        self._say = say
        self._began = self._said = time.monotonic()
        self._read = 0

    def __call__(self, tokens: int) -> None:
        """Count these further tokens, which the GPU may still be computing."""
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


CONTEXT = 32
"""Tokens that are decoded for a new one, itself included, once the end of the prompt is known: the whole prompt may
have 1M."""


def generate_text(
    model: Transformer,
    tokenizer: TextTokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    decode: Decode,
    marks: CorpusMarks = NO_MARKS,
    stop_tokens: Collection[int] = (),
    trained_length: int | None = None,
    ranks: PromptRanks | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[str]:
    """Yield the text that continues the prompt as its tokens are sampled.

    marks: tokens at the ends of the documents of training; a prompt begins and an answer ends like them
    stop_tokens: further tokens that end an answer, in addition to the tokenizer's `eos_id`
    trained_length: longest sequences of training, in tokens; None if not known
    ranks: those that share the prompt and generate together, with equal arguments; None: this device alone
    say: gets lines about the progress of reading the prompt, and before that a warning if prompt and answer may be
        longer than `trained_length`

    The other arguments are those of `generate`. Raises UserError for values out of range.
    """
    tokens = marks.begin(tokenizer.encode(prompt))
    if outside := [token for token in tokens if token >= model.config.vocab_size]:
        raise UserError(
            f"the tokenizer makes token id {outside[0]} of the prompt, but model.vocab_size is "
            f"{model.config.vocab_size}; give the tokenizer that the model was trained with"
        )
    if trained_length is not None and len(tokens) + max_new_tokens > trained_length:
        say(
            f"warning: the prompt has {len(tokens):,} tokens and the answer up to {max_new_tokens:,}, together more "
            f"than the {trained_length:,} tokens that the model was trained with: positions beyond are extrapolated by "
            "the stage's RoPE"
        )
    ends = {token for token in (tokenizer.eos_id, *marks.ends, *stop_tokens) if token is not None}
    record = cuda_graph if model.embedding.weight.is_cuda else None
    run = partial(generate, record=record) if ranks is None else partial(generate_across_ranks, ranks)
    answer = run(
        model,
        tokens,
        max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        vocab_size=tokenizer.vocab_size,
        stop_tokens=ends,
        decode=decode,
        on_prefill=PrefillProgress(len(tokens), say),
    )
    try:
        yield from _added_text(tokenizer, tokens, answer)
    except ValueError as error:
        raise UserError(str(error)) from error


def _added_text(tokenizer: TextTokenizer, prompt: Sequence[int], answer: Iterable[int]) -> Iterator[str]:
    """Yield the text that the tokens of `answer` add to that of `prompt`, each character as soon as it is complete."""
    tail = list(prompt)
    shown = tokenizer.decode(tail)
    for token in answer:
        # Decoded with the tokens before it: a token alone may be part of a character, or lose its leading space.
        tail.append(token)
        text = tokenizer.decode(tail)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        yield text[len(shown) :]
        # After a cut within a character, a tokenizer.json with byte fallback decodes no character up to the next token
        # that is not a byte. A later cut may be between two characters.
        shown = tokenizer.decode(tail[1 - CONTEXT :])
        if text.endswith(shown):
            tail = tail[1 - CONTEXT :]
        else:
            shown = text
    if rest := tokenizer.decode(tail)[len(shown) :]:
        yield rest
