"""The stream holds every document once per epoch, in an order that depends only on the seed and the corpus."""

import shutil
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moba_train.data.indexed import IndexedDataset
from moba_train.data.stream import DocumentStream
from tests.data.corpora import MakeCorpus, numbered_documents

LENGTHS = [3, 0, 5, 1, 0, 7, 2, 0]


def read(stream: DocumentStream, offset: int, length: int) -> list[int]:
    return [int(token) for part in stream.parts(offset, length) for token in stream.dataset.document(*part[1:])]


def test_each_epoch_is_another_permutation_of_all_documents(make_corpus: MakeCorpus) -> None:
    dataset = IndexedDataset(make_corpus("a", numbered_documents(LENGTHS)))
    stream = DocumentStream(dataset, seed=3)
    epochs = [read(stream, epoch * dataset.tokens, dataset.tokens) for epoch in range(6)]
    assert all(sorted(epoch) == list(range(1, dataset.tokens + 1)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3
    for part in stream.parts(0, 3 * dataset.tokens):
        assert (part.start, part.stop) == (0, dataset.document_lengths[part.document])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, 80), length=st.integers(0, 60))
def test_any_range_is_a_cut_of_the_whole_stream(make_corpus: MakeCorpus, offset: int, length: int) -> None:
    stream = DocumentStream(IndexedDataset(make_corpus("a", numbered_documents(LENGTHS))), seed=0)
    whole = read(stream, 0, 140)
    fresh = DocumentStream(stream.dataset, seed=0)
    assert read(fresh, offset, length) == whole[offset : offset + length]


def test_order_depends_on_seed_and_contents_not_on_the_path(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    prefix = make_corpus("a", numbered_documents([1] * 50))
    for suffix in (".bin", ".idx"):
        shutil.copy(prefix + suffix, tmp_path / f"moved{suffix}")
    orders = [
        read(DocumentStream(IndexedDataset(path), seed), 0, 50)
        for path, seed in [(prefix, 1), (str(tmp_path / "moved"), 1), (prefix, 2)]
    ]
    assert orders[0] == orders[1] != orders[2]
    first, second = (read(DocumentStream(IndexedDataset(prefix), seed, below_length=9), 0, 50) for seed in (1, 2))
    assert first != second, "the order of a range of lengths depends on the seed as well"


def test_the_order_never_changes_between_versions(make_corpus: MakeCorpus) -> None:
    """A run that resumes with another version of numpy or of this package must see the same tokens."""
    stream = DocumentStream(IndexedDataset(make_corpus("a", numbered_documents([1] * 8))), seed=7)
    assert read(stream, 0, 16) == [6, 4, 3, 7, 8, 1, 5, 2, 8, 4, 1, 3, 6, 7, 2, 5]
