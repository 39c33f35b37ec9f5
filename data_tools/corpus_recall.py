"""The synthetic share of a corpus: documents whose end can be predicted only by recall of their beginning."""

import json
from collections.abc import Mapping
from pathlib import Path

from data_tools.encoders import Encoder
from data_tools.long_range import RECALL_WEIGHTS, write_long_range

PROBE_CHARACTERS = 200_000
"""Length of the document that shows how many characters a token has."""

MARGIN = 1.1
"""By how much texts are longer than is asked for, because this number varies."""


def characters_per_token(texts: Path, probe: Path, encoder: Encoder) -> float:
    """Measured on one recall document, with passages of `texts`, that is written to `probe`."""
    write_long_range([str(texts)], probe, 1, PROBE_CHARACTERS, "probe", weights=RECALL_WEIGHTS)
    text = json.loads(probe.read_bytes())["text"]
    return len(text) / len(encoder.encode([text])[0])


def write_recall(
    texts: Path, folder: Path, split: str, documents: Mapping[int, int], ratio: float, seed: int
) -> list[Path]:
    """Write recall documents, a file for each length, where it is not complete already; returns the files. Nearly all
    documents have a little more than that length, so that they can be cut to it.

    texts      JSON lines that passages are taken from
    documents  number of documents by length in tokens
    ratio      characters per token

    Raises DataError when no text is long enough to take passages from.
    """
    files = []
    for length, count in documents.items():
        file = folder / f"recall-{split}-{length}.jsonl"
        files.append(file)
        if not file.exists():
            own_seed = f"{seed}/{split}/{length}"
            write_long_range(
                [str(texts)], file, count, round(length * ratio * MARGIN), own_seed, weights=RECALL_WEIGHTS
            )
    return files
