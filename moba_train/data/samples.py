"""The training samples of one stage, each a pure function of its index.

A sample is `seq_len` tokens of one source, cut from its stream as data/windows.py says. Nothing here depends on ranks,
workers or what was read before, so a run resumes, and changes its layout, by counters alone.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moba_train.config.data import SourceConfig
from moba_train.data.blend import blend, samples_taken
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import LossNorm, LossWeights
from moba_train.data.strata import Stratum, strata
from moba_train.data.stream import DocumentStream, Extent
from moba_train.data.windows import BestFitWindows, ConcatenatedWindows, Windows
from moba_train.errors import DataError

BLEND_BLOCK = 1 << 16


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
    its loss weight 0. Where the sample, not the document, ends, the label is the document's next token. Padding comes
    last, as a piece of its own: zeros without loss, known by their place and not by their id.
    """

    tokens: npt.NDArray[np.int64]
    """int64 [T]"""
    labels: npt.NDArray[np.int64]
    """int64 [T]"""
    loss_weight: npt.NDArray[np.float32]
    """float32 [T]: weight of each label in the loss; 0 where there is none."""
    lengths: list[int]
    """Tokens in each document piece, in order, and then the padding; they attend to nothing outside their own piece."""
    pieces: list[Span]
    """The origin of each document piece."""

    @property
    def padding(self) -> int:
        """How many tokens at the end are no document's."""
        return self.lengths[-1] if len(self.lengths) > len(self.pieces) else 0


