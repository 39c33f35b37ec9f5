"""Which strategies take the transport `dispatch`, and what it costs."""

from dataclasses import replace

import pytest

from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import AttentionFacts
from moba_train.parallel.context.policy import choose_strategy, predict_cost, transport_spec
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from tests.parallel.context.test_cp_checks import FULL, MOBA, SHAPE
from tests.parallel.context.test_cp_costs import LLAMA_8B, costs_in_mib, selecting
from tests.parallel.context.test_cp_policy import auto


def test_auto_never_takes_dispatch_and_says_why() -> None:
    """Here it would receive nothing at all: no query selects a block before its own."""
    own = MobaAttention(MobaAttention.Options(topk=1), 128)
    strategy, why = auto(AttentionShape(2**17, heads=28, kv_heads=4, head_dim=128, attentions=(own,)), ranks=8)
    assert strategy.transport == "allgather"
    assert "dispatch: only if it is named: the owner of blocks" in why


def test_dispatch_needs_an_attention_that_selects_units() -> None:
    dispatch = CPStrategy(4, "dispatch", "zigzag", 4)
    with pytest.raises(ValueError, match=r"parallel\.cp_transport: 'dispatch' sends queries to the owners"):
        transport_spec("dispatch").check_shape(dispatch, replace(SHAPE, attentions=(MOBA, FULL)))
    transport_spec("dispatch").check_shape(dispatch, replace(SHAPE, attentions=(MOBA,)))
    ring = CPStrategy(4, "ring", "zigzag", 4)
    transport_spec("ring").check_shape(ring, replace(SHAPE, attentions=(FULL,)))


def test_dispatch_sends_a_query_at_most_once_to_each_rank() -> None:
    """Three ranks of four are others; a query of a rank's 256 MiB that selects one unit reaches them three times out of
    four, and with very many units all three of them."""
    dispatch = CPStrategy(4, "dispatch", "zigzag", 4)
    received = [predict_cost(dispatch, selecting(n)).node_bytes for n in (0, 1, 99)]
    mib = 2**20
    ids = [4 * (2 * n + 2) * 2**15 * 32 for n in (0, 1, 99)]  # selected units, in both passes, and the log-sum-exp
    assert received[0] == 0
    assert received[1] == pytest.approx(0.75 * (6 * 256 * mib + ids[1]))
    assert received[2] == pytest.approx(3 * (6 * 256 * mib + ids[2]))


def test_bytes_copies_and_buffers_of_a_known_case_in_mib() -> None:
    """Sizes of a rank as in `test_cp_costs.py`: 256 MiB of queries, 128 MiB of keys and values."""
    want = [1164 / 3, 2 * 1164 / 3, 18 * 256, 8 * 256 / 8 + 2 * 256 + 2 * 128, 1]
    assert costs_in_mib(CPStrategy(4, "dispatch", "zigzag", 2)) == pytest.approx(want)


def test_shards_are_zigzag_also_where_work_does_not_grow() -> None:
    shape = replace(LLAMA_8B, facts=AttentionFacts(work_grows=False))
    strategy, _ = choose_strategy("dispatch", "auto", shape, ranks=4, node_size=4)
    assert strategy.layout == "zigzag"
