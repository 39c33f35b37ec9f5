"""Batches: equal sequences for every layout, packed so that every rank runs the same graph."""

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from moba_train.config.data import SourceConfig
from moba_train.data.batch import Batch, collate
from moba_train.data.loader import Prefetcher, step_batches
from moba_train.data.samples import StageData
from tests.checkpoint.test_threads import start_at_most
from tests.data.corpora import MakeCorpus, numbered_documents


@pytest.fixture
def data(make_corpus: MakeCorpus) -> StageData:
    source = SourceConfig(path=make_corpus("a", numbered_documents([5, 30, 0, 11, 3])))
    return StageData([source], seq_len=8, sequences=64, seed=0, starts={}, vocab_size=100)


def test_batch_is_the_samples_end_to_end(data: StageData) -> None:
    samples = [data.sample(0), data.sample(1)]
    batch = collate(samples)
    assert batch.tokens.tolist() == [int(token) for sample in samples for token in sample.tokens]
    lengths = samples[0].lengths + samples[1].lengths
    assert batch.layout.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert (batch.layout.total, batch.layout.max_seqlen) == (16, max(lengths))
    documents = batch.layout.q_documents
    assert torch.equal(batch.positions, batch.layout.positions(batch.layout.q_tokens, documents))
    labels = torch.cat([torch.from_numpy(sample.labels) for sample in samples])
    weight = torch.cat([torch.from_numpy(sample.loss_weight) for sample in samples])
    assert batch.loss_index.tolist() == weight.nonzero()[:, 0].tolist()
    assert torch.equal(batch.labels, labels)
    assert batch.loss_weight.tolist() == [1.0] * len(batch.loss_index)
    assert batch.loss_tokens == weight.sum().item()
    assert batch.parts == samples[0].parts + samples[1].parts
    assert {batch.tokens.dtype, batch.labels.dtype, batch.positions.dtype, batch.loss_index.dtype} == {torch.int64}


def test_batch_without_any_loss_still_has_a_row(data: StageData) -> None:
    sample = dataclasses.replace(data.sample(0), loss_weight=np.zeros(8, np.float32))
    batch = collate([sample])
    assert (batch.loss_index.tolist(), batch.loss_weight.tolist(), batch.loss_tokens) == ([0], [0.0], 0.0)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_step_reads_the_same_sequences_in_every_layout(data: StageData, dp_size: int, micro_batch_size: int) -> None:
    ranks = [step_batches(data, 16, 16, micro_batch_size, rank, dp_size) for rank in range(dp_size)]
    assert {len(batches) for batches in ranks} == {16 // (dp_size * micro_batch_size)}
    in_order = torch.cat([batch.tokens for batches in zip(*ranks, strict=True) for batch in batches])
    assert in_order.tolist() == [int(token) for index in range(16, 32) for token in data.sample(index).tokens]


def test_uneven_layouts_are_refused(data: StageData) -> None:
    with pytest.raises(ValueError, match=r"10 sequences per step .* 4 data-parallel ranks x micro_batch_size 1"):
        step_batches(data, 0, 10, 1, 0, 4)


def test_prefetcher_gives_every_step_from_the_first_one_asked_for(data: StageData) -> None:
    with Prefetcher(lambda step: step_batches(data, step * 4, 4, 2, 0, 1), 3, 9, "cpu") as batches:
        got = [[batch.tokens.tolist() for batch in step] for step in batches]
    assert got == [[b.tokens.tolist() for b in step_batches(data, step * 4, 4, 2, 0, 1)] for step in range(3, 9)]


def test_prefetcher_reads_when_asked_where_no_thread_can_be_started(
    data: StageData, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_at_most(0, monkeypatch)
    with Prefetcher(lambda step: step_batches(data, step * 4, 4, 2, 0, 1), 3, 9, "cpu") as batches:
        got = [[batch.tokens.tolist() for batch in step] for step in batches]
    assert got == [[b.tokens.tolist() for b in step_batches(data, step * 4, 4, 2, 0, 1)] for step in range(3, 9)]
    assert "can't start new thread: batches are prepared when they are needed" in caplog.text


def test_prefetcher_raises_what_reading_raised_at_its_step(data: StageData) -> None:
    def load(step: int) -> list[Batch]:
        if step == 2:
            raise OSError("disk on fire")
        return step_batches(data, step, 1, 1, 0, 1)

    with Prefetcher(load, 0, 5, "cpu") as batches:
        steps: Iterator[list[Batch]] = iter(batches)
        assert len(next(steps)) == len(next(steps)) == 1
        with pytest.raises(OSError, match="disk on fire"):
            next(steps)


def test_prefetcher_reads_two_steps_ahead_and_stops_when_left(data: StageData) -> None:
    loaded: list[int] = []
    third = threading.Event()

    def load(step: int) -> list[Batch]:
        loaded.append(step)
        if len(loaded) == 3:
            third.set()
        return step_batches(data, step % 64, 1, 1, 0, 1)

    with Prefetcher(load, 0, 10**6, "cpu") as batches:
        assert third.wait(10)
        next(batches)
    assert len(loaded) <= 6
    assert not any(thread.name == "data-prefetch" for thread in threading.enumerate())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_move_to_the_gpu_whole(data: StageData) -> None:
    batch = collate([data.sample(0)])
    moved = batch.to("cuda")
    for name in ("tokens", "labels", "positions", "loss_index", "loss_weight"):
        assert torch.equal(getattr(moved, name).cpu(), getattr(batch, name))
    assert moved.layout.cu_seqlens.is_cuda
