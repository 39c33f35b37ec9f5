"""Documents from which a small model learns to find needles: text with hidden numbers, then a question for each.

Sentences and questions are those of the evaluation `needle` (RULER's), so that a model which has learned to look them
up can be asked; keys and numbers are drawn anew for each document, and its text is training text.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from data_tools.corpus_writer import IndexedDatasetWriter
from experiments.corpus import Corpus
from moba_train.data.indexed import IndexedDataset, corpus_file
from moba_train.data.tokenizer import TextTokenizer, load_text_tokenizer
from moba_train.errors import DataError
from moba_train.tools.needle.answers import encode_segments
from moba_train.tools.needle.haystack import draw_keys, draw_values, needle_frame, needle_parts

SHARE = 0.2
"""Share of needle documents in the training tokens of arms that shall find needles."""
_SHORTEST = 8
"""The shortest document is an 8th of the longest: near needles are learned first, and far ones from them."""
_TOKENS_PER_NEEDLE = 512


def needle_corpus(length: int) -> str:
    """Name of the corpus of documents of up to `length` tokens."""
    return f"needles-{length}"


def write_needles(corpus: Corpus, folder: Path, length: int, tokens: int) -> None:
    """Write the corpus `needle_corpus(length)`, at least `tokens` tokens, into `folder` unless it is there.

    Raises DataError where the corpus has no tokenizer, or too little text.
    """
    prefix = folder / needle_corpus(length)
    if corpus_file(prefix, "idx").exists():
        return
    if corpus.tokenizer is None:
        raise DataError(f"{corpus.folder}: has no tokenizer, which questions about text need")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_text_tokenizer(str(corpus.tokenizer))
    text = (token for token in _running_text(corpus, length) if token != tokenizer.eos_id)
    rng = random.Random(0)
    dtype = np.uint16 if corpus.vocab_size <= 1 << 16 else np.int32
    with IndexedDatasetWriter(prefix, dtype) as writer:
        while writer.tokens < tokens:
            wanted = length // 2 ** rng.randrange(_SHORTEST.bit_length())
            document = needle_document(tokenizer, text, wanted, rng)
            end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
            writer.add_document(np.array([*document, *end], dtype=dtype))


def needle_document(tokenizer: TextTokenizer, text: Iterator[int], length: int, rng: random.Random) -> list[int]:
    """About `length` tokens: `text` with a needle for every 512 of them, two at least, then a question for each, in
    random order."""
    count = max(2, length // _TOKENS_PER_NEEDLE)
    pairs = list(zip(draw_keys(count, rng), draw_values(count, "numbers", rng), strict=True))
    needles = [tokenizer.encode(f"\n{before} {value}{after}\n") for before, value, after in map(_sentence, pairs)]
    rng.shuffle(pairs)
    asked = [_question(tokenizer, key, value) for key, value in pairs]
    head = tokenizer.encode(needle_frame([pairs[0][0]], 1, "numbers").before)
    room = max(0, length - len(head) - sum(map(len, (*needles, *asked))))
    edges = [0, *sorted(rng.randint(0, room) for _ in needles), room]
    tokens = [*head]
    for (start, stop), needle in zip(pairwise(edges), [*needles, []], strict=True):
        tokens += [next(text) for _ in range(stop - start)]
        tokens += needle
    return tokens + [token for question in asked for token in question]


def _sentence(pair: tuple[str, str]) -> tuple[str, str, str]:
    key, value = pair
    before, after = needle_parts(key, "numbers")
    return before, value, after


def _question(tokenizer: TextTokenizer, key: str, value: str) -> list[int]:
    _, after, answer = needle_frame([key], 1, "numbers")
    parts = encode_segments(tokenizer, [f"{after} {answer}", f" {value}", "."])
    return [token for part in parts for token in part]


def _running_text(corpus: Corpus, length: int) -> Iterator[int]:
    """The training text, over and over. Raises DataError where it has fewer than `length` tokens."""
    source = IndexedDataset(corpus.find("train"))
    if source.tokens < length:
        raise DataError(f"{corpus.folder}: its training text has fewer than the {length} tokens of a document")
    while True:
        for document in range(source.documents):
            yield from map(int, source.document(document, 0, int(source.document_lengths[document])))
