"""Documents of a corpus as text, with the part that carries loss between marks, and a check of every byte."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data_tools.encoders import load_tiktoken_encoding
from data_tools.progress import ByteProgress
from moba_train.data.indexed import IndexedDataset, corpus_file, outside
from moba_train.data.loss_mask import LossWeights
from moba_train.data.tokenizer import TIKTOKEN, tokenizer_hashes
from moba_train.errors import DataError
from moba_train.tools.text_tokenizer import ChatTokenizer, load_text_tokenizer


class Decoder(NamedTuple):
    """The part of a tokenizer that turns token ids into text."""

    vocab_size: int
    """Token ids are below this."""
    decode: Callable[[Sequence[int]], str]
    """The text of token ids, with special tokens spelt out."""


class ShownDocument(NamedTuple):
    """One document, or its beginning, as text."""

    number: int
    """Its number in the corpus, counted from 0."""
    tokens: int
    """Tokens in the document."""
    loss_tokens: int | None
    """Tokens of the document that carry loss; None: the corpus has no loss mask."""
    left_out: int
    """Tokens at its end that `text` lacks."""
    text: str


def show_documents(
    corpus: IndexedDataset,
    decoder: Decoder,
    documents: Sequence[int],
    tokens: int | None,
    marks: tuple[str, str],
) -> Iterator[ShownDocument]:
    """Yield `documents` of a corpus, decoded; text that carries loss is between `marks` if there is a loss mask.

    tokens: number of tokens of each document to decode, from its beginning; None: all

    Raises DataError when a token id is not one of the tokenizer.
    """
    masks = LossWeights(corpus, "token").mask
    for index in documents:
        length = int(corpus.document_lengths[index])
        stop = length if tokens is None else min(tokens, length)
        ids = corpus.document(index, 0, stop)
        bad = outside(ids, decoder.vocab_size)
        if bad.any():
            offset = int(np.argmax(bad))
            raise DataError(
                f"corpus {corpus.prefix}: document {index} has token id {ids[offset]} at offset {offset}, but the "
                f"tokenizer has {decoder.vocab_size} ids; give the --tokenizer that made the corpus"
            )
        mask = None if masks is None else masks.document(index)
        text = _marked(ids, None if mask is None else mask[:stop], decoder, marks)
        loss_tokens = None if mask is None else int(np.count_nonzero(mask[1:]))
        yield ShownDocument(index, length, loss_tokens, length - stop, text)


def _marked(ids: npt.NDArray[Any], mask: npt.NDArray[Any] | None, decoder: Decoder, marks: tuple[str, str]) -> str:
    if mask is None:
        return decoder.decode(ids.tolist())
    text = ""
    for in_loss, places in itertools.groupby(range(len(ids)), key=lambda place: bool(mask[place])):
        decoded = decoder.decode([int(ids[place]) for place in places])
        text += f"{marks[0]}{decoded}{marks[1]}" if in_loss else decoded
    return text


def parse_documents(text: str, count: int) -> list[int]:
    """Documents that `text` names, as in "0,5,10:12", in a corpus of `count`. A range ends before its second number.

    Raises DataError when the text cannot be read or a document does not exist.
    """
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.strip().partition(":")
        try:
            start = int(first) if first or not colon else 0
            stop = (int(last) if last else count) if colon else start + 1
        except ValueError:
            raise DataError(
                f"--documents {text}: {part.strip()!r} is neither a number nor a range; allowed: numbers and ranges "
                "with commas between them, such as 0,5,10:12 (10:12 is 10 and 11)"
            ) from None
        if not 0 <= start < stop <= count:
            raise DataError(
                f"--documents {text}: no {part.strip()} in the corpus; its {count:,} documents are 0:{count}"
            )
        found += range(start, stop)
    return found


def tokenizer_of(corpus: IndexedDataset) -> str:
    """Path of the tokenizer that made the corpus, which must lie in the corpus' folder, or tiktoken:ENCODING.

    Raises DataError when it is not there, or not known.
    """
    name = (corpus.info or {}).get("tokenizer")
    if not isinstance(name, str):
        raise DataError(f"corpus {corpus.prefix} does not say which tokenizer made it; give --tokenizer")
    if name.startswith(TIKTOKEN):
        return name
    beside = Path(corpus.prefix).parent / Path(name).name
    if not beside.exists() or made_with(corpus, str(beside)) is False:
        raise DataError(f"corpus {corpus.prefix} was made with {name}, which is not beside it; give --tokenizer")
    return str(beside)


def made_with(corpus: IndexedDataset, tokenizer: str) -> bool | None:
    """True if `tokenizer`, a file or folder, made the corpus; None if that is not known."""
    sha256 = (corpus.info or {}).get("tokenizer_sha256")
    return None if sha256 is None or tokenizer.startswith(TIKTOKEN) else sha256 in tokenizer_hashes(tokenizer)


def load_decoder(tokenizer: str) -> Decoder:
    """The decoder of a tokenizer of any type that `tokenize` accepts. Raises DataError when it cannot be loaded."""
    if tokenizer.startswith(TIKTOKEN):
        encoding = load_tiktoken_encoding(tokenizer.removeprefix(TIKTOKEN))
        return Decoder(encoding.n_vocab, encoding.decode)
    loaded = ChatTokenizer(load_text_tokenizer(tokenizer))
    return Decoder(loaded.vocab_size, loaded.decode)


BLOCK_TOKENS = 8 << 20
"""Tokens that are read at a time."""


def verify_corpus(prefix: str, vocab_size: int | None) -> tuple[IndexedDataset, int | None]:
    """Check tables, counts, token ids and bytes of a corpus, and return it with the vocabulary size that was used.

    The vocabulary size is `vocab_size` or, without one, that of the sidecar; without either, only negative ids are
    found. Changed bytes are found if the sidecar has the SHA-256 of the files. A loss mask is checked with its corpus.
    Raises DataError at the first problem.
    """
    corpus = IndexedDataset(prefix)
    info = corpus.info or {}
    for name, found in (("documents", corpus.documents), ("tokens", corpus.tokens)):
        if info.get(name, found) != found:
            raise DataError(
                f"corpus {prefix}: {prefix}.json says {info[name]} {name}, but there are {found}; make the corpus again"
            )
    _ = corpus.fingerprint  # compares PREFIX.idx with the sidecar
    limit = info.get("vocab_size") if vocab_size is None else vocab_size
    digest = hashlib.sha256()
    with ByteProgress(f"verify {prefix}", corpus_file(prefix, "bin").stat().st_size) as progress:
        for begin, tokens in corpus.blocks(BLOCK_TOKENS):
            digest.update(tokens.data)
            if outside := corpus.first_outside(begin, tokens, limit):
                document, offset, token = outside
                raise DataError(
                    f"corpus {prefix}: document {document} has token id {token} at offset {offset}; "
                    f"allowed: {'0 or more' if limit is None else f'0 to {limit - 1}'}"
                )
            progress.advance(tokens.nbytes, len(tokens))
    if info.get("bin_sha256", digest.hexdigest()) != digest.hexdigest():
        raise DataError(
            f"corpus {prefix}: {corpus_file(prefix, 'bin')} is not what was written: its SHA-256 is "
            f"{digest.hexdigest()[:12]}..., {prefix}.json says {info['bin_sha256'][:12]}...; make the corpus again"
        )
    if mask := LossWeights(corpus, "token").mask:
        verify_corpus(mask.prefix, 2)
    return corpus, limit
