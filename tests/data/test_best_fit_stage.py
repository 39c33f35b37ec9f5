"""Best-fit training samples: no document that fits is split, none is read twice, padding is identified by position."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moba_train.config.data import SourceConfig
from moba_train.data.batch import collate
from moba_train.data.indexed import IndexedDataset
from moba_train.data.samples import Sample, StageData
from tests.data.corpora import MakeCorpus, numbered_documents

LENGTHS = [3, 20, 0, 8, 5, 1, 2, 7, 16, 4, 6, 9]


def stage(*paths: str, sequences: int = 60, starts: dict[str, int] | None = None, seq_len: int = 8) -> StageData:
    sources = [SourceConfig(path=path) for path in paths]
    return StageData(sources, seq_len, sequences, 1, starts or {}, 1000, "best_fit")


def documents_tokens(sample: Sample) -> list[int]:
    return sample.tokens[: len(sample.tokens) - sample.padding].tolist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any), seq_len=st.integers(1, 12))
def test_only_documents_longer_than_samples_are_split(
    make_corpus: MakeCorpus, lengths: list[int], seq_len: int
) -> None:
    """Every label is the document's next token, also where a long document continues in another sample."""
    path = make_corpus("a", numbered_documents(lengths))
    corpus = IndexedDataset(path)
    data = stage(path, seq_len=seq_len, sequences=20)
    for index in range(20):
        sample = data.sample(index)
        begin = 0
        for part, length in zip(sample.parts, sample.lengths, strict=False):
            document = corpus.document(part.document).tolist()
            assert length == min(seq_len, len(document) - part.start)
            assert part.start % seq_len == 0
            labels = document[part.start + 1 : part.stop + 1]
            assert sample.tokens[begin : begin + length].tolist() == document[part.start : part.stop]
            assert sample.labels[begin : begin + len(labels)].tolist() == labels
            goes_on = [1.0] * len(labels) + [0.0] * (length - len(labels))
            assert sample.loss_weight[begin : begin + length].tolist() == goes_on
            begin += length
        assert sample.padding == seq_len - begin
        assert not sample.tokens[begin:].any()
        assert not sample.loss_weight[begin:].any()


def test_an_epoch_holds_every_document_once(make_corpus: MakeCorpus) -> None:
    """81 tokens fit into 11 samples of 8 (the lengths allow no better), in another order each epoch."""
    path = make_corpus("a", numbered_documents(LENGTHS))
    data = stage(path)
    epochs = [[documents_tokens(data.sample(index)) for index in range(first, first + 11)] for first in (0, 11)]
    assert all(sorted(token for sample in epoch for token in sample) == list(range(1, 82)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_sample_depends_on_its_index_alone(make_corpus: MakeCorpus) -> None:
    paths = [make_corpus("a", numbered_documents(LENGTHS)), make_corpus("b", numbered_documents([5, 7, 2], 500))]
    read_in_order = stage(*paths)
    whole = [read_in_order.sample(index).tokens.tolist() for index in range(60)]
    for index in (59, 3, 30):
        assert stage(*paths).sample(index).tokens.tolist() == whole[index]


def test_the_next_stage_continues_after_the_documents_read(
    make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of two samples; four samples, then two longer ones: no token twice in an epoch."""
    monkeypatch.setattr("moba_train.data.packers.PACKING_GROUP", 2)
    path = make_corpus("a", numbered_documents(LENGTHS * 3))
    first = stage(path, sequences=4)
    seen = [token for index in range(4) for token in documents_tokens(first.sample(index))]
    starts = first.starts_after(4)
    (name,) = first.stream_names
    assert 0 < starts[name] < 140
    second = stage(path, sequences=2, seq_len=16, starts=starts)
    seen += [token for index in range(2) for token in documents_tokens(second.sample(index))]
    assert len(set(seen)) == len(seen)
    assert first.starts_after(0) == {name: 0}


def test_padding_carries_no_loss_and_an_eos_of_the_same_id_does(make_corpus: MakeCorpus) -> None:
    """Padding and the eos of this corpus both have id 0: only the eos carries loss, and nothing attends to padding."""
    data = stage(make_corpus("a", [[5, 6, 0], [7, 0], [8, 9, 9, 9, 9, 0]]), sequences=2)
    batch = collate([data.sample(0), data.sample(1)])
    assert batch.padding == 16 - 11
    assert batch.loss_tokens == 11 - 3
    assert batch.labels[batch.loss_index].tolist().count(0) == 3
    assert batch.layout.total == 16
    bounds = np.diff(batch.layout.cu_seqlens.numpy()).tolist()
    assert sorted(bounds) == [2, 3, 5, 6]  # 6 and 2 fill a sample, 3 is padded by 5
