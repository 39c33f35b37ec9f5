"""Documents whose lengths are next to a sequence's or a shard's: every token is trained once, with its own label."""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from moba_train.config.data import SourceConfig
from moba_train.config.parallel import CPLayout
from moba_train.data.batch import collate
from moba_train.data.samples import StageData
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.data_shard import shard_batch
from tests.data.conftest import make_corpus as make_corpus  # a fixture
from tests.data.corpora import MakeCorpus, numbered_documents

SEQ_LEN = 32
Packing = Literal["concat", "best_fit"]


def trained(data: StageData, cp: int, layout: CPLayout) -> Iterator[tuple[int, int]]:
    """(token, label) of every prediction that carries loss, over all ranks and samples."""
    for index in range(data.sequences):
        batch = collate([data.sample(index)])
        sequence = SequenceLayout.split(batch.layout.total, cp, layout)
        for rank in range(cp):
            shard = shard_batch(batch, sequence, rank)
            labels_n, rows_n, weights_n = shard.loss_on
            kept = weights_n > 0
            yield from zip(shard.tokens[rows_n[kept]].tolist(), labels_n[kept].tolist(), strict=True)


def one_pass(corpus: str, tokens: int, packing: Packing) -> StageData:
    """The samples that hold a corpus once; best-fit may have left some of them emptier."""
    sequences = tokens // SEQ_LEN
    while True:
        data = StageData([SourceConfig(path=corpus)], SEQ_LEN, sequences, 0, {}, tokens + 1, packing)
        packed = [data.sample(index) for index in range(sequences)]
        if sum(len(sample.tokens) - sample.padding for sample in packed) >= tokens:
            return data
        sequences += 1


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_documents_next_to_the_length_of_a_pack_or_of_a_shard_lose_no_label(
    cp: int, layout: CPLayout, packing: Packing, make_corpus: MakeCorpus
) -> None:
    """Megatron-Bridge#4593: a document of the pack's length less one overflows, or its last label is cut.
    LlamaFactory#10108: with context parallelism, sub-sequences of a pack are not aligned with the shards."""
    parts = [SEQ_LEN // (2 * ranks) for ranks in (1, 2, 4)]
    lengths = [length + step for length in (SEQ_LEN, *parts) for step in (-1, 0, 1)]
    lengths.append(-sum(lengths) % SEQ_LEN)
    documents = numbered_documents(lengths)
    data = one_pass(make_corpus("edges", documents), sum(lengths), packing)
    wanted = [(int(token), int(token) + 1) for document in documents for token in document[:-1]]
    assert sorted(trained(data, cp, layout)) == sorted(wanted)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_long_documents_are_trained_to_their_last_token(packing: Packing, make_corpus: MakeCorpus) -> None:
    """unsloth#7206: a document of many sequences is truncated without a word; tokens in are tokens trained."""
    lengths = [10 * SEQ_LEN + 5, 3, 3 * SEQ_LEN - 1, 2 * SEQ_LEN - 7]
    data = one_pass(make_corpus("long", numbered_documents(lengths)), sum(lengths), packing)
    found = list(trained(data, 1, "contiguous"))
    print(f"tokens in: {sum(lengths)}; trained: {len(found)} and the first token of each of {len(lengths)} documents")
    assert len(found) == len({*found}) == sum(lengths) - len(lengths)


@pytest.mark.parametrize("length", [83_626, 83_621, 65_537, 10_007])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cp", range(2, 9))
def test_odd_and_prime_lengths_are_split_over_any_ranks(cp: int, layout: CPLayout, length: int) -> None:
    """bionemo-recipes#1268: a sequence of 83,626 tokens refuses to be split."""
    sequence = SequenceLayout.split(length, cp, layout)
    tokens_T = torch.arange(length)
    shards = [sequence.shard(tokens_T, rank, padding=-1) for rank in range(cp)]
    assert {len(shard) for shard in shards} == {sequence.rows}
    assert sequence.rows * cp - length < 2 * cp
    assert torch.equal(sequence.to_packed(torch.cat(shards)), tokens_T)
