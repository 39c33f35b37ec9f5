"""The synthetic share of a corpus: documents whose end can be predicted only by recall of their beginning."""

import json
from collections.abc import Sequence
from pathlib import Path

from data_tools.corpus_options import CorpusOptions
from data_tools.encoders import Encoder
from data_tools.long_range import RECALL_WEIGHTS, write_long_range

PROBE_CHARACTERS = 200_000


def characters_per_token(texts: Path, probe: Path, encoder: Encoder) -> float:
    """Measured on one recall document, with passages of `texts`, that is written to `probe`."""
    write_long_range([str(texts)], probe, 1, PROBE_CHARACTERS, "probe", weights=RECALL_WEIGHTS)
    text = json.loads(probe.read_bytes())["text"]
    return len(text) / len(encoder.encode([text])[0])


def write_recall(
    texts: Sequence[Path], folder: Path, split: str, tokens: float, least: int, ratio: float, options: CorpusOptions
) -> list[Path]:
    """Write about `tokens` tokens of recall documents, a file for each length, where they are not complete already.

    texts  JSON lines that passages are taken from
    least  documents of each length, at least
    ratio  characters per token

    Returns the files. Raises DataError when no text is long enough to take passages from.
    """
    files = []
    for length in options.recall_lengths:
        file = folder / f"recall-{split}-{length}.jsonl"
        files.append(file)
        if not file.exists():
            documents = max(round(tokens / len(options.recall_lengths) / length), least)
            seed = f"{options.seed}/{split}/{length}"
            inputs = [str(text) for text in texts]
            write_long_range(inputs, file, documents, round(length * ratio), seed, weights=RECALL_WEIGHTS)
    return files