class StageData:
    """The samples of one training stage.

    sources    corpora and their weights, by tokens
    seq_len    tokens in a sample
    sequences  samples in the stage
    seed       of the document order
    starts     stream tokens already consumed of each stratum, by name; one left out starts at 0
    vocab_size rows of the model's embedding; token ids must lie below
    packing    how samples are cut from a stream, see data/windows.py
    loss_norm  how much each token with loss counts, see data/loss_mask.py

    Raises DataError when documents are named twice, or a corpus is damaged, empty, or made for a larger vocabulary.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        seq_len: int,
        sequences: int,
        seed: int,
        starts: Mapping[str, int],
        vocab_size: int,
        packing: Literal["concat", "best_fit"] = "concat",
        loss_norm: LossNorm = "token",
    ) -> None:
        self.seq_len = seq_len
        self.sequences = sequences
        self.vocab_size = vocab_size
        self._starts = dict(starts)
        self._corpora: dict[str, IndexedDataset] = {}
        self._loss_norm = loss_norm
        self._loss_weights: dict[str, LossWeights] = {}
        self.strata: list[Stratum] = strata(sources, self._open)
        """What is blended: corpora, or ranges of lengths of them."""
        self.streams = [
            DocumentStream(self._corpora[stratum.path], seed, stratum.min_length, stratum.below_length)
            for stratum in self.strata
        ]
        """The stream of each stratum."""
        self.fingerprints: dict[str, str] = {
            stratum.path: stream.fingerprint + self._loss_weights[stratum.path].fingerprint
            for stratum, stream in zip(self.strata, self.streams, strict=True)
        }
        """Fingerprint of each corpus by path, to be kept in checkpoints."""
        self._weights = [stratum.weight for stratum in self.strata]
        self.samples_of = samples_taken(self._weights, sequences)
        """How many of the stage's samples come from each stratum, int64 [strata]."""
        self._windows: list[Windows] = []
        for stratum, stream, count in zip(self.strata, self.streams, self.samples_of.tolist(), strict=True):
            start = self._starts.get(stratum.name, 0)
            self._windows.append(
                ConcatenatedWindows(stream, start, seq_len, count)
                if packing == "concat"
                else BestFitWindows(stream, start, seq_len)
            )
        self._blend_block = functools.lru_cache(maxsize=4)(self._make_blend_block)

    def _open(self, path: str) -> IndexedDataset:
        if path not in self._corpora:
            dataset = self._corpora[path] = IndexedDataset(path)
            self._loss_weights[path] = LossWeights(dataset, self._loss_norm)
            made_for = (dataset.info or {}).get("vocab_size", 0)
            if made_for > self.vocab_size:
                raise DataError(
                    f"corpus {path} was tokenized with a vocabulary of {made_for}, but model.vocab_size is "
                    f"{self.vocab_size}; set model.vocab_size to at least {made_for}"
                )
        return self._corpora[path]

    def _make_blend_block(self, block: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        first = block * BLEND_BLOCK
        return blend(self._weights, min(BLEND_BLOCK, self.sequences - first), first)

    def sample(self, index: int) -> Sample:
        """Sample `index` of the stage.

        Raises IndexError outside [0, sequences), DataError when a token id is not below `vocab_size`.
        """
        if not 0 <= index < self.sequences:
            raise IndexError(f"sample {index} of a stage of {self.sequences}")
        block, within = divmod(index, BLEND_BLOCK)
        source, ordinal = self._blend_block(block)
        chosen = int(source[within])
        return self._sample(self.strata[chosen].path, self._windows[chosen].extents(int(ordinal[within])))

    def _sample(self, path: str, extents: Sequence[Extent]) -> Sample:
        """The sample made of these pieces, padded to `seq_len`."""
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        labels = np.zeros(self.seq_len, dtype=np.int64)
        loss_weight = np.zeros(self.seq_len, dtype=np.float32)
        corpus = self._corpora[path]
        at = 0
        for piece in extents:
            length = piece.stop - piece.start
            stop = min(piece.stop + 1, int(corpus.document_lengths[piece.document]))
            found = corpus.document(piece.document, piece.start, stop)
            self._check_vocabulary(path, piece, found)
            labelled = at + len(found) - 1
            tokens[at : at + length] = found[:length]
            labels[at:labelled] = found[1:]
            loss_weight[at:labelled] = self._loss_weights[path].of(piece.document, piece.start + 1, stop)
            at += length
        lengths = [piece.stop - piece.start for piece in extents]
        if at < self.seq_len:
            lengths.append(self.seq_len - at)
        return Sample(tokens, labels, loss_weight, lengths, [Span(path, *piece) for piece in extents])

    def _check_vocabulary(self, path: str, piece: Extent, tokens: npt.NDArray[Any]) -> None:
        bad = (tokens < 0) | (tokens >= self.vocab_size)
        if bad.any():
            first = int(np.argmax(bad))
            raise DataError(
                f"corpus {path}: document {piece.document} has token id {tokens[first]} at offset "
                f"{piece.start + first}, but model.vocab_size is {self.vocab_size}; set model.vocab_size to the "
                "size of the tokenizer that made the corpus"
            )

    def starts_after(self, sequences: int) -> dict[str, int]:
        """`starts` once the first `sequences` samples are consumed: where the next stage goes on.

        Corpora of other stages keep their place. Some of the windows that are shuffled together with the last ones may
        go unread; none is read twice.
        """
        taken = samples_taken(self._weights, sequences).tolist()
        return self._starts | {
            stratum.name: windows.position_after(count)
            for stratum, windows, count in zip(self.strata, self._windows, taken, strict=True)
        }

    def padding_fraction(self, stratum: int) -> float:
        """Share of a stratum's samples that is padding, measured by packing all it takes for the stage."""
        return self._windows[stratum].padding_fraction(int(self.samples_of[stratum]))

    def check_fingerprints(self, expected: Mapping[str, str]) -> None:
        """Raises DataError when a corpus is no longer the one `expected` (by path, from a checkpoint) speaks of."""
        for path, fingerprint in self.fingerprints.items():
            if expected.get(path, fingerprint) != fingerprint:
                raise DataError(
                    f"corpus {path} has changed since the checkpoint (fingerprint {fingerprint[:12]}, then "
                    f"{expected[path][:12]}): the run cannot go on with the same data; restore the corpus, "
                    "or start a new run with another run_dir"
                )
