"""The training samples of one stage, each a pure function of its index.

A sample is `seq_len` tokens of one length bucket, packed from its stream by data/packers.py. Nothing here depends on
ranks, on workers or on earlier samples, so counters are enough to resume a run, also on another layout.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moba_train.config.data import LongConversations, SourceConfig
from moba_train.data.blend import LengthBucket, blend, length_buckets, samples_taken
from moba_train.data.indexed import IndexedDataset, outside, vocabulary_error
from moba_train.data.loss_mask import LossNorm, LossWeights
from moba_train.data.packers import BestFitPacker, ConcatPacker, Packer
from moba_train.data.sidecar import Fingerprint
from moba_train.data.stream import DocumentPart, DocumentStream
from moba_train.errors import DataError

LENGTHS = np.array([0, *((1 << power) + 1 for power in range(40))])
"""Bounds of the ranges of lengths that are counted: up to a power of two, above the one before."""
BLEND_BLOCK = 1 << 16
"""Samples whose sources are computed, and cached, together: looking up one sample after the other would sort the blend
each time."""


@dataclass(frozen=True)
class Sample:
    """`seq_len` tokens (T), and the label to predict at each of them.

    A label is the next token of the same document. The last token of a document has none: its label is 0 and its loss
    weight 0. If the sample ends inside a document, the label is still the document's next token. Padding comes last
    and is identified by its position, not by its token id: zeros that carry no loss and attend only to one another.
    """

    tokens: npt.NDArray[np.int64]
    """int64 [T]"""
    labels: npt.NDArray[np.int64]
    """int64 [T]"""
    loss_weight: npt.NDArray[np.float32]
    """float32 [T]: weight of each label in the loss; 0 without a label."""
    lengths: list[int]
    """Tokens in each document part, in order, then the padding if any. Attention never crosses these boundaries."""
    parts: list[DocumentPart]
    """Origin of each document part."""

    @property
    def padding(self) -> int:
        """Padding tokens at the end."""
        return self.lengths[-1] if len(self.lengths) > len(self.parts) else 0


LONG_REMEDY = "set a larger seq_len, or data.long_conversations to truncate, drop or split"
LONG_OUTCOMES = {
    "split": "they are split, and their later parts train without what comes before (data.long_conversations)",
    "truncate": "the rest of them is not trained on (data.long_conversations)",
    "drop": "they are not trained on (data.long_conversations)",
}
"""Consequences of `data.long_conversations`, for warnings."""


class StageData:
    """The samples of one training stage.

    sources: corpora and their weights, by tokens
    seq_len: tokens in a sample
    sequences: samples in the stage
    seed: of the document order
    starts: tokens already consumed of each stream, by its name in `stream_names`; 0 for streams that it lacks
    vocab_size: rows of the model's embedding; token ids must be below
    packing: the packer of every stream, see data/packers.py
    loss_norm: the weight of a token with loss, see data/loss_mask.py
    long_conversations: the treatment of conversations of more than `seq_len` tokens

    Raises DataError when documents are named twice, a corpus is damaged, empty, or made for a larger vocabulary, or a
    conversation is too long.
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
        long_conversations: LongConversations = "split",
    ) -> None:
        self.seq_len = seq_len
        self.sequences = sequences
        self.vocab_size = vocab_size
        self._starts = dict(starts)
        self._corpora: dict[str, IndexedDataset] = {}
        self._loss_norm = loss_norm
        self._loss_weights: dict[str, LossWeights] = {}
        self._long = long_conversations
        self._warnings: list[str] = []
        self.buckets: list[LengthBucket] = [self._fit(bucket) for bucket in length_buckets(sources, self._open)]
        """Parts of the blend: whole corpora, or ranges of their document lengths."""
        masked = [bucket.name for bucket in self.buckets if self._loss_weights[bucket.path].mask]
        if packing == "concat" and masked:
            self._warnings.append(
                f"data.packing: concat cuts the conversations of {', '.join(masked)} wherever a sample ends, and the "
                "rest of them trains without what comes before; set it to best_fit"
            )
        self.streams = [
            DocumentStream(self._corpora[bucket.path], seed, bucket.min_length, bucket.below_length, bucket.most)
            for bucket in self.buckets
        ]
        """Stream of each bucket."""
        self.fingerprints: dict[str, Fingerprint] = {
            path: weights.fingerprint for path, weights in self._loss_weights.items()
        }
        """Fingerprint of each corpus, by path; checkpoints store them."""
        self.stream_names = self._name_streams()
        """Name of each stream, equal in every stage and for every place of the corpus."""
        self._weights = [bucket.weight for bucket in self.buckets]
        self.samples_per_bucket = samples_taken(self._weights, sequences)
        """Samples of the stage that come from each bucket, int64 [buckets]."""
        self._packers: list[Packer] = []
        for index, count in enumerate(self.samples_per_bucket.tolist()):
            stream = self.streams[index]
            start = self._starts.get(self.stream_names[index], 0)
            self._packers.append(
                ConcatPacker(stream, start, seq_len, count)
                if packing == "concat"
                else BestFitPacker(stream, start, seq_len)
            )
        self._blend_block = functools.lru_cache(maxsize=4)(self._make_blend_block)

    def _open(self, path: str) -> IndexedDataset:
        if path not in self._corpora:
            dataset = self._corpora[path] = IndexedDataset(path)
            dataset.check_vocabulary(self.vocab_size)
            most = self.seq_len if self._long == "truncate" else None
            self._loss_weights[path] = LossWeights(dataset, self._loss_norm, most)
        return self._corpora[path]

    def _fit(self, bucket: LengthBucket) -> LengthBucket:
        """The bucket without its long conversations or the rest of them, as `long_conversations` says; notes their
        number. Raises DataError when none may be long, or none remains."""
        long = self._loss_weights[bucket.path].long_conversations(bucket.min_length, bucket.below_length, self.seq_len)
        if not long:
            return bucket
        corpus = self._corpora[bucket.path]
        fits = corpus.documents_of_length(max(bucket.min_length, 1), self.seq_len + 1)
        if self._long == "error" or (self._long == "drop" and not len(fits)):
            raise DataError(f"{long}; {LONG_REMEDY}")
        self._warnings.append(f"{long}: {LONG_OUTCOMES[self._long]}")
        if self._long == "drop":
            return bucket._replace(below_length=self.seq_len + 1)
        return bucket._replace(most=self.seq_len) if self._long == "truncate" else bucket

    def _name_streams(self) -> list[str]:
        names: list[str] = []
        for bucket in self.buckets:
            name = f"{self.fingerprints[bucket.path].name}{bucket.range}"
            # Copies of one corpus in a blend are read independently of one another.
            copies = sum(other.split("#")[0] == name for other in names)
            names.append(f"{name}#{copies + 1}" if copies else name)
        return names

    def _make_blend_block(self, block: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        first = block * BLEND_BLOCK
        return blend(self._weights, min(BLEND_BLOCK, self.sequences - first), first)

    def sample(self, index: int) -> Sample:
        """Sample `index` of the stage.

        Raises IndexError outside [0, sequences), DataError when a token id is not below `vocab_size`.
        """
        return self._sample(*self._parts(index))

    def lengths(self, index: int) -> list[int]:
        """`lengths` of sample `index`, found without reading its tokens. Raises IndexError outside [0, sequences)."""
        _, parts = self._parts(index)
        return self._lengths(parts)

    def _parts(self, index: int) -> tuple[str, list[DocumentPart]]:
        """Path of the corpus that sample `index` comes from, and the sample's document parts."""
        if not 0 <= index < self.sequences:
            raise IndexError(f"sample {index} of a stage of {self.sequences}")
        block, within = divmod(index, BLEND_BLOCK)
        source, ordinal = self._blend_block(block)
        bucket = int(source[within])
        return self.buckets[bucket].path, self._packers[bucket].parts(int(ordinal[within]))

    def _lengths(self, parts: list[DocumentPart]) -> list[int]:
        """Tokens in each document part, then the padding if any."""
        lengths = [part.stop - part.start for part in parts]
        padding = self.seq_len - sum(lengths)
        return [*lengths, padding] if padding else lengths

    def _sample(self, path: str, parts: list[DocumentPart]) -> Sample:
        """The sample made of these parts of the corpus at `path`, padded to `seq_len`."""
        corpus = self._corpora[path]
        weights = self._loss_weights[path]
        # In the corpus' own dtype up to the end, because checking and copying 2 bytes a token is faster than 8.
        tokens = np.zeros(self.seq_len, dtype=corpus.dtype)
        labels = np.zeros(self.seq_len, dtype=corpus.dtype)
        loss_weight = np.zeros(self.seq_len, dtype=np.float32)
        at = 0
        for part in parts:
            length = part.stop - part.start
            # One token more than the part, if the document has it: the label of the part's last token.
            stop = min(part.stop + 1, int(corpus.document_lengths[part.document]))
            found = corpus.document(part.document, part.start, stop)
            labelled = at + len(found) - 1
            tokens[at : at + length] = found[:length]
            labels[at:labelled] = found[1:]
            loss_weight[at:labelled] = weights.slice(part.document, part.start + 1, stop)
            at += length
        for ids in (tokens, labels):
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise self._vocabulary_error(corpus, parts)
        return Sample(tokens.astype(np.int64), labels.astype(np.int64), loss_weight, self._lengths(parts), parts)

    def _vocabulary_error(self, corpus: IndexedDataset, parts: list[DocumentPart]) -> DataError:
        """The error for the first token id of these parts, or label of them, that lies outside [0, vocab_size)."""
        for part in parts:
            stop = min(part.stop + 1, int(corpus.document_lengths[part.document]))
            ids = corpus.document(part.document, part.start, stop)
            bad = outside(ids, self.vocab_size)
            if bad.any():
                first = int(np.argmax(bad))
                return vocabulary_error(
                    corpus.prefix, part.document, part.start + first, int(ids[first]), self.vocab_size
                )
        return DataError(f"corpus {corpus.prefix} changed while it was read; restore it")

    def starts_after(self, sequences: int) -> dict[str, int]:
        """`starts` of the next stage, once the first `sequences` samples are consumed.

        Corpora of other stages keep their position. Some samples of the last group that is shuffled together may remain
        unread; none is read twice.
        """
        taken = samples_taken(self._weights, sequences).tolist()
        return self._starts | {
            name: packer.position_after(count)
            for name, packer, count in zip(self.stream_names, self._packers, taken, strict=True)
        }

    @property
    def chat_template(self) -> dict[str, Any]:
        """Chat template in the first sidecar that has one, with its `end_of_turn_id`; empty if there is none."""
        infos = [self._corpora[bucket.path].info or {} for bucket in self.buckets]
        found = (info for info in infos if "chat_template" in info)
        return next(({"end_of_turn_id": info.get("end_of_turn_id")} | info["chat_template"] for info in found), {})

    def check_loss(self) -> None:
        """Raise DataError when no token of any bucket carries loss."""
        if not any(
            self._loss_weights[bucket.path].carries_loss(bucket.min_length, bucket.below_length)
            for bucket in self.buckets
        ):
            raise DataError(
                f"no token of {', '.join(bucket.name for bucket in self.buckets)} carries loss: the loss masks are all "
                "0, or every document has a single token; make the masks again, or name other corpora"
            )

    def warnings(self, batch_tokens: int) -> list[str]:
        """A sentence for each bucket with long conversations, and for each that has fewer than the `batch_tokens` of a
        batch: the number of times that the stage reads it."""
        found = [*self._warnings]
        for index, (bucket, stream) in enumerate(zip(self.buckets, self.streams, strict=True)):
            if stream.tokens < batch_tokens:
                taken = self.samples_per_bucket[index] * self.seq_len * (1 - self.padding_fraction(index))
                epochs = taken / stream.tokens
                found.append(
                    f"corpus {bucket.name} has {stream.tokens:,} tokens, fewer than a batch ({batch_tokens:,}): the "
                    f"stage reads it about {epochs:,.1f} times"
                )
        return found

    def tokens_by_length(self) -> dict[str, int]:
        """Tokens that the stage takes of documents of up to each power of two tokens, by what its buckets hold."""
        found = np.zeros(len(LENGTHS) - 1)
        for bucket, stream, samples in zip(self.buckets, self.streams, self.samples_per_bucket.tolist(), strict=True):
            lengths = stream.lengths[stream.dataset.documents_of_length(bucket.min_length, bucket.below_length)]
            found += np.histogram(lengths, LENGTHS, weights=lengths)[0] * (samples * self.seq_len / stream.tokens)
        return {str(1 << power): round(tokens) for power, tokens in enumerate(found.tolist()) if tokens}

    def read_again(self) -> list[tuple[str, int, int]]:
        """Name, tokens and tokens taken of each bucket of which the stage takes more than it has."""
        taken = (self.samples_per_bucket * self.seq_len).tolist()
        found = zip(self.buckets, self.streams, taken, strict=True)
        return [(bucket.name, stream.tokens, tokens) for bucket, stream, tokens in found if tokens > stream.tokens]

    def padding_fraction(self, bucket: int) -> float:
        """Fraction of padding in the samples of a length bucket, found by packing all that the stage takes of it."""
        return self._packers[bucket].padding_fraction(int(self.samples_per_bucket[bucket]))
