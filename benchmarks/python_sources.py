"""Real text that every machine has: Python's own sources and, behind them, those of this environment's packages, as
bytes."""

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
    """All source files, the first ones last, each part in a random order that is always the same; found once, as there
    are tens of thousands. Python's own come first: a short text is then the same whatever else is installed."""
    packages, own = (sorted(Path(sysconfig.get_paths()[name]).rglob("*.py")) for name in ("purelib", "stdlib"))
    own = [file for file in own if not {"site-packages", "dist-packages"}.intersection(file.parts)]
    for part in (packages, own):
        random.Random(0).shuffle(part)
    return (*packages, *own)
