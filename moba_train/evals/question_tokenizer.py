"""The tokenizer of questions: they begin as the documents that the model was trained on."""

from collections.abc import Sequence
from typing import Any

from moba_train.config.schema import RunConfig
from moba_train.data import control_tokens
from moba_train.data.corpus_marks import CorpusMarks
from moba_train.data.tokenizer import load_text_tokenizer
from moba_train.errors import DataError


class QuestionTokenizer:
    """The recipe's tokenizer.

    info: the sidecar of the corpus that the text of questions comes from; empty: none
    chat: whether special tokens that a text spells out become these tokens, as in fine-tuning; a chat template spells
        them out

    Raises DataError without a tokenizer, and for one with more tokens than the model.
    """

    def __init__(self, config: RunConfig, info: dict[str, Any], chat: bool) -> None:
        path = config.data.tokenizer
        if path is None:
            raise DataError("data.tokenizer: not set; questions about a text need the tokenizer of the model")
        self._text = load_text_tokenizer(path)
        self._chat = chat
        self._marks = CorpusMarks.from_sidecar(info)
        self.vocab_size = self._text.vocab_size
        self.eos_id = self._text.eos_id
        if self.vocab_size > config.model.vocab_size:
            raise DataError(
                f"data.tokenizer: {path} has {self.vocab_size} tokens, more than model.vocab_size "
                f"{config.model.vocab_size}; give the tokenizer that the model was trained with"
            )

    @property
    def marks(self) -> frozenset[int]:
        """The tokens at the ends of documents, which are no text."""
        return frozenset(mark for mark in (self.eos_id, self._marks.bos_id, self._marks.eos_id) if mark is not None)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` within a prompt."""
        return control_tokens.encode(self._text, text) if self._chat else self._text.encode(text)

    def begin(self, text: str) -> list[int]:
        """Token ids of `text` at the beginning of a prompt."""
        return self._marks.begin(self.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`."""
        return self._text.decode(tokens)
