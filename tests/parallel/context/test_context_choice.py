"""What `auto` takes, what it says, and what is refused with the key to change."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from context_cases import Board, ThreadPeers

from moba_train.parallel.context.choose import Scheme, Shape, check_heads, check_sizes, choose, cost
from moba_train.parallel.context.transport.allgather import AllGather

LLAMA_8B = Shape(tokens=2**17, heads=32, kv_heads=8, head_dim=128)


def auto(shape: Shape = LLAMA_8B, ranks: int = 4, node: int | None = None, work_grows: bool = True, **limits):
    return choose("auto", "auto", shape, ranks=ranks, node=node or ranks, work_grows=work_grows, **limits)


def test_inside_a_node_ranks_exchange_tokens_for_whole_heads():
    assert auto(ranks=2)[0].transport == "ulysses"
    assert auto(ranks=8)[0].transport == "ulysses"


def test_where_heads_would_be_repeated_keys_and_values_are_gathered():
    assert auto(Shape(2**17, heads=32, kv_heads=2, head_dim=128), ranks=4)[0].transport == "allgather"


def test_across_nodes_the_exchange_stays_inside():
    assert auto(ranks=16, node=8)[0].transport == "hierarchical"


def test_what_cannot_be_shared_is_not_taken():
    scheme, why = auto(Shape(2**17, heads=28, kv_heads=4, head_dim=128), ranks=8)
    assert scheme.transport == "allgather"
    assert "cannot share 28 query heads among 8 ranks" in why


def test_where_nothing_fits_a_ring_with_two_buffers_is_left():
    scheme, why = auto(memory_bytes=1000)
    assert (scheme.transport, scheme.ring_depth) == ("ring", 2)
    assert why.count("does not fit in 0 MiB") == 3
    assert cost(scheme, LLAMA_8B).memory_bytes < cost(Scheme(4, "ring", "zigzag", 4), LLAMA_8B).memory_bytes


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
def test_zigzag_where_shards_would_be_unequal(transport, work_grows, layout):
    node = 2 if transport == "hierarchical" else 4
    scheme, _ = choose(transport, "auto", LLAMA_8B, ranks=4, node=node, work_grows=work_grows)
    assert scheme.layout == layout


def test_what_is_asked_for_is_taken():
    scheme, why = choose("ring", "zigzag", LLAMA_8B, ranks=8, node=8, work_grows=False, ring_depth=3)
    assert scheme == Scheme(8, "ring", "zigzag", 8, 3)
    assert "ring as asked for" in why


def test_bytes_of_a_known_case():
    """128K tokens over 4 ranks: 512 MiB of keys and values, of which a rank lacks 3/4; fetched twice, returned once."""
    assert cost(Scheme(4, "ring", "zigzag", 4), LLAMA_8B).node_bytes == 3 * 0.75 * 512 * 2**20
    assert cost(Scheme(4, "allgather", "zigzag", 4), LLAMA_8B).node_bytes == 3 * 0.75 * 512 * 2**20
    # A rank's 32K tokens have 256 MiB of queries and 128 MiB of keys and values; it keeps 1/4 of what it exchanges.
    assert cost(Scheme(4, "ulysses", "contiguous", 4), LLAMA_8B).node_bytes == 0.75 * (6 * 256 + 3 * 128) * 2**20


def test_one_head_cannot_be_gathered_in_slices():
    """The attention waits for all of it, and all of it is in memory at once, keys and values and their gradients."""
    found = cost(Scheme(4, "allgather", "contiguous", 4), replace(LLAMA_8B, kv_heads=1))
    assert found.upfront == 1
    assert found.memory_bytes == 2 * replace(LLAMA_8B, kv_heads=1).kv_bytes * LLAMA_8B.tokens


@pytest.mark.parametrize(
    ("kv_heads", "asked", "slices"), [(1, 4, 1), (2, 4, 2), (4, 4, 4), (6, 4, 3), (8, 4, 4), (8, 1, 1), (8, 3, 3)]
)
def test_predicted_slices_are_those_that_are_gathered(kv_heads, asked, slices):
    scheme = Scheme(4, "allgather", "contiguous", 4, slices=asked)
    assert cost(scheme, replace(LLAMA_8B, kv_heads=kv_heads)).upfront == 1 / slices
    made = AllGather(ThreadPeers(0, Board(1)), asked)._slices(torch.empty(1, kv_heads, 8), torch.empty(1, kv_heads, 8))
    assert len(made) == slices


def test_one_slice_inside_a_node_unless_it_does_not_fit():
    def slices(transport: str, ranks: int = 4, node: int = 4, **limits) -> int:
        return choose(transport, "auto", LLAMA_8B, ranks=ranks, node=node, work_grows=True, **limits)[0].slices

    assert slices("allgather") == 1
    enough = cost(Scheme(4, "allgather", "zigzag", 4), LLAMA_8B).memory_bytes
    assert slices("allgather", memory_bytes=enough) == 1
    assert slices("allgather", memory_bytes=enough - 1) == 4
    assert slices("allgather", ranks=8) == slices("hierarchical", ranks=8) == 4  # over the network
    assert slices("allgather", ranks=8, slices=2) == slices("allgather", memory_bytes=0, slices=2) == 2


def test_several_slices_are_taken_before_a_ring_with_few_buffers():
    four_heads = Shape(2**17, heads=28, kv_heads=4, head_dim=128)
    enough = cost(Scheme(8, "allgather", "zigzag", 8, slices=4), four_heads).memory_bytes
    scheme, _ = auto(four_heads, ranks=8, memory_bytes=enough)
    assert (scheme.transport, scheme.slices) == ("allgather", 4)


def test_fewer_slices_need_more_memory():
    bytes_of = [cost(Scheme(4, "allgather", "zigzag", 4, slices=n), LLAMA_8B).memory_bytes for n in (1, 2, 4, 8)]
    assert bytes_of[0] == bytes_of[1] == 2 * bytes_of[2] == 4 * bytes_of[3]


def test_predicted_seconds_agree_with_those_measured_inside_a_node():
    """Where transfers, not launches, take the time; hierarchical as two nodes of two, over the same links."""
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "context-parallel-h200.json"
    rows = [row for row in json.loads(path.read_text())["results"] if row["tokens"] == 2**18]
    assert {row["transport"] for row in rows} == {"allgather", "ring", "ulysses", "hierarchical"}
    for row in rows:
        node = 2 if row["transport"] == "hierarchical" else 4
        how = Scheme(4, row["transport"], row["layout"], node, slices=row["slices"] or 1)
        found = cost(how, Shape(row["tokens"], 32, 8, 128))
        found = replace(found, node_bytes=found.node_bytes + found.network_bytes, network_bytes=0)
        assert 1000 * found.seconds == pytest.approx(row["communication_ms"]["median"], rel=0.25), how


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(4, "magic", "zigzag", 4), r"parallel.cp_transport: 'magic' given, allowed: allgather"),
        (Scheme(0, "ring", "zigzag", 1), r"parallel.cp: 0 given"),
        (Scheme(4, "ring", "zigzag", 4, 1), r"parallel.cp_ring_depth: 1 given, at least 2"),
        (Scheme(4, "hierarchical", "zigzag", 4), r"parallel.cp_transport: 'hierarchical' needs several nodes"),
        (Scheme(4, "hierarchical", "zigzag", 3), r"parallel.cp is 4, with 3 in a node"),
        (Scheme(4, "hierarchical", "zigzag", 1), r"with 1 in a node"),
    ],
)
def test_impossible_sizes_are_refused(scheme, message):
    with pytest.raises(ValueError, match=message):
        check_sizes(scheme)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "couples", "message"),
    [
        (6, 6, False, "cannot share 6 query heads among 4 ranks"),
        (12, 6, False, "cannot share 6 key/value heads among 4 ranks"),
        (8, 2, True, "would tear the query heads of 2 key/value heads apart"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(heads, kv_heads, couples, message):
    with pytest.raises(ValueError, match=rf"parallel\.cp_transport: 'ulysses' {message}"):
        check_heads(Scheme(4, "ulysses", "contiguous", 4), heads, kv_heads, couples)
    check_heads(Scheme(4, "ring", "zigzag", 4), heads, kv_heads, couples)
    with pytest.raises(ValueError, match="among 8 ranks"):
        choose("ulysses", "auto", Shape(99, 12, 12, 8), ranks=8, node=8, work_grows=False)
