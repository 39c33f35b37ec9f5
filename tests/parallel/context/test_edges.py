"""The rows before a rank's ranges are those of their owners, and gradients of them go back there."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moba_train.attention.protocol import packed_layout
from moba_train.parallel.context.engine import edges
from moba_train.parallel.context.layout import SequenceLayout


@st.composite
def situations(draw) -> tuple[SequenceLayout, int]:
    """Also ranges shorter than the rows before them, so that a token comes before two of a rank's ranges."""
    ranks = draw(st.integers(1, 6))
    sequence = SequenceLayout.split(
        draw(st.integers(ranks, 40)), ranks, draw(st.sampled_from(["contiguous", "zigzag"]))
    )
    return sequence, draw(st.integers(1, 12))


@given(situations())
def test_rows_before_each_range_arrive_and_their_gradients_return(situation):
    sequence, count = situation
    layout = packed_layout([sequence.total])
    x_TD = torch.randn(sequence.total, 2, dtype=torch.float64)
    before_TD = torch.cat([x_TD.new_zeros(count, 2), x_TD])
    found = [edges(layout, sequence, rank, count) for rank in range(sequence.ranks)]
    sent = torch.cat([each.to_send(sequence.shard(x_TD, rank)) for rank, each in enumerate(found)])
    for rank, each in enumerate(found):
        heads_rcD = each.heads(sent)
        assert len(heads_rcD) == len(sequence.ranges[rank])
        for head_cD, (start, _) in zip(heads_rcD, sequence.ranges[rank], strict=True):
            assert torch.equal(head_cD, before_TD[start : start + count])
        grad_rcD = torch.randn_like(heads_rcD)
        returned = each.heads_backward(grad_rcD, sequence.ranks)
        torch.testing.assert_close((returned * sent).sum(), (grad_rcD * heads_rcD).sum())
