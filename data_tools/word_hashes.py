"""Texts as sequences of hashed words, and hashes of runs of them: what documents are compared by.

Words are without case and punctuation, as in GPT-3's comparisons (Brown et al. 2020, arXiv:2005.14165, appendix C), and
in one of Unicode's forms (NFKC); a Chinese, Japanese or Korean character is a word. The hashes are equal on every
machine.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_CHARACTERS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
"""Ranges of characters that stand for a word or syllable each."""
_MARKS = "\u0300-\u036f\u0591-\u05bd\u064b-\u065f\u0900-\u0963\u0966-\u0dff"
"""Ranges with the accents, points and vowel signs of Latin, Hebrew, Arabic and Indian scripts, where `\\w` ends."""
_LETTERS = rf"[^\W_{_CHARACTERS}]"
_WORDS = re.compile(rf"[{_CHARACTERS}]|{_LETTERS}+(?:[{_MARKS}]+{_LETTERS}*)*")
_BETWEEN_WORDS = re.compile(r"\s")
_PIECE = 1 << 20
"""Characters that are taken apart at a time: the words of a whole document may take 20 times its size."""


class _Hashes(dict[str, int]):
    """Hash of each word, kept for the words that were seen last, in about 40 MB."""

    most = 1 << 18
    longest = 64
    """Characters of the longest word that is kept: a file of hexadecimal digits is one word."""

    def __missing__(self, word: str) -> int:
        value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        if len(word) <= self.longest:
            if len(self) >= self.most:
                self.clear()
            self[word] = value
        return value


_hashes = _Hashes()


def words(text: str) -> Iterator[list[str]]:
    """Yield the words of `text`, some at a time."""
    at = 0
    while at < len(text):
        space = _BETWEEN_WORDS.search(text, at + _PIECE)
        end = space.start() if space else len(text)
        yield _WORDS.findall(unicodedata.normalize("NFKC", text[at:end]).casefold())
        at = end


def word_hashes(text: str) -> npt.NDArray[np.uint64]:
    """Hash of each word of `text`, uint64 [words]."""
    pieces = [np.fromiter(map(_hashes.__getitem__, piece), np.uint64) for piece in words(text)]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)


def run_hashes(values: npt.NDArray[Any], length: int) -> npt.NDArray[np.uint64]:
    """Hash of each run of `length` numbers, uint64 [len(values) - length + 1]; empty if there are fewer."""
    hashes = np.zeros(max(len(values) - length + 1, 0), np.uint64)
    for offset in range(length):  # a polynomial in an odd number, modulo 2^64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + values[offset : offset + len(hashes)].astype(np.uint64) + 1
    return hashes
