"""Synthetic documents that can be predicted only by recall over their whole length, for the third cliff (F6).

A document is filler, drawn evenly, in which records are scattered. A record is a marker, a key and the key's values:

    pretraining   STATE key values       each fact is stated several times, always with the same values
    fine-tuning   STATE key values       each key is stated twice, with different values,
                  ASK key values         and asked for once, later: the answer is what was stated first

Only recall predicts the values of a repeated statement, or of an answer. Pretraining teaches recall, and fine-tuning
adds something to learn: which of two statements of a key counts. All answers are alike, so that those without loss need
recall as much as those with loss, whatever share of them a mask leaves.

Shape suffixes: N documents, F facts and U records of a document, V values and W tokens of a record, T tokens of a
document.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_tools.corpus_writer import IndexedDatasetWriter, dtype_for
from moba_train.data.loss_mask import mask_prefix

STATE, ASK = 0, 1
"""Token ids of the markers."""
Tokens = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recall:
    """Sizes of the documents."""

    length: int
    """Tokens of a document."""
    facts: int
    """Different keys of a document."""
    values: int
    """Value tokens of a record."""
    statements: int = 4
    """Statements of each fact in pretraining."""
    filler_ids: int = 62
    key_ids: int = 256
    value_ids: int = 256

    @property
    def vocab_size(self) -> int:
        """Token ids: markers, filler, keys, values."""
        return 2 + self.filler_ids + self.key_ids + self.value_ids

    @property
    def answer_share(self) -> float:
        """Share of a fine-tuning document's tokens that are answers."""
        return self.facts * self.values / self.length

    def with_length(self, length: int) -> "Recall":
        """Documents of another length with as many facts for each token."""
        return replace(self, length=length, facts=max(1, self.facts * length // self.length))


def pretraining_documents(sizes: Recall, count: int, rng: np.random.Generator) -> tuple[Tokens, Mask]:
    """Token ids [N, T] and which of them are predictable by recall alone, the values of all but a fact's first
    statement.

    All statements of a fact lie within an interval whose length is drawn log-uniformly between a hundredth of the
    document and all of it: near recall first teaches distant recall.
    """
    keys_NF, values_NFV = _facts(sizes, count, 1, rng)
    shape = (count, sizes.facts, sizes.statements)
    interval = 0.01 ** rng.random((*shape[:2], 1))
    times = (rng.random((*shape[:2], 1)) + interval * rng.random(shape)) % 1
    order_NU = times.reshape(count, -1).argsort(1)
    fact_NU = order_NU // sizes.statements
    rows = np.arange(count)[:, None]
    repeated_NU = np.zeros_like(fact_NU, dtype=bool)
    for row in range(count):
        first = np.unique(fact_NU[row], return_index=True)[1]
        repeated_NU[row] = True
        repeated_NU[row, first] = False
    records_NUW = _records(np.full_like(fact_NU, STATE), keys_NF[rows, fact_NU], values_NFV[0][rows, fact_NU])
    return _scatter(sizes, records_NUW, repeated_NU, rng)


def fine_tuning_documents(sizes: Recall, count: int, rng: np.random.Generator) -> tuple[Tokens, Mask]:
    """Token ids [N, T] and which of them are answers."""
    keys_NF, stated = _facts(sizes, count, 2, rng)
    times = np.sort(rng.random((count, sizes.facts, 3)), axis=2)
    order_NU = times.reshape(count, -1).argsort(1)
    fact_NU, turn_NU = order_NU // 3, order_NU % 3
    rows = np.arange(count)[:, None]
    values_NUV = np.where((turn_NU == 1)[..., None], stated[1][rows, fact_NU], stated[0][rows, fact_NU])
    asked_NU = turn_NU == 2
    records_NUW = _records(np.where(asked_NU, ASK, STATE), keys_NF[rows, fact_NU], values_NUV)
    return _scatter(sizes, records_NUW, asked_NU, rng)


def thinned(answers: Mask, values: int, share: float, rng: np.random.Generator) -> Mask:
    """A loss mask [N, T] of `share` of all tokens: everything for 1, else whole answers drawn evenly, at least one of
    each document, at most all of them."""
    if share == 1:
        return np.ones_like(answers)
    kept = np.zeros_like(answers)
    wanted = max(1, round(share * answers.shape[1] / values))
    for row, answer_T in enumerate(answers):
        places_AV = np.flatnonzero(answer_T).reshape(-1, values)
        kept[row, rng.permutation(places_AV)[:wanted]] = True
    return kept


def write_documents(prefix: Path, tokens: Tokens, mask: Mask | None, vocab_size: int) -> None:
    """Write a corpus, with a loss mask unless that is None; the mask first, so that what has its tokens is complete."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    if mask is not None:
        with IndexedDatasetWriter(mask_prefix(str(prefix)), np.uint8) as masks:
            for document in mask:
                masks.add_document(document)
    with IndexedDatasetWriter(prefix, dtype_for(vocab_size)) as corpus:
        for document in tokens:
            corpus.add_document(document)


def _facts(sizes: Recall, count: int, versions: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Keys [N, facts], different within a document, and values [versions, N, facts, values]."""
    keys = rng.random((count, sizes.key_ids)).argsort(1)[:, : sizes.facts]
    values = rng.integers(sizes.value_ids, size=(versions, count, sizes.facts, sizes.values))
    first_key = 2 + sizes.filler_ids
    return first_key + keys, first_key + sizes.key_ids + values


def _records(marker_NU: Tokens, key_NU: Tokens, values_NUV: Tokens) -> Tokens:
    return np.concatenate([marker_NU[..., None], key_NU[..., None], values_NUV], axis=2)


def _scatter(sizes: Recall, records_NUW: Tokens, marked_NU: Mask, rng: np.random.Generator) -> tuple[Tokens, Mask]:
    """Filler with the records, in their order, at random disjoint places; and the values of the marked ones.

    Raises ValueError when the records do not fit.
    """
    count, records, width = records_NUW.shape
    free = sizes.length - records * (width - 1)
    if free < records:
        raise ValueError(f"{records} records of {width} tokens do not fit into {sizes.length} tokens")
    starts_NU = np.sort(rng.random((count, free)).argsort(1)[:, :records], axis=1) + np.arange(records) * (width - 1)
    places_NUW = starts_NU[..., None] + np.arange(width)
    tokens_NT = 2 + rng.integers(sizes.filler_ids, size=(count, sizes.length))
    np.put_along_axis(tokens_NT, places_NUW.reshape(count, -1), records_NUW.reshape(count, -1), axis=1)
    marked_NT = np.zeros((count, sizes.length), dtype=bool)
    values_NUV = np.broadcast_to(marked_NU[..., None], (count, records, width - 2))
    np.put_along_axis(marked_NT, places_NUW[..., 2:].reshape(count, -1), values_NUV.reshape(count, -1), axis=1)
    return tokens_NT, marked_NT
