"""What the data tests write corpora from."""

from collections.abc import Callable, Sequence

import numpy as np

MakeCorpus = Callable[..., str]


def numbered_documents(lengths: Sequence[int], first: int = 1) -> list[np.ndarray]:
    """Documents of these lengths whose tokens count on from `first`, so that every token tells where it is from."""
    ends = first + np.cumsum(lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
