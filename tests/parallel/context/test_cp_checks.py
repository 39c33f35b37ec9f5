"""Strategies that are impossible are refused with the key to change."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moba_train.attention.full import FullAttention
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import AttentionFacts
from moba_train.parallel.context.engine import context_engine
from moba_train.parallel.context.policy import check_sizes, transport_spec
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy

SHAPE = AttentionShape(tokens=64, heads=4, kv_heads=4, head_dim=16)
MOBA = MobaAttention(MobaAttention.Options(), 16)
FULL = FullAttention(FullAttention.Options(), 16)


def check(strategy: CPStrategy, heads: int, kv_heads: int, **facts: Any) -> None:
    transport_spec(strategy.transport).check_attention(strategy, heads, kv_heads, AttentionFacts(**facts))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (CPStrategy(4, "magic", "zigzag", 4), r"parallel.cp_transport: given 'magic', .*allowed: auto, allgather"),
        (CPStrategy(0, "ring", "zigzag", 1), r"parallel.cp: 0 given"),
        (CPStrategy(4, "hierarchical", "zigzag", 4), r"parallel.cp_transport: 'hierarchical' needs several nodes"),
        (CPStrategy(4, "hierarchical", "zigzag", 3), r"parallel.cp is 4, with 3 in a node"),
        (CPStrategy(4, "hierarchical", "zigzag", 1), r"with 1 in a node"),
    ],
)
def test_impossible_sizes_are_refused(strategy: CPStrategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sizes(strategy)


def test_an_engine_is_not_made_for_such_a_strategy_nor_for_another_number_of_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    world = dist.group.WORLD
    assert world is not None
    try:
        for strategy, message in (
            (CPStrategy(2, "ring", "zigzag", 2), r"parallel.cp: 2 given, the group has 4 ranks"),
            (CPStrategy(8, "ring", "zigzag", 8), r"parallel.cp: 8 given, the group has 4 ranks"),
        ):
            with pytest.raises(ValueError, match=message):
                context_engine(strategy, world, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "couples", "message"),
    [
        (6, 6, False, "cannot share 6 query heads among 4 ranks"),
        (12, 6, False, "cannot share 6 key/value heads among 4 ranks"),
        (8, 2, True, "would split the query heads of 2 key/value heads among 4 ranks"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(heads: int, kv_heads: int, couples: bool, message: str) -> None:
    with pytest.raises(ValueError, match=rf"parallel\.cp_transport: 'ulysses' {message}"):
        check(CPStrategy(4, "ulysses", "contiguous", 4), heads, kv_heads, couples_heads=couples)
    check(CPStrategy(4, "ring", "zigzag", 4), heads, kv_heads, couples_heads=couples)


@pytest.mark.parametrize("parts", [CPStrategy(4, "ring", "zigzag", 4, 2), CPStrategy(4, "ring", "zigzag", 2)], ids=str)
def test_a_ring_over_parts_of_the_keys_needs_results_that_merge(parts: CPStrategy) -> None:
    with pytest.raises(ValueError, match=r"cp_transport: 'ring' attends .* spans several nodes"):
        check(parts, 4, 4, merges=False)
    check(parts, 4, 4, merges=True)
    check(CPStrategy(4, "ring", "zigzag", 4), 4, 4, merges=False)
