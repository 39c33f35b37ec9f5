"""The text around what is asked for: natural, from a tokenised corpus, or synthetic."""

import random
import re
from pathlib import Path

import numpy as np

from moba_train.config.evaluation import AnswersConfig
from moba_train.config.schema import RunConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.load_template import load_chat_template
from moba_train.data.tokenizer import TextTokenizer, tokenizer_hashes
from moba_train.errors import DataError
from moba_train.evals.question_tokenizer import QuestionTokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's repeated sentences (NVIDIA, github.com/NVIDIA/RULER, Apache-2.0)."""
_CONTEXT = "{{context}}"
"""Stands for the context while a chat template is rendered."""


def open_tokenizer(config: RunConfig, section: AnswersConfig) -> QuestionTokenizer:
    """The recipe's tokenizer for questions about the corpus of `section`. Raises DataError without one, and for a
    damaged corpus."""
    prefix = corpus_of(config, section)
    info = (IndexedDataset(prefix).info if prefix is not None else None) or {}
    return QuestionTokenizer(config, info, section.chat)


def corpus_of(config: RunConfig, section: AnswersConfig) -> str | None:
    """Prefix of the corpus that natural text comes from; None where the recipe names none."""
    first = config.data.validation[0].path if config.data.validation else None
    return section.corpus or first


class NaturalText:
    """Text of a tokenised corpus: consecutive documents, from a random one on, without the tokens at their ends.

    Raises DataError when the corpus is damaged, or was made with another tokenizer.
    """

    def __init__(self, config: RunConfig, prefix: str, tokenizer: QuestionTokenizer, key: str) -> None:
        self.prefix = prefix
        self._key = key
        self._tokenizer = tokenizer
        self._marks = np.array(sorted(tokenizer.marks), dtype=np.int64)
        self._vocab_size = config.model.vocab_size
        self._corpus = IndexedDataset(prefix)
        self._corpus.check_vocabulary(self._vocab_size)
        made_with = (self._corpus.info or {}).get("tokenizer_sha256")
        if made_with is not None and made_with not in tokenizer_hashes(str(config.data.tokenizer)):
            raise DataError(
                f"{key}: the corpus {prefix} was made with another tokenizer than data.tokenizer "
                f"{config.data.tokenizer}; give a corpus of the same tokenizer"
            )

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        """`count` tokens of text. Raises DataError when the corpus has fewer."""
        found: list[int] = []
        first = rng.randrange(max(self._corpus.documents, 1))
        for step in range(self._corpus.documents):
            if len(found) >= count:
                break
            document = (first + step) % self._corpus.documents
            length = min(int(self._corpus.document_lengths[document]), count - len(found) + len(self._marks))
            ids = self._corpus.document(document, 0, length).astype(np.int64)
            found += ids[~np.isin(ids, self._marks)].tolist()
        if len(found) < count:
            raise DataError(
                f"{self._key}: the corpus {self.prefix} has {len(found)} tokens of text, fewer than the {count} of a "
                "haystack; give a longer corpus, or shorter lengths"
            )
        if found and not 0 <= min(found) <= max(found) < self._vocab_size:
            raise DataError(f"{self._key}: the corpus {self.prefix} has token ids outside model.vocab_size")
        return found[:count]

    def words(self, count: int, rng: random.Random) -> list[str]:
        """The words of `count` tokens of text. Raises DataError when the corpus has fewer."""
        return re.split(r"\s+", self._tokenizer.decode(self.tokens(count, rng)).strip())


def noise_tokens(tokenizer: TextTokenizer, count: int) -> list[int]:
    """`count` tokens of RULER's sentences, repeated, a line for each repetition."""
    line = tokenizer.encode(NOISE + "\n")
    return (line * (count // len(line) + 1))[:count]


class Conversation:
    """The text around a context, as it is or as a chat template renders it.

    `key` is that of the section which asks. Raises DataError when `chat` is asked for and the folder of data.tokenizer
    has no template.
    """

    def __init__(self, config: RunConfig, chat: bool, key: str) -> None:
        self._key = f"{key}.chat"
        tokenizer = Path(str(config.data.tokenizer))
        folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
        try:
            self._template = load_chat_template(str(folder)) if chat else None
        except DataError as error:
            raise DataError(
                f"{self._key}: given true, but the folder of data.tokenizer gives none: {error}; set false, or name a "
                "tokenizer in the folder of a model that has one"
            ) from error

    def around(self, before: str, after: str, answer: str) -> tuple[str, str]:
        """What precedes the context and what follows it; `answer` is how the answer begins."""
        if self._template is None:
            return before, f"{after} {answer}"
        try:
            message = {"role": "user", "content": f"{before}{_CONTEXT}{after}"}
            text = self._template.render([message], add_generation_prompt=True)
        except ValueError as error:
            raise DataError(f"{self._key}: {error}") from error
        head, found, tail = text.partition(_CONTEXT)
        if not found:
            raise DataError(f"{self._key}: the chat template does not repeat the user's message as it is")
        return head, f"{tail}{answer}"
