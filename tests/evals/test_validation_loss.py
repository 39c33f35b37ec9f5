"""Validation loss: over all tokens, and of each sequence, whatever the passes and ranks it was computed in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.data import SourceConfig
from moba_train.config.parallel import CPLayout
from moba_train.data.batch import Batch
from moba_train.data.samples import StageData
from moba_train.evals.validation_loss import SequenceLosses, validation_loss
from moba_train.model.transformer import Transformer
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.data_shard import DataShard, shard_batch
from moba_train.parallel.world import World, joined_world

SEQ_LEN, SEQUENCES = 16, 5


class LossIsTheLabel(torch.nn.Module):
    """A model whose losses are known."""

    def token_losses(self, _tokens: Any, _positions: Any, _layout: Any, loss_tokens: Any) -> torch.Tensor:
        labels_n, _, _ = loss_tokens
        return torch.as_tensor(labels_n).float()


@dataclass(frozen=True)
class Shard(DataShard):
    """A rank's part of every micro-batch, without the other ranks."""

    ranks: int = 1
    rank: int = 0
    layout: CPLayout = "contiguous"

    def shard_batch(self, batch: Batch) -> Batch:
        sequence = SequenceLayout.split(batch.layout.total, self.ranks, self.layout)
        return shard_batch(batch, sequence, self.rank)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> StageData:
    """Sequences whose documents end inside them, so that they differ in their number of loss tokens."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in (7, 40, 1, 25, 19, 30):
            writer.add_document(np.arange(length) + length)
    return StageData([SourceConfig(path=str(prefix))], SEQ_LEN, SEQUENCES, 0, {}, 200)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined_world() as alone:
        yield alone


def known(data: StageData) -> SequenceLosses:
    samples = [data.sample(index) for index in range(SEQUENCES)]
    sums = np.array([float((sample.labels * sample.loss_weight).sum()) for sample in samples])
    return SequenceLosses(sums, np.array([float(sample.loss_weight.sum()) for sample in samples]))


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_every_sequence_has_its_loss_whatever_the_passes(data: StageData, world: World, micro_batch_size: int) -> None:
    model, want = cast(Transformer, LossIsTheLabel()), known(data)
    got = validation_loss(model, data, micro_batch_size, DataShard(), world.device)
    assert len(set(want.weights)) > 1
    assert got.sums == pytest.approx(want.sums)
    assert got.weights == pytest.approx(want.weights)
    assert got.mean == pytest.approx(want.sums.sum() / want.weights.sum())
    assert got.by_sequence == pytest.approx(want.sums / want.weights)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "contiguous"), (3, "zigzag")])
def test_ranks_that_share_sequences_add_up_to_one(data: StageData, world: World, ranks: int, layout: CPLayout) -> None:
    model, want = cast(Transformer, LossIsTheLabel()), known(data)
    shards = [Shard(ranks=ranks, rank=rank, layout=layout) for rank in range(ranks)]
    parts = [validation_loss(model, data, 2, shard, world.device) for shard in shards]
    assert sum(part.sums for part in parts) == pytest.approx(want.sums)
    assert sum(part.weights for part in parts) == pytest.approx(want.weights)


def test_data_parallel_ranks_take_each_sequence_once(data: StageData, world: World) -> None:
    """Five sequences, two at a time on two ranks: the second pass has one sequence and three of padding."""
    model, want = cast(Transformer, LossIsTheLabel()), known(data)
    shards = [DataShard(dp_rank=rank, dp_size=2) for rank in range(2)]
    parts = [validation_loss(model, data, 2, shard, world.device) for shard in shards]
    assert sum(part.sums for part in parts) == pytest.approx(want.sums)
    assert sum(part.weights for part in parts) == pytest.approx(want.weights)


def test_ranks_without_the_loss_and_sequences_without_it_do_not_count(data: StageData, world: World) -> None:
    model = cast(Transformer, LossIsTheLabel())
    assert not validation_loss(model, data, 2, DataShard(computes_loss=False), world.device).weights.any()
    losses = SequenceLosses(np.array([6.0, 0.0]), np.array([3.0, 0.0]))
    assert losses.mean == 2.0
    assert losses.by_sequence.tolist()[0] == 2.0
    assert np.isnan(losses.by_sequence[1])
