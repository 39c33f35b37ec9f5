"""Samples: tokens, labels and their origin; no token is lost or read twice."""

import multiprocessing
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moba_train.config.data import SourceConfig
from moba_train.data.indexed import HEADER, MAGIC, IndexedDataset
from moba_train.data.samples import StageData
from moba_train.errors import DataError
from tests.data.corpora import MakeCorpus, numbered_documents


def stage(*paths: str, weights: tuple[float, ...] = (), **changes: Any) -> StageData:
    settings_: dict[str, Any] = {"seq_len": 8, "sequences": 100, "seed": 1, "starts": {}, "vocab_size": 1000} | changes
    weights = weights or (1.0,) * len(paths)
    sources = [SourceConfig(path=path, weight=weight) for path, weight in zip(paths, weights, strict=True)]
    return StageData(sources, **settings_)


def test_labels_follow_the_document_and_stop_at_its_end(make_corpus: MakeCorpus) -> None:
    """One document of 10 tokens, sample length 8: the second sample begins with its rest."""
    path = make_corpus("a", numbered_documents([10]))
    first = stage(path, sequences=1).sample(0)
    second = stage(path, sequences=1, starts={stage(path).stream_names[0]: 8}).sample(0)
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert first.labels.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert first.loss_weight.tolist() == [1.0] * 8
    assert second.tokens.tolist() == [9, 10, 1, 2, 3, 4, 5, 6]
    assert second.labels.tolist() == [10, 0, 2, 3, 4, 5, 6, 7]
    assert second.loss_weight.tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    assert second.lengths == [2, 6]
    assert [(part.document, part.start, part.stop) for part in second.parts] == [(0, 8, 10), (0, 0, 6)]
    assert (first.tokens.dtype, first.labels.dtype, first.loss_weight.dtype) == (np.int64, np.int64, np.float32)


def test_document_ending_with_the_sample_has_no_label_there(make_corpus: MakeCorpus) -> None:
    sample = stage(make_corpus("a", numbered_documents([8]))).sample(0)
    assert sample.labels.tolist() == [2, 3, 4, 5, 6, 7, 8, 0]
    assert sample.loss_weight.tolist() == [1] * 7 + [0]
    assert sample.lengths == [8]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any), index=st.integers(0, 99))
def test_every_label_is_the_documents_next_token(make_corpus: MakeCorpus, lengths: list[int], index: int) -> None:
    path = make_corpus("a", numbered_documents(lengths))
    corpus = IndexedDataset(path)
    sample = stage(path).sample(index)
    assert sum(sample.lengths) == len(sample.tokens) == 8
    begin = 0
    for length, part in zip(sample.lengths, sample.parts, strict=True):
        document = corpus.document(part.document)
        for place in range(length):
            at = part.start + place
            assert sample.tokens[begin + place] == document[at]
            goes_on = at + 1 < len(document)
            assert sample.loss_weight[begin + place] == goes_on
            assert sample.labels[begin + place] == (document[at + 1] if goes_on else 0)
        begin += length


def test_a_sample_depends_on_its_index_alone(make_corpus: MakeCorpus) -> None:
    paths = [make_corpus("a", numbered_documents([5, 9, 3])), make_corpus("b", numbered_documents([7, 20], 100))]
    ordered = stage(*paths, weights=(3, 1))
    for index in (70, 3, 70, 0):
        fresh = stage(*paths, weights=(3, 1))
        assert fresh.sample(index).tokens.tolist() == ordered.sample(index).tokens.tolist()
    with pytest.raises(IndexError):
        ordered.sample(100)


def test_consecutive_stages_read_each_token_once(make_corpus: MakeCorpus) -> None:
    """Three stages of different lengths and blends, together one epoch of each corpus: 160 and 96 tokens."""
    lengths_a, lengths_b = [37, 50, 3, 70], [96]
    a, b = make_corpus("a", numbered_documents(lengths_a)), make_corpus("b", numbered_documents(lengths_b, 500))
    seen: list[int] = []
    starts: dict[str, int] = {}
    for paths, seq_len, sequences in [((a, b), 8, 16), ((a,), 32, 1), ((a, b), 16, 4)]:
        data = stage(*paths, seq_len=seq_len, sequences=sequences, starts=starts)
        seen += [int(token) for index in range(sequences) for token in data.sample(index).tokens]
        starts = data.starts_after(sequences)
    assert starts == dict(zip(stage(a, b).stream_names, (128, 96), strict=True))
    final = stage(a, seq_len=32, sequences=1, starts=starts)
    seen += final.sample(0).tokens.tolist()
    assert sorted(seen) == list(range(1, 161)) + list(range(500, 596))


