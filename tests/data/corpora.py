"""Documents for the corpora of the data tests."""

from collections.abc import Callable, Sequence

import numpy as np

MakeCorpus = Callable[..., str]


def numbered_documents(lengths: Sequence[int], first: int = 1) -> list[np.ndarray]:
    """Documents of these lengths whose tokens are consecutive numbers from `first`: a token shows its origin."""
    ends = first + np.cumsum(lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
