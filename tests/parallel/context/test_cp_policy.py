"""What `auto` takes and what it says about it."""

from dataclasses import replace
from typing import Any

import pytest

from moba_train.attention.protocol import AttentionFacts
from moba_train.parallel.context.policy import choose_strategy, predict_cost
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy

LLAMA_8B = AttentionShape(tokens=2**17, heads=32, kv_heads=8, head_dim=128)


def auto(
    shape: AttentionShape = LLAMA_8B, ranks: int = 4, node_size: int | None = None, **limits: Any
) -> tuple[CPStrategy, str]:
    return choose_strategy("auto", "auto", shape, ranks=ranks, node_size=node_size or ranks, **limits)


def test_inside_a_node_ranks_exchange_tokens_for_whole_heads() -> None:
    assert auto(ranks=2)[0].transport == "allgather"  # of two ranks, each has half of all keys already
    assert auto(ranks=8)[0].transport == "ulysses"
    exchanged = predict_cost(CPStrategy(4, "ulysses", "contiguous", 4), LLAMA_8B)
    gathered = predict_cost(CPStrategy(4, "allgather", "zigzag", 4), LLAMA_8B)
    assert gathered.seconds() < exchanged.seconds()  # and still, as training is faster with smaller buffers
    assert auto(ranks=4)[0].transport == "ulysses"


def test_where_heads_would_be_repeated_keys_and_values_are_gathered() -> None:
    assert auto(AttentionShape(2**17, heads=32, kv_heads=2, head_dim=128), ranks=4)[0].transport == "allgather"


def test_across_nodes_the_exchange_stays_inside() -> None:
    assert auto(ranks=16, node_size=8)[0].transport == "hierarchical"


def test_what_cannot_be_shared_is_not_taken() -> None:
    strategy, why = auto(AttentionShape(2**17, heads=28, kv_heads=4, head_dim=128), ranks=8)
    assert strategy.transport == "allgather"
    assert "cannot share 28 query heads among 8 ranks" in why


def test_where_nothing_fits_the_least_memory_is_taken() -> None:
    """Two buffers of a ring take what a few ranks' keys do, a slice of all keys grows with the ranks."""
    strategy, why = auto(ranks=8, memory_bytes=1000)
    assert (strategy.transport, strategy.ring_depth) == ("ring", 2)
    assert "auto takes ring over 8 ranks, zigzag, 1 of 8 chunks in an attention call" in why
    assert why.count("does not fit in 0 MiB") == 3
    strategy, _ = auto(ranks=4, memory_bytes=1000)
    assert (strategy.transport, strategy.slices) == ("allgather", 4)


@pytest.mark.parametrize(
    ("ranks", "node_size", "depth", "chunks"),
    [
        (8, 8, None, 8),
        (8, 8, 5, 8),  # calls over parts would need more memory
        (8, 8, 4, 3),
        (8, 8, 2, 1),
        (2, 2, 2, 2),
        (1, 1, None, 1),
        (16, 8, None, 8),  # those of the next call travel meanwhile
        (16, 8, 4, 3),
        (4, 1, None, 1),
    ],
)
def test_a_ring_attends_to_as_many_chunks_as_its_buffers_allow(
    ranks: int, node_size: int, depth: int | None, chunks: int
) -> None:
    assert CPStrategy(ranks, "ring", "zigzag", node_size, depth).chunks_per_call == chunks


@pytest.mark.parametrize(
    ("transport", "work_grows", "layout"),
    [
        ("ring", True, "zigzag"),
        ("ring", False, "zigzag"),
        ("allgather", False, "zigzag"),
        ("hierarchical", False, "contiguous"),
        ("allgather", True, "zigzag"),
        ("ulysses", True, "contiguous"),
    ],
)
def test_zigzag_where_shards_would_be_unequal(transport: str, work_grows: bool, layout: str) -> None:
    node = 2 if transport == "hierarchical" else 4
    shape = replace(LLAMA_8B, facts=AttentionFacts(work_grows=work_grows))
    strategy, _ = choose_strategy(transport, "auto", shape, ranks=4, node_size=node)
    assert strategy.layout == layout


def test_the_configured_transport_is_taken() -> None:
    strategy, why = choose_strategy("ring", "zigzag", LLAMA_8B, ranks=8, node_size=8)
    assert strategy == CPStrategy(8, "ring", "zigzag", 8)
    assert "as configured, ring" in why


def test_a_configured_ring_that_does_not_fit_has_two_buffers() -> None:
    enough = predict_cost(CPStrategy(8, "ring", "zigzag", 8), LLAMA_8B).memory_bytes
    for memory, depth in ((enough, None), (enough - 1, 2)):
        found, _ = choose_strategy("ring", "zigzag", LLAMA_8B, ranks=8, node_size=8, memory_bytes=memory)
        assert found == CPStrategy(8, "ring", "zigzag", 8, depth)
    assert predict_cost(found, LLAMA_8B).memory_bytes < enough


def test_one_slice_inside_a_node_unless_it_does_not_fit() -> None:
    def slices(transport: str, ranks: int = 4, node_size: int = 4, **limits: Any) -> int:
        return choose_strategy(transport, "auto", LLAMA_8B, ranks=ranks, node_size=node_size, **limits)[0].slices

    assert slices("allgather") == 1
    enough = predict_cost(CPStrategy(4, "allgather", "zigzag", 4), LLAMA_8B).memory_bytes
    assert slices("allgather", memory_bytes=enough) == 1
    assert slices("allgather", memory_bytes=enough - 1) == 4
    assert slices("allgather", ranks=8) == slices("hierarchical", ranks=8) == 4  # over the network


def test_several_slices_are_taken_before_a_ring_with_few_buffers() -> None:
    four_heads = AttentionShape(2**17, heads=28, kv_heads=4, head_dim=128)
    enough = predict_cost(CPStrategy(8, "allgather", "zigzag", 8, slices=4), four_heads).memory_bytes
    strategy, _ = auto(four_heads, ranks=8, memory_bytes=enough)
    assert (strategy.transport, strategy.slices) == ("allgather", 4)


def test_a_configured_transport_that_cannot_share_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="among 8 ranks"):
        choose_strategy("ulysses", "auto", AttentionShape(99, 12, 12, 8), ranks=8, node_size=8)
