"""Text that spells out special tokens, as chat templates write it, to and from the ids of either type of tokenizer."""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.data.tokenizer import TextTokenizer, Tokenizer


def encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Token ids of `text`; special tokens that are spelt out in it become these tokens."""
    special = _control_tokens(tokenizer) if isinstance(tokenizer, Tokenizer) else {}
    if not special:
        return tokenizer.encode(text)
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        ids += [special[part]] if part in special else tokenizer.encode(part)
    return ids


def decode(tokenizer: TextTokenizer, ids: Sequence[int]) -> str:
    """Text of `ids`, with control tokens spelt out."""
    special = _control_tokens(tokenizer) if isinstance(tokenizer, Tokenizer) else {}
    names = {token: name for name, token in special.items()}
    text = ""
    for control, group in itertools.groupby(ids, key=lambda token: token in names):
        found = list(group)
        text += "".join(names[token] for token in found) if control else tokenizer.decode(found)
    return text


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with the `encode` and `decode` of this module."""

    tokenizer: TextTokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all are below it."""
        return self.tokenizer.vocab_size

    @property
    def eos_id(self) -> int | None:
        """Token id of the end of a document, or None if the tokenizer has none."""
        return self.tokenizer.eos_id

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens that are spelt out in it become these tokens."""
        return encode(self.tokenizer, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with control tokens spelt out."""
        return decode(self.tokenizer, tokens)


@functools.cache
def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the control tokens, such as </s>, by name. Sentencepiece never makes them from text."""
    processor = tokenizer.processor
    tokens = [token for token in range(processor.vocab_size()) if processor.is_control(token)]
    return {processor.id_to_piece(token): token for token in tokens}