def test_samples_are_shuffled_in_groups(make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long document does not fill whole batches; ten samples in groups of four: 4, 4 and 2."""
    monkeypatch.setattr("moba_train.data.packers.SHUFFLE_GROUP", 4)
    data = stage(make_corpus("a", numbered_documents([81])), sequences=10)
    order = [int(data.sample(index).tokens[0] - 1) // 8 for index in range(10)]
    assert order != list(range(10))
    assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_stage_stopped_early_reads_nothing_twice(make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 6 of 10 samples, in the middle of the second group of 4, the next stage continues after that group."""
    monkeypatch.setattr("moba_train.data.packers.SHUFFLE_GROUP", 4)
    path = make_corpus("a", numbered_documents([81]))
    stopped = stage(path, sequences=10)
    (name,) = stopped.stream_names
    assert stopped.starts_after(6) == {name: 64}
    assert stopped.starts_after(10) == {name: 80}


def test_blend_is_by_tokens_whatever_the_document_lengths(make_corpus: MakeCorpus) -> None:
    short, long = make_corpus("a", numbered_documents([2] * 50)), make_corpus("b", numbered_documents([300], 500))
    data = stage(short, long, weights=(3, 1))
    tokens = np.concatenate([data.sample(index).tokens for index in range(100)])
    assert (tokens < 500).mean() == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("bad", [1000, -1])
def test_out_of_vocabulary_tokens_are_named(make_corpus: MakeCorpus, bad: int) -> None:
    path = make_corpus("a", [np.arange(20), np.array([5, bad, 6])])
    with pytest.raises(DataError) as error:
        stage(path)
    for part in (path, "document 1", f"token id {bad}", "offset 1", "model.vocab_size is 1000"):
        assert part in str(error.value)


UNSAMPLED = 5000
"""A token of `long_document` between two sampled blocks."""


def long_document(**changes: int) -> np.ndarray:
    """600,000 tokens, 2.4 MB: more than nine times what is sampled."""
    tokens = np.full(600_000, 7)
    tokens[UNSAMPLED] = changes.get("bad", 7)
    return tokens


@pytest.mark.parametrize("bad", [1000, -1])
def test_a_recorded_id_is_found_when_the_corpus_is_opened_and_any_other_before_it_is_used(
    make_corpus: MakeCorpus, bad: int
) -> None:
    """The sidecar of our own corpora has the smallest and the largest id. Without it, the sample that holds the token
    is refused, also where the token is only a label."""
    made = make_corpus("made", [long_document(bad=bad)], info={})
    with pytest.raises(DataError, match=f"document 0 has token id {bad} at offset {UNSAMPLED}"):
        stage(made)
    foreign = make_corpus("foreign", [long_document(bad=bad)])
    data = stage(foreign, seq_len=100, sequences=100)
    for index in range(100):
        places = range(data._parts(index)[1][0].start, data._parts(index)[1][0].stop + 1)
        if UNSAMPLED in places:
            with pytest.raises(DataError, match=f"document 0 has token id {bad} at offset {UNSAMPLED}"):
                data.sample(index)
        else:
            data.sample(index)


def test_bytes_between_documents_are_no_tokens(tmp_path: Path) -> None:
    """A corpus made elsewhere may have a gap in its tokens; what lies there is not read, and need not be an id."""
    prefix = tmp_path / "gapped"
    Path(f"{prefix}.bin").write_bytes(struct.pack("<4i", 1, 99, 3, 4))
    tables = struct.pack("<2i2q3q", 1, 2, 0, 8, 0, 1, 2)
    Path(f"{prefix}.idx").write_bytes(HEADER.pack(MAGIC, 1, 4, 2, 3) + tables)
    assert sorted(stage(str(prefix), seq_len=3, vocab_size=5).sample(0).tokens.tolist()) == [1, 3, 4]


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_truncated_while_it_is_read_ends_in_an_error(make_corpus: MakeCorpus, suffix: str) -> None:
    """A process that reads a truncated memory map is killed by SIGBUS, so the reader is a process of its own."""
    path = make_corpus("a", numbered_documents([900] * 100, 0))

    def read() -> None:
        data = stage(path, vocab_size=100_000)
        os.truncate(f"{path}.{suffix}", 0)
        try:
            for index in range(100):
                data.sample(index)
        except DataError as error:
            os._exit(0 if f"{path}.{suffix} has 0 bytes, but had" in str(error) else 3)
        os._exit(4)

    reader = multiprocessing.get_context("fork").Process(target=read)
    reader.start()
    reader.join()
    assert reader.exitcode == 0


def test_a_corpus_smaller_than_a_batch_is_named_with_its_repeats(make_corpus: MakeCorpus) -> None:
    small, large = make_corpus("small", numbered_documents([40])), make_corpus("large", numbered_documents([300], 50))
    data = stage(small, large, sequences=100)
    assert data.warnings(batch_tokens=40) == []
    (text,) = data.warnings(batch_tokens=41)
    assert text.startswith(f"corpus {small} has 40 tokens, fewer than a batch (41)")
    assert text.endswith("about 10.0 times")
    short = make_corpus("short", numbered_documents([6]))
    packed = stage(short, sequences=20, packing="best_fit")  # one document and 2 tokens of padding in a sample
    (text,) = packed.warnings(batch_tokens=41)
    assert text.endswith("about 20.0 times")


def test_unusable_corpora_are_refused_at_once(make_corpus: MakeCorpus) -> None:
    with pytest.raises(DataError, match="has no tokens"):
        stage(make_corpus("empty", [[], []]))
    with pytest.raises(DataError, match=r"vocabulary of 2000, but model.vocab_size is 1000"):
        stage(make_corpus("big", [[1]], info={"vocab_size": 2000}))
    path = make_corpus("a", [[1]])
    with pytest.raises(DataError, match="named twice"):
        stage(path, path)


def test_copies_are_read_independently_and_each_goes_on_where_it_was(make_corpus: MakeCorpus) -> None:
    """Streams are named by content, so a copy elsewhere goes on where the original was; of two copies in one blend,
    each has a position of its own."""
    first, second = (make_corpus(name, numbered_documents([200])) for name in ("first", "second"))
    starts = stage(first, second, weights=(3, 1), sequences=4).starts_after(4)
    assert list(starts.values()) == [24, 8]
    assert stage(second, sequences=1, starts=starts).starts_after(1) == starts | {stage(first).stream_names[0]: 32}
