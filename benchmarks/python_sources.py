"""Real text that every machine has: the Python sources of this environment's packages, as bytes."""

import functools
import random
import sysconfig
from pathlib import Path

import numpy as np

from data_tools.corpus_writer import IndexedDatasetWriter

BYTES = 256
"""Vocabulary of the corpora."""


def write_text(folder: Path, tokens: int) -> None:
    """Write `train`, at least `tokens` bytes where there are as many, and `valid`, 2 % of that, of other files."""
    files = [*_sources()]
    for name, wanted in (("valid", tokens // 50), ("train", tokens)):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            while files and writer.tokens < wanted:
                text = np.frombuffer(files.pop().read_bytes(), dtype=np.uint8)
                if text.size:
                    writer.add_document(text.astype(np.uint16))


@functools.cache
def _sources() -> tuple[Path, ...]:
    """All source files in a random order, which is always the same; found once, as there are tens of thousands."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    random.Random(0).shuffle(files)
    return tuple(files)
