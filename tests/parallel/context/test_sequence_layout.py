"""The layout of a sequence: every token on one rank, round trips, balance, and what sharding a batch needs."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moba_train.config.parallel import CPLayout
from moba_train.parallel.context.layout import SequenceLayout, sees
from tests.attention.helpers import ranges

LAYOUTS: tuple[CPLayout, ...] = ("contiguous", "zigzag")


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    ranks = draw(st.integers(1, 9))
    return SequenceLayout.split(draw(st.integers(ranks, 200)), ranks, draw(st.sampled_from(LAYOUTS)))


@given(layouts())
def test_every_token_is_on_one_rank_and_padding_is_at_the_end(sequence: SequenceLayout) -> None:
    held = [token for ranges in sequence.ranges for start, stop in ranges for token in range(start, stop)]
    assert sorted(held) == list(range(sequence.total))
    assert 0 <= sequence.ranks * sequence.rows - sequence.total < 2 * sequence.ranks
    tokens = torch.arange(sequence.total)
    for rank in range(sequence.ranks):
        shard = sequence.shard(tokens, rank, padding=-1)
        count = sequence.tokens(rank)
        assert shard.shape == (sequence.rows,)
        assert (shard[count:] == -1).all()
        assert (shard[:count].diff() > 0).all()
        assert all(sequence.owner(token) == rank for token in shard[:count].tolist())


@given(layouts())
def test_concatenated_shards_go_to_packed_order_and_back(sequence: SequenceLayout) -> None:
    x = torch.randn(sequence.total, 2, 3)
    y = torch.randn(sequence.total, 1, 3)
    shards = torch.cat([sequence.shard(x, rank) for rank in range(sequence.ranks)])
    assert torch.equal(sequence.to_packed(shards), x)
    assert torch.equal(sequence.to_shards(x), shards)
    assert torch.equal(sequence.to_shards(x, y)[:, 2:], sequence.to_shards(y))


@given(layouts(), st.data())
def test_groups_of_ranks_hold_what_their_ranks_hold(sequence: SequenceLayout, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([n for n in range(1, sequence.ranks + 1) if sequence.ranks % n == 0]))
    x = torch.randn(sequence.total)
    groups = sequence.merge_ranks(size)
    for group in range(groups.ranks):
        members = range(group * size, (group + 1) * size)
        alone = sequence.select_ranks(members)
        packed = alone.to_packed(torch.cat([sequence.shard(x, rank) for rank in members]))
        assert torch.equal(groups.shard(x, group)[: groups.tokens(group)], packed)
        assert alone.all_ranges == groups.ranges_of(group)


@given(layouts(), st.data())
def test_shards_of_any_ranks_are_copied_into_token_order(sequence: SequenceLayout, data: st.DataObject) -> None:
    members = data.draw(st.lists(st.integers(0, sequence.ranks - 1), min_size=1, unique=True))
    tokens = torch.arange(sequence.total)
    shards = [sequence.shard(tokens, rank, padding=-1) for rank in members]
    held = sorted(token for shard in shards for token in shard.tolist() if token >= 0)
    assume(held)
    some = sequence.select_ranks(members)
    assert some.copy_to_packed(shards).tolist() == some.to_packed(torch.cat(shards)).tolist() == held


@given(layouts())
def test_local_rows_find_tokens_in_the_shard(sequence: SequenceLayout) -> None:
    tokens = torch.arange(sequence.total)
    for rank in range(sequence.ranks):
        rows = sequence.local_rows(tokens, rank)
        mine = rows >= 0
        assert int(mine.sum()) == sequence.tokens(rank)
        assert torch.equal(sequence.shard(tokens, rank)[rows[mine]], tokens[mine])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zigzag_balances_work_that_grows_with_the_position(ranks: int) -> None:
    total = 16 * ranks
    work = torch.arange(1, total + 1).double()
    shares = {}
    for layout in LAYOUTS:
        sequence = SequenceLayout.split(total, ranks, layout)
        sums = torch.stack([sequence.shard(work, rank).sum() for rank in range(ranks)])
        shares[layout] = (sums.max() / sums.mean()).item()
    assert shares["zigzag"] == 1
    assert shares["contiguous"] > 1.4


@pytest.mark.parametrize(
    "sequence",
    [
        SequenceLayout.split(12, 3, "contiguous"),
        SequenceLayout.split(24, 4, "zigzag").merge_ranks(2).select_ranks(range(1, 2)),  # two ranges, in this order
    ],
)
def test_tensors_in_order_are_not_copied(sequence: SequenceLayout) -> None:
    x = torch.randn(12, 2)
    assert sequence.to_packed(x).data_ptr() == x.data_ptr()
    assert sequence.to_shards(x).data_ptr() == x.data_ptr()


def test_a_shard_sees_what_its_documents_held_before() -> None:
    edges = (0, 10, 10, 30)
    assert sees(ranges((0, 10)), ranges((0, 10)), edges)
    assert not sees(ranges((0, 10)), ranges((10, 20)), edges), "another document, and the future"
    assert not sees(ranges((10, 20)), ranges((0, 10)), edges), "another document"
    assert not sees(ranges((10, 20)), ranges((20, 30)), edges), "the future"
    assert sees(ranges((20, 30)), ranges((10, 20)), edges)
    assert sees(ranges((0, 5), (25, 30)), ranges((5, 12)), edges)
    assert not sees((), ranges((0, 10)), edges)
    assert not sees(ranges((0, 10)), (), edges)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_tokens_than_ranks_are_refused(layout: CPLayout) -> None:
    with pytest.raises(ValueError, match=r"parallel\.cp: 4 given for a sequence of 3 tokens"):
        SequenceLayout.split(3, 4, layout)
    with pytest.raises(ValueError, match=r"parallel\.cp_layout: 'striped' given"):
        SequenceLayout.split(8, 4, "striped")  # type: ignore[arg-type]  # the layout that is refused
