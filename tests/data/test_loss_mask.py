"""Loss masks in training: which tokens are predicted with loss, and with what weight."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.data import SourceConfig
from moba_train.data.batch import collate
from moba_train.data.loss_mask import LossNorm, mask_prefix
from moba_train.data.samples import Sample, StageData
from moba_train.data.sidecar import Fingerprint
from moba_train.errors import DataError

PADDING_ID = 0
DOCUMENTS = [([5, 6, 7, PADDING_ID], [0, 0, 1, 1]), ([8, 9, 5, 6, 7, 8, 9, 5, 6], [1, 0, 0, 1, 0, 0, 0, 1, 1])]
"""Tokens and masks. The first document ends its turn with the id of padding."""


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    name = str(tmp_path / "corpus")
    info = {"vocab_size": 10, "loss_mask": True}
    masks = IndexedDatasetWriter(mask_prefix(name), np.uint8)
    with IndexedDatasetWriter(name, np.uint16, info) as corpus, masks:
        for tokens, mask in DOCUMENTS:
            corpus.add_document(tokens)
            masks.add_document(mask)
    return name


def samples(prefix: str, seq_len: int, count: int, norm: LossNorm, packing: str = "best_fit") -> list[Sample]:
    data = StageData([SourceConfig(path=prefix)], seq_len, count, 0, {}, 10, packing, norm)  # type: ignore[arg-type]
    return [data.sample(index) for index in range(count)]


def predicted(sample: Sample) -> list[int]:
    """The labels that carry loss."""
    return sample.labels[sample.loss_weight > 0].tolist()


def test_masked_tokens_are_predicted_even_with_the_id_of_padding(prefix: str) -> None:
    (sample,) = samples(prefix, 16, 1, "token")
    assert sample.padding == 3
    by_document = {4: [7, PADDING_ID], 9: [6, 5, 6]}
    assert predicted(sample) == [token for length in sample.lengths[:2] for token in by_document[length]]
    batch = collate([sample])
    assert (batch.loss_tokens, batch.loss_weight_sum) == (5, 5.0)


def test_parts_are_found_among_the_documents_of_a_batch(prefix: str) -> None:
    """Two documents and padding, then one and padding, which is a document of its own and no part."""
    batch = collate(samples(prefix, 16, 2, "token"))
    assert batch.part_documents == [0, 1, 3]
    lengths = batch.layout.cu_seqlens.diff().tolist()
    assert [lengths[place] for place in batch.part_documents] == [part.stop - part.start for part in batch.parts]


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_by_sequence_every_conversation_counts_once_wherever_it_is_split(prefix: str, packing: str) -> None:
    """13 tokens in samples of 4, and chopped into 13 samples of 1."""
    seq_len, count = (4, 4) if packing == "best_fit" else (1, 13)
    batch = collate(samples(prefix, seq_len, count, "sequence", packing))
    assert batch.loss_tokens == 5
    assert batch.loss_weight_sum == pytest.approx(2)
    assert sorted(batch.loss_weight.tolist()) == pytest.approx([1 / 3] * 3 + [1 / 2] * 2)


def test_a_corpus_is_refused_without_the_mask_it_was_made_with(prefix: str) -> None:
    Path(f"{prefix}.loss.idx").unlink()
    with pytest.raises(DataError, match=r"corpus\.loss\.idx is missing"):
        samples(prefix, 16, 1, "token")


def test_a_mask_of_another_corpus_is_refused(prefix: str) -> None:
    with IndexedDatasetWriter(mask_prefix(prefix), np.uint8) as masks:
        masks.add_document([1, 1])
    with pytest.raises(DataError, match="other lengths"):
        samples(prefix, 16, 1, "token")


def test_a_mask_is_part_of_the_fingerprint(prefix: str) -> None:
    """Another mask, and none."""

    def fingerprint() -> Fingerprint:
        return StageData([SourceConfig(path=prefix)], 16, 1, 0, {}, 10).fingerprints[prefix]

    saved = fingerprint()
    assert saved.difference(saved) is None
    changed = bytearray(Path(f"{prefix}.loss.bin").read_bytes())
    changed[1] ^= 1
    Path(f"{prefix}.loss.bin").write_bytes(changed)
    assert fingerprint().difference(saved) == "another loss mask"
    Path(f"{prefix}.json").unlink()
    Path(f"{prefix}.loss.idx").unlink()
    assert fingerprint().difference(saved) == "a loss mask was added or removed"
    assert fingerprint().name == saved.name


def masked_corpus(prefix: Path, masks: list[list[int]], info: dict[str, Any] | None) -> str:
    """A corpus with these masks; `info`: of the masks' sidecar."""
    writer = IndexedDatasetWriter(mask_prefix(str(prefix)), np.uint8, info)
    with IndexedDatasetWriter(prefix, np.uint16) as corpus, writer:
        for mask in masks:
            corpus.add_document(np.arange(len(mask)))
            writer.add_document(mask)
    return str(prefix)


def check_loss(prefix: str, **lengths: int) -> None:
    StageData([SourceConfig(path=prefix, **lengths)], 4, 1, 0, {}, 10).check_loss()


@pytest.mark.parametrize("info", [{}, None], ids=["recorded", "searched"])
def test_masks_of_zeros_are_refused(tmp_path: Path, info: dict[str, Any] | None) -> None:
    with pytest.raises(DataError, match=r"no token of .*a carries loss"):
        check_loss(masked_corpus(tmp_path / "a", [[0, 0, 0], [0, 0]], info))


def test_loss_is_looked_for_in_the_documents_that_are_read(tmp_path: Path) -> None:
    """The first token of a document never carries loss: nothing precedes it."""
    prefix = masked_corpus(tmp_path / "a", [[0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0, 0]], {})
    check_loss(prefix)
    check_loss(prefix, min_length=5)
    with pytest.raises(DataError, match=r"no token of .*a\[0:5\] carries loss"):
        check_loss(prefix, below_length=5)


def test_documents_of_one_token_carry_no_loss(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as corpus:
        for _ in range(20):
            corpus.add_document([1])
    with pytest.raises(DataError, match="every document has a single token"):
        check_loss(str(tmp_path / "a"))


def test_by_sequence_documents_of_a_corpus_without_a_mask_count_once_too(tmp_path: Path) -> None:
    """Four predicted tokens of the first document, one of the second."""
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as corpus:
        corpus.add_document([1, 2, 3, 4, 5])
        corpus.add_document([6, 7])
    batch = collate(samples(str(tmp_path / "a"), 7, 1, "sequence", "concat"))
    assert sorted(batch.loss_weight.tolist()) == [1 / 4] * 4 + [1]
