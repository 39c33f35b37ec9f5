"""The work of a `HuggingFaceTokenizer`, in its child process: the package tokenizers, and fastokens where that is
installed, on a tokenizer.json from elsewhere."""

import importlib
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

# Threads would need memory of their own, and there may be a process like this for every core.
os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import tokenizers

from moba_train.errors import DataError


def made(most: int, content: memoryview) -> Callable[[Any, memoryview], tuple[Any, bytes]]:
    """Load a tokenizer.json of at most `most` token ids, and return what answers requests, which begin with the name of
    a method of `_Work`."""
    _silence()
    work = _Work(most, content)
    return lambda request, text: getattr(work, request[0])(*request[1:], text)


class _Work:
    """A loaded tokenizer. Methods are given the values and the bytes of a request, and return those of the answer."""

    def __init__(self, most: int, content: memoryview) -> None:
        with named("is not a readable tokenizer.json"):
            self._library: Any = tokenizers.Tokenizer.from_str(str(content, "utf-8"))
            # The file may ask for truncation or padding, which is meant for batches of prompts.
            self._library.no_truncation()
            self._library.no_padding()
            self._size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self._size > most:
            raise ValueError(f"has the token id {self._size - 1}; allowed: below {most}")
        self._fast: Any = None
        with suppress(ImportError, ValueError, RuntimeError, OSError, TypeError), named("is refused by fastokens"):
            self._fast = importlib.import_module("fastokens").Tokenizer.from_json_str(self._library.to_str())

    def facts(self, _: memoryview) -> tuple[Any, bytes]:
        """Number of token ids, and True if there is a fast engine."""
        return [self._size, self._fast is not None], b""

    def token_to_id(self, token: str, _: memoryview) -> tuple[Any, bytes]:
        """Token id of a token."""
        return self._library.token_to_id(token), b""

    def encode(self, fast: bool, sizes: Sequence[int], texts: memoryview) -> tuple[Any, bytes]:
        """Number of ids of each text, which has this many bytes, and all ids."""
        split = [*_split(sizes, texts)]
        with named("cannot encode a text"):
            if fast:
                ids, ends = self._fast.encode_batch_flat(split)
                bounds = memoryview(ends).cast("B").cast("Q")
                return [end - begin for begin, end in pairwise(bounds)], bytes(ids)
            found = [encoding.ids for encoding in self._library.encode_batch_fast(split, add_special_tokens=False)]
        return [*map(len, found)], b"".join(array("I", ids).tobytes() for ids in found)

    def decode(self, ids: Sequence[int], _: memoryview) -> tuple[Any, bytes]:
        """The text of `ids`, with special tokens spelt out."""
        with named("cannot decode tokens"):
            return self._library.decode(ids, skip_special_tokens=False), b""


def _split(sizes: Sequence[int], texts: memoryview) -> Iterator[str]:
    begin = 0
    for size in sizes:
        yield str(texts[begin : begin + size], "utf-8")
        begin += size


@contextmanager
def named(problem: str) -> Iterator[None]:
    """Raises ValueError for what the library raises: plain Exceptions, and BaseExceptions for its panics."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt, DataError):
        raise
    except BaseException as error:
        raise ValueError(f"{problem}: {error}") from None


def _silence() -> None:
    """Leave out what the library writes to stderr as it panics; the error says it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
