"""Loss by position in the context: which tokens, and which numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.attention.layout import packed_layout
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.data import SourceConfig
from moba_train.config.evaluation import PositionWiseConfig
from moba_train.config.model import ModelConfig
from moba_train.config.parallel import CPLayout
from moba_train.config.schema import RunConfig
from moba_train.data.batch import Batch
from moba_train.data.indexed import IndexedDataset
from moba_train.data.long_documents import LongDocumentSamples, count_samples
from moba_train.errors import DataError
from moba_train.evals.evaluation import EvaluationSetting
from moba_train.evals.position_wise import PositionWise, PositionWiseLoss, position_wise_loss, summarize
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.data_shard import DataShard, shard_batch
from moba_train.parallel.world import World, joined_world
from tests.evals.setting import stage_setting

SEQ_LEN, VOCAB = 16, 200
LENGTHS = [16, 5, 17, 40, 0, 33, 15]
"""The third of these documents gives one sample, the fourth and sixth give two; the first lacks one label."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[SourceConfig]:
    """A corpus whose tokens count on from 0 over all documents."""
    prefix, first = tmp_path_factory.mktemp("corpus") / "long", 0
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in LENGTHS:
            writer.add_document(np.arange(first, first + length))
            first += length
    return [SourceConfig(path=str(prefix))]


def test_only_documents_that_are_long_enough_give_samples(sources: list[SourceConfig]) -> None:
    found = LongDocumentSamples(sources, SEQ_LEN, 100, 0, VOCAB)
    places = sorted((s.parts[0].document, s.parts[0].start) for s in map(found.sample, range(len(found))))
    assert places == [(2, 0), (3, 0), (3, 16), (5, 0), (5, 16)]
    for sample in map(found.sample, range(len(found))):
        assert sample.lengths == [SEQ_LEN]
        assert (sample.labels == sample.tokens + 1).all()
        assert (sample.loss_weight == 1).all()


def test_a_source_with_a_range_of_lengths_gives_documents_of_that_range_only(sources: list[SourceConfig]) -> None:
    def documents(**limits: int) -> list[int]:
        ranged = [source.model_copy(update=limits) for source in sources]
        found = LongDocumentSamples(ranged, SEQ_LEN, 100, 0, VOCAB)
        assert count_samples(ranged, SEQ_LEN) == len(found)
        return sorted(found.sample(index).parts[0].document for index in range(len(found)))

    assert documents(min_length=40) == [3, 3]
    assert documents(below_length=40) == [2, 5, 5]
    assert documents(min_length=18, below_length=34) == [5, 5]
    assert documents(min_length=100) == []
    twice = [
        source.model_copy(update=update) for source in sources for update in ({"below_length": 18}, {"min_length": 40})
    ]
    assert count_samples(twice, SEQ_LEN) == 3


def test_a_range_of_lengths_is_that_of_its_own_corpus(sources: list[SourceConfig], tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "other", np.uint16) as writer:
        for length in (17, 40):
            writer.add_document(np.arange(length))
    other = SourceConfig(path=str(tmp_path / "other"), below_length=18)
    longest = sources[0].model_copy(update={"min_length": 40})
    assert count_samples([longest, other], SEQ_LEN) == 2 + 1


def test_samples_are_the_same_every_time_and_fewer_are_some_of_them(sources: list[SourceConfig]) -> None:
    def first_tokens(count: int) -> list[int]:
        found = LongDocumentSamples(sources, SEQ_LEN, count, 3, VOCAB)
        return [int(found.sample(index).tokens[0]) for index in range(len(found))]

    assert first_tokens(5) == first_tokens(5)
    assert first_tokens(2) == first_tokens(5)[:2]
    assert len(LongDocumentSamples(sources, 64, 5, 3, VOCAB)) == 0
    assert [count_samples(sources, length) for length in (SEQ_LEN, 64)] == [5, 0]


