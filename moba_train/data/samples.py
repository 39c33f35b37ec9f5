"""The training samples of one stage, each a pure function of its index.

Documents are concatenated and chopped: a sample is a window of `seq_len` tokens of its source's stream. Windows are
shuffled in groups of `SHUFFLED_WINDOWS`, because the windows of a long document would otherwise fill whole batches; a
stage's last group is as short as it must be, so that the stage as a whole reads the stream without a gap. Nothing here
depends on ranks, workers or what was read before, so a run resumes, and changes its layout, by counters alone.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moba_train.config.data import SourceConfig
from moba_train.data.blend import blend, samples_taken
from moba_train.data.indexed import IndexedDataset
from moba_train.data.shuffle import permutation
from moba_train.data.stream import DocumentStream, Piece
from moba_train.errors import DataError

BLEND_BLOCK = 1 << 16
SHUFFLED_WINDOWS = 4096


class Span(NamedTuple):
    """Where some tokens of a sample come from: tokens [start, stop) of a document."""

    source: str
    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sample:
    """`seq_len` tokens (T) with what to predict after each of them.

    A label is the token that follows in the same document. The last token of a document has none: its label is 0 and
    its loss weight 0. Where the sample, not the document, ends, the label is the document's next token.
    """

    tokens: npt.NDArray[np.int64]
    """int64 [T]"""
    labels: npt.NDArray[np.int64]
    """int64 [T]"""
    loss_weight: npt.NDArray[np.float32]
    """float32 [T]: 1 where there is a label, else 0."""
    lengths: list[int]
    """Tokens in each document piece, in order; they attend to nothing outside their own piece."""
    pieces: list[Span]
    """The origin of each document piece."""


class StageData:
    """The samples of one training stage.

    sources    corpora and their weights, by tokens
    seq_len    tokens in a sample
    sequences  samples in the stage
    seed       of the document order
    starts     stream tokens already consumed of each corpus, by path; a path left out starts at 0
    vocab_size rows of the model's embedding; token ids must lie below

    Raises DataError when a corpus is named twice, damaged, empty, or made for a larger vocabulary.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        seq_len: int,
        sequences: int,
        seed: int,
        starts: Mapping[str, int],
        vocab_size: int,
    ) -> None:
        self.seq_len = seq_len
        self.sequences = sequences
        self.vocab_size = vocab_size
        self._paths = [source.path for source in sources]
        self._weights = [source.weight for source in sources]
        self._starts = dict(starts)
        repeated = sorted({path for path in self._paths if self._paths.count(path) > 1})
        if repeated:
            raise DataError(
                f"corpus {repeated[0]} is named twice in one blend; "
                "name it once under data.train or stages.N.train and add up the weights"
            )
        self._streams = [DocumentStream(self._open(path), seed) for path in self._paths]
        self.fingerprints: dict[str, str] = {
            path: stream.fingerprint for path, stream in zip(self._paths, self._streams, strict=True)
        }
        """Fingerprint of each corpus by path, to be kept in checkpoints."""
        self._windows = samples_taken(self._weights, sequences)
        self._window_order = functools.lru_cache(maxsize=4 * len(sources))(self._shuffle_windows)
        self._blend_block = functools.lru_cache(maxsize=4)(self._make_blend_block)

    def _open(self, path: str) -> IndexedDataset:
        dataset = IndexedDataset(path)
        if dataset.tokens == 0:
            raise DataError(f"corpus {path} has no tokens; remove it from data.train or make it again")
        made_for = (dataset.info or {}).get("vocab_size", 0)
        if made_for > self.vocab_size:
            raise DataError(
                f"corpus {path} was tokenized with a vocabulary of {made_for}, but model.vocab_size is "
                f"{self.vocab_size}; set model.vocab_size to at least {made_for}"
            )
        return dataset

    def _make_blend_block(self, block: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        first = block * BLEND_BLOCK
        return blend(self._weights, min(BLEND_BLOCK, self.sequences - first), first)

    def _shuffle_windows(self, source: int, group: int) -> npt.NDArray[np.int64]:
        """Windows of a source in the order they are read, int64 [windows of the group]."""
        first = group * SHUFFLED_WINDOWS
        count = min(SHUFFLED_WINDOWS, int(self._windows[source]) - first)
        entropy = (*self._streams[source].entropy, self._starts.get(self._paths[source], 0), group)
        return first + permutation(count, entropy)

    def sample(self, index: int) -> Sample:
        """Sample `index` of the stage.

        Raises IndexError outside [0, sequences), DataError when a token id is not below `vocab_size`.
        """
        if not 0 <= index < self.sequences:
            raise IndexError(f"sample {index} of a stage of {self.sequences}")
        block, within = divmod(index, BLEND_BLOCK)
        source, ordinal = self._blend_block(block)
        chosen = int(source[within])
        path = self._paths[chosen]
        group, place = divmod(int(ordinal[within]), SHUFFLED_WINDOWS)
        offset = self._starts.get(path, 0) + int(self._window_order(chosen, group)[place]) * self.seq_len
        window = self._streams[chosen].window(offset, self.seq_len + 1)
        self._check_vocabulary(path, window)
        return _sample(path, window, self.seq_len)

    def _check_vocabulary(self, path: str, window: list[Piece]) -> None:
        for piece in window:
            bad = (piece.tokens < 0) | (piece.tokens >= self.vocab_size)
            if bad.any():
                first = int(np.argmax(bad))
                raise DataError(
                    f"corpus {path}: document {piece.document} has token id {piece.tokens[first]} at offset "
                    f"{piece.start + first}, but model.vocab_size is {self.vocab_size}; set model.vocab_size to the "
                    "size of the tokenizer that made the corpus"
                )

    def starts_after(self, sequences: int) -> dict[str, int]:
        """`starts` once the first `sequences` samples are consumed: where the next stage goes on.

        Corpora of other stages keep their place. In the middle of a stage this is the end of the windows being
        shuffled: some may go unread, none is read twice.
        """
        groups = -(-samples_taken(self._weights, sequences) // SHUFFLED_WINDOWS)
        taken = np.minimum(groups * SHUFFLED_WINDOWS, self._windows)
        return self._starts | {
            path: self._starts.get(path, 0) + int(count) * self.seq_len
            for path, count in zip(self._paths, taken, strict=True)
        }

    def check_fingerprints(self, expected: Mapping[str, str]) -> None:
        """Raises DataError when a corpus is no longer the one `expected` (by path, from a checkpoint) speaks of."""
        for path, fingerprint in self.fingerprints.items():
            if expected.get(path, fingerprint) != fingerprint:
                raise DataError(
                    f"corpus {path} has changed since the checkpoint (fingerprint {fingerprint[:12]}, then "
                    f"{expected[path][:12]}): the run cannot go on with the same data; restore the corpus, "
                    "or start a new run with another run_dir"
                )


def _sample(path: str, window: list[Piece], seq_len: int) -> Sample:
    """The sample made of the first `seq_len` tokens of a window of seq_len + 1."""
    tokens = np.concatenate([piece.tokens for piece in window], dtype=np.int64, casting="same_kind")
    labels = tokens[1:].copy()
    loss_weight = np.ones(seq_len, dtype=np.float32)
    # All pieces but the last reach their document's end.
    last_tokens = np.cumsum([len(piece.tokens) for piece in window[:-1]], dtype=np.int64) - 1
    labels[last_tokens] = 0
    loss_weight[last_tokens] = 0

    lengths = [len(piece.tokens) for piece in window]
    lengths[-1] -= 1
    spans = [
        Span(path, piece.document, piece.start, piece.start + length)
        for piece, length in zip(window, lengths, strict=True)
        if length
    ]
    return Sample(tokens[:-1], labels, loss_weight, [length for length in lengths if length], spans)
