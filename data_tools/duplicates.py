"""Documents that repeat an earlier one: identical texts, and near duplicates by the package datasketch.

Two texts are near duplicates if their sets of runs of five words have a Jaccard similarity of at least a threshold, as
128 MinHash permutations estimate it (Broder 1997; with a standard error of 0.035 at 0.8). Pairs to compare are those
that agree in a band of the permutations (locality-sensitive hashing). A document is compared with the earlier ones that
stay: so the first copy in the order of the input stays, and whatever goes has such a near duplicate that stays.
"""

import functools
import hashlib
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data_tools.word_hashes import run_hashes, word_hashes
from moba_train.errors import DataError

PERMUTATIONS = 128
RUN = 5
"""Words of a run."""
LEAST_SIMILARITY = 0.5
MOST_SIMILARITY = 0.95
"""Limits of the threshold: outside of them 128 permutations have no bands that find nearly all pairs."""
_WEIGHTS = (0.02, 0.98)
"""Weights of false and missed pairs for the choice of the bands. A pair of exactly the threshold's similarity is missed
with a probability of 4 % at most; false pairs only cost a comparison."""
_BATCH = 8192
"""Runs that are permuted at a time, in 4 MiB: a document of any length takes no more."""

Digests = npt.NDArray[np.uint64]
"""uint64 [N, 2]: BLAKE2b of each of N documents, 128 bits."""
Signatures = npt.NDArray[np.uint32]
"""uint32 [N, 128]: smallest value of the runs of each of N documents under each permutation."""


class Repeat(NamedTuple):
    """Reason why a document goes."""

    kept: int
    """Index of an earlier document, which stays."""
    similarity: float | None
    """Estimated Jaccard similarity to it; None for an identical text."""


def check_similarity(similarity: float) -> None:
    """Raise DataError for a threshold outside of the limits, and when the package is missing that it needs."""
    if similarity != 1 and not LEAST_SIMILARITY <= similarity <= MOST_SIMILARITY:
        raise DataError(
            f"--duplicates: given {similarity:g}; allowed: {LEAST_SIMILARITY} to {MOST_SIMILARITY} for near "
            "duplicates, or 1 for identical texts"
        )
    if similarity != 1 and find_spec("datasketch") is None:
        raise DataError("--duplicates below 1 needs datasketch; run `pip install 'datasketch>=2'`, or give 1")


def digest(document: bytes) -> bytes:
    """128 bits by which identical documents are found."""
    return hashlib.blake2b(document, digest_size=16).digest()


def signature(document: bytes) -> Signatures:
    """MinHash of one document, uint32 [128]."""
    words = word_hashes(document.decode())
    runs = np.unique(run_hashes(words, min(RUN, max(len(words), 1))))
    if not len(runs):  # without words, a text has only itself
        runs = np.frombuffer(digest(document)[:8], np.uint64)
    found = _without_runs().copy()
    for first in range(0, len(runs), _BATCH):
        found.update_batch((runs[first : first + _BATCH] >> np.uint64(32)).tolist())
    return found.hashvalues


@functools.cache
def _without_runs() -> Any:
    from datasketch import MinHash

    return MinHash(PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")


def find_repeats(
    digests: Digests, signatures: Signatures, similarity: float, gone: Collection[int] = ()
) -> dict[int, Repeat]:
    """Documents that repeat an earlier one, by index. Those in `gone`, and texts identical to them, take no part.

    Takes about 0.7 KB a document: 512 bytes are its signature.
    """
    _, first, inverse = np.unique(digests.view("V16").ravel(), return_index=True, return_inverse=True)
    earliest = first[inverse]
    originals = np.setdiff1d(np.flatnonzero(earliest == np.arange(len(earliest))), [*gone]).astype(np.int64)
    repeats = _near(signatures, originals, similarity) if similarity < 1 else {}
    for index in np.flatnonzero(earliest != np.arange(len(earliest))).tolist():
        original = int(earliest[index])
        if original in gone:
            continue
        # An identical text of one that goes itself goes with it.
        repeats[index] = repeats.get(original, Repeat(original, None))
    return dict(sorted(repeats.items()))


def _near(signatures: Signatures, documents: npt.NDArray[np.int64], similarity: float) -> dict[int, Repeat]:
    """Near duplicates among `documents`, which are in ascending order."""
    groups = _bands(signatures[documents], similarity)
    repeats: dict[int, Repeat] = {}
    kept: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero((groups >= 0).any(axis=1)).tolist():
        document = int(documents[row])
        own = [(band, int(groups[row, band])) for band in np.flatnonzero(groups[row] >= 0).tolist()]
        others = sorted({other for group in own for other in kept.get(group, ())})
        if others:
            agreeing = (signatures[others] == signatures[document]).mean(axis=1)
            best = int(agreeing.argmax())  # of equal ones the first
            if agreeing[best] >= similarity:
                repeats[document] = Repeat(others[best], float(agreeing[best]))
                continue
        for group in own:
            kept.setdefault(group, []).append(document)
    return repeats


def _bands(signatures: Signatures, similarity: float) -> npt.NDArray[np.int32]:
    """Group of documents with an equal band, int32 [N, bands]; -1 for a document that is alone."""
    from datasketch import MinHashLSH

    lsh = MinHashLSH(similarity, PERMUTATIONS, weights=_WEIGHTS)
    groups = np.empty((len(signatures), lsh.b), np.int32)
    for band in range(lsh.b):
        values = np.zeros(len(signatures), np.uint64)
        for column in range(band * lsh.r, (band + 1) * lsh.r):
            values = values * np.uint64(0x9E3779B97F4A7C15) + signatures[:, column] + np.uint64(1)
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        groups[:, band] = np.where(counts[inverse] > 1, inverse, -1)
    return groups