def test_a_token_outside_the_vocabulary_is_named(sources: list[SourceConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the corpus is opened, and in a sample if the token is not among those that are looked at then."""
    with pytest.raises(DataError, match=r"document 2 has token id 30 at offset 9.*model.vocab_size is 30"):
        LongDocumentSamples(sources, SEQ_LEN, 5, 0, 30)
    monkeypatch.setattr(IndexedDataset, "check_vocabulary", lambda _corpus, _vocab_size: None)
    found = LongDocumentSamples(sources, SEQ_LEN, 5, 0, 30)
    with pytest.raises(DataError, match=r"document [35] has token ids .*model.vocab_size is 30"):
        [found.sample(index) for index in range(5)]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with joined_world() as alone:
        yield alone


@pytest.mark.parametrize("kind", ["full", "moba"])
def test_losses_are_those_of_the_logits_bucket_by_bucket(sources: list[SourceConfig], world: World, kind: str) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 2, "kv_heads": 1}
    model = Transformer(ModelConfig.model_validate(shape)).to(world.device)
    initialize_weights(model, 0)
    attention = AttentionConfig.model_validate({"default": kind, "moba": {"block_size": 4, "topk": 2}})
    model.set_attention(build_attention(resolve_layers(attention, 2), 16))
    found = LongDocumentSamples(sources, SEQ_LEN, 3, 0, VOCAB)
    got = position_wise_loss(model, found, 4, DataShard(), world.device)
    for index in range(3):
        sample = found.sample(index)
        tokens = torch.from_numpy(sample.tokens).to(world.device)
        positions = torch.arange(SEQ_LEN, device=world.device)
        logits = model(tokens, positions, packed_layout([SEQ_LEN], world.device))
        losses = F.cross_entropy(logits.double(), torch.from_numpy(sample.labels).to(world.device), reduction="none")
        assert got.losses[index] == pytest.approx(losses.view(4, 4).mean(1).tolist(), rel=1e-5)


def test_means_and_errors_take_sequences_as_the_sample() -> None:
    moba = PositionWiseLoss(8, np.array([[3.0, 2.0], [5.0, 2.5], [4.0, 1.5]]))
    full = PositionWiseLoss(8, moba.losses - np.array([[0.0, 0.25]]))
    assert moba.mean.tolist() == [4.0, 2.0]
    assert moba.standard_error == pytest.approx([1 / 3**0.5, 0.5 / 3**0.5])
    result = summarize({"moba": moba, "full": full}, "moba")
    assert result.numbers["trailing_loss"] == 2.0
    assert result.numbers["trailing_loss_full"] == 1.75
    assert result.numbers["trailing_gap"] == 0.25
    assert result.numbers["trailing_gap_error"] == 0  # of pairs: the sequences differ, the gap does not
    assert "+0.2500 +- 0.0000" in result.message
    assert [line[:20].rstrip() for line in result.table[:3]] == ["tokens", "0 to 8", "8 to 16"]
    assert result.data["curves"]["full"]["mean"] == [4.0, 1.75]
    assert result.data["curves"]["full"]["trailing_by_sequence"] == [1.75, 2.25, 1.25]
    assert PositionWiseLoss(8, moba.losses[:1]).to_json()["standard_error"] == [None, None]


def test_a_corpus_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        LongDocumentSamples([SourceConfig(path=str(tmp_path / "nowhere"))], SEQ_LEN, 2, 0, VOCAB)


class LossIsTheLabel(torch.nn.Module):
    """A model whose losses are known."""

    def token_losses(self, _tokens: Any, _positions: Any, _layout: Any, loss_tokens: Any) -> torch.Tensor:
        return torch.as_tensor(loss_tokens[0]).float()


@dataclass(frozen=True)
class Shard(DataShard):
    """A rank's part of every sequence, without the other ranks."""

    sequence: SequenceLayout | None = None
    rank: int = 0

    def shard_batch(self, batch: Batch) -> Batch:
        assert self.sequence is not None
        return shard_batch(batch, self.sequence, self.rank)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "contiguous"), (3, "zigzag"), (16, "zigzag")])
def test_ranks_that_share_sequences_add_up_to_one(
    sources: list[SourceConfig], world: World, ranks: int, kind: CPLayout
) -> None:
    """Every token counts once, in its own bucket, also where shards have padding, or hold nothing but padding."""

    model, found = cast(Transformer, LossIsTheLabel()), LongDocumentSamples(sources, SEQ_LEN, 2, 0, VOCAB)
    whole = position_wise_loss(model, found, 4, DataShard(), world.device)
    sequence = SequenceLayout.split(SEQ_LEN, ranks, kind)
    shards = [Shard(sequence=sequence, rank=rank) for rank in range(ranks)]
    parts = [position_wise_loss(model, found, 4, shard, world.device).losses for shard in shards]
    assert whole.losses[0] == pytest.approx(found.sample(0).labels.reshape(4, 4).mean(1))
    assert np.allclose(sum(parts), whole.losses)


def test_data_parallel_ranks_take_each_sample_once(sources: list[SourceConfig], world: World) -> None:
    """Five samples on three ranks: in the second pass one rank repeats a sample, which does not count."""
    model, found = cast(Transformer, LossIsTheLabel()), LongDocumentSamples(sources, SEQ_LEN, 5, 0, VOCAB)
    shards = [DataShard(dp_rank=rank, dp_size=3) for rank in range(3)]
    parts = [position_wise_loss(model, found, 4, shard, world.device).losses for shard in shards]
    wanted = [found.sample(index).labels.reshape(4, 4).mean(1) for index in range(5)]
    assert np.allclose(sum(parts), wanted)


@pytest.mark.parametrize(("seq_len", "bucket"), [(131072, 2048), (8192, 2048), (2048, 512), (96, 16), (16, 4)])
def test_without_a_bucket_there_are_at_least_four(sources: list[SourceConfig], seq_len: int, bucket: int) -> None:
    assert PositionWise.default_options(setting(sources, seq_len)).bucket == bucket


def test_two_samples_are_enough_for_an_error(sources: list[SourceConfig]) -> None:
    two, one = ([source.model_copy(update={"min_length": length}) for source in sources] for length in (40, 41))
    options = PositionWiseConfig()
    assert list(PositionWise.data_problems(options, setting(two, SEQ_LEN))) == []
    assert len(list(PositionWise.data_problems(options, setting(one, SEQ_LEN)))) == 1
    assert len(list(PositionWise.data_problems(options, setting(sources, 33)))) == 1, "a single one"


def setting(sources: list[SourceConfig], seq_len: int) -> EvaluationSetting:
    shape = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "layers": 1, "heads": 2, "kv_heads": 1}
    content = {
        "name": "a",
        "run_dir": "a",
        "model": shape,
        "attention": {"default": "full"},
        "data": {"train": sources, "validation": sources},
        "batch_tokens": seq_len,
        "stages": [{"name": "only", "seq_len": seq_len, "tokens": seq_len}],
    }
    return stage_setting(RunConfig.model_validate(content))
