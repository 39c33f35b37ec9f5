"""The predicted cost of each transport, against sizes known by hand and times measured on H200."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.parallel.context.costs import TransportCost, TransportMemory, most_memory
from moba_train.parallel.context.policy import predict_cost
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from tests.thread_ranks import Board, ThreadCommunicator

LLAMA_8B = AttentionShape(tokens=2**17, heads=32, kv_heads=8, head_dim=128)


def selecting(blocks: int) -> AttentionShape:
    """Its shape, where a query selects so many blocks before its own."""
    return replace(LLAMA_8B, attentions=(MobaAttention(MobaAttention.Options(topk=blocks + 1), 128),))


def test_bytes_of_a_known_case() -> None:
    """128K tokens over 4 ranks: 512 MiB of keys and values, of which a rank lacks 3/4; fetched twice, returned once."""
    assert predict_cost(CPStrategy(4, "ring", "zigzag", 4), LLAMA_8B).node_bytes == 3 * 0.75 * 512 * 2**20
    assert predict_cost(CPStrategy(4, "allgather", "zigzag", 4), LLAMA_8B).node_bytes == 3 * 0.75 * 512 * 2**20
    # A rank's 32K tokens have 256 MiB of queries and 128 MiB of keys and values; it keeps 1/4 of what it exchanges.
    assert (
        predict_cost(CPStrategy(4, "ulysses", "contiguous", 4), LLAMA_8B).node_bytes
        == 0.75 * (6 * 256 + 3 * 128) * 2**20
    )


@pytest.mark.parametrize(
    ("strategy", "in_node", "from_nodes", "copied", "buffers", "upfront"),
    [
        # Of four ranks each has 256 MiB of queries and 128 of keys and values; all ranks have 512 of the latter.
        (CPStrategy(4, "allgather", "zigzag", 4, slices=4), 3 * 384, 0, 12 * 256 + 9 * 128 + 8 * 512, 2 * 256, 1 / 4),
        # Eight ranks have half as much each. Through all four adapters of a node:
        (CPStrategy(8, "allgather", "zigzag", 4), 3 * 448, 3 * 448 / 4, 5 * 64 + 8 * 512, 2 * 512, 1),
        # Two calls, of four chunks each:
        (CPStrategy(8, "ring", "zigzag", 4), 3 * 448, 3 * 448, 44 * 128 + 93 * 64, (2 * 8 + 2 * 4) * 64, 3 / 7),
        (CPStrategy(4, "ring", "zigzag", 4, 2), 3 * 384, 0, 80 * 256 + 49 * 128, (2 * 2 + 2 * 1) * 128, 0),
        (CPStrategy(4, "ulysses", "contiguous", 2), 720, 720, 12 * 256 + 6 * 128, 6 * 256 + 2 * 128, 1),
        (CPStrategy(4, "ulysses", "zigzag", 2), 720, 720, 26 * 256 + 13 * 128, 6 * 256 + 2 * 128, 1),
        # Half of the heads' tokens come from the node, and the keys and values of these heads from the other one.
        (CPStrategy(4, "hierarchical", "contiguous", 2), 960, 3 * 128, 3840 + 5 * 64 + 4 * 256, 1792 + 2 * 256, 1),
    ],
    ids=lambda value: f"{value.transport}-{value.node_size}-of-{value.ranks}" if isinstance(value, CPStrategy) else "",
)
def test_bytes_copies_and_buffers_of_known_cases_in_mib(
    strategy: CPStrategy, in_node: float, from_nodes: float, copied: int, buffers: float, upfront: float
) -> None:
    assert costs_in_mib(strategy) == pytest.approx([in_node, from_nodes, copied, buffers, upfront])


def costs_in_mib(strategy: CPStrategy) -> list[float]:
    """MiB in the node, from other nodes, copied and buffered, and the share that arrives before attention begins."""
    found = predict_cost(strategy, selecting(1))
    got = [x / 2**20 for x in (found.node_bytes, found.network_bytes, found.copied_bytes, found.memory_bytes)]
    return [*got, found.upfront_share]


def test_one_head_cannot_be_gathered_in_slices() -> None:
    """The attention waits for all of it, and all of it is in memory at once, keys and values and their gradients."""
    found = predict_cost(CPStrategy(4, "allgather", "contiguous", 4), replace(LLAMA_8B, kv_heads=1))
    assert found.upfront_share == 1
    assert found.memory_bytes == 2 * replace(LLAMA_8B, kv_heads=1).kv_bytes * LLAMA_8B.tokens


@pytest.mark.parametrize(
    ("kv_heads", "asked", "slices"), [(1, 4, 1), (2, 4, 2), (4, 4, 4), (6, 4, 3), (8, 4, 4), (8, 1, 1), (8, 3, 3)]
)
def test_predicted_slices_are_those_that_are_gathered(kv_heads: int, asked: int, slices: int) -> None:
    strategy = CPStrategy(4, "allgather", "contiguous", 4, slices=asked)
    assert predict_cost(strategy, replace(LLAMA_8B, kv_heads=kv_heads)).upfront_share == 1 / slices
    made = AllGather(ThreadCommunicator(0, Board(1)), asked)._slices(
        torch.empty(1, kv_heads, 8), torch.empty(1, kv_heads, 8)
    )
    assert len(made) == slices


def test_fewer_slices_need_more_memory() -> None:
    bytes_of = [
        predict_cost(CPStrategy(4, "allgather", "zigzag", 4, slices=n), LLAMA_8B).memory_bytes for n in (1, 2, 4, 8)
    ]
    assert bytes_of[0] == bytes_of[1] == 2 * bytes_of[2] == 4 * bytes_of[3]


def test_a_ring_that_attends_to_everything_at_once_costs_what_all_gather_costs() -> None:
    ring, allgather = (predict_cost(CPStrategy(4, name, "zigzag", 4), LLAMA_8B) for name in ("ring", "allgather"))
    assert ring == allgather


@pytest.mark.parametrize("ranks", [4, 6, 8, 16])
def test_fewer_buffers_of_a_ring_need_less_memory_and_more_copies(ranks: int) -> None:
    costs = [predict_cost(CPStrategy(ranks, "ring", "zigzag", ranks, n), LLAMA_8B) for n in range(2, ranks // 2 + 2)]
    assert costs[-1] == predict_cost(CPStrategy(ranks, "ring", "zigzag", ranks), LLAMA_8B)
    for few, more in pairwise(costs):
        assert few.memory_bytes < more.memory_bytes
        assert few.copied_bytes >= more.copied_bytes
        assert few.upfront_share < more.upfront_share


def test_predicted_seconds_agree_with_those_measured_inside_a_node() -> None:
    """Where transfers, not launches, take the time; hierarchical as two nodes of two, over the same links. The messages
    of a ring took 1.5 times as long as predicted here, and as long as predicted at 1M tokens; why is not known."""
    path = Path(__file__).parents[3] / "benchmarks" / "results" / "context-parallel-h200.json"
    rows = [row for row in json.loads(path.read_text())["results"] if row["tokens"] == 2**18]
    assert {row["transport"] for row in rows} == {"allgather", "ring", "ulysses", "hierarchical"}
    for row in rows:
        node = 2 if row["transport"] == "hierarchical" else 4
        how = CPStrategy(4, row["transport"], row["layout"], node, slices=row["slices"] or 1)
        found = predict_cost(how, AttentionShape(row["tokens"], 32, 8, 128))
        found = replace(found, node_bytes=found.node_bytes + found.network_bytes, network_bytes=0)
        off = 0.35 if row["transport"] == "ring" else 0.25
        assert 1000 * found.seconds() == pytest.approx(row["communication_ms"]["median"], rel=off), how


def test_the_most_that_layers_of_different_kinds_take_is_of_each_part() -> None:
    """One layer has the larger buffers, another one attends to all heads at once."""
    sliced = TransportCost(0, 0, 0, memory_bytes=10, upfront_share=1, heads_at_once=0.25)
    whole = TransportCost(0, 0, 0, memory_bytes=5, upfront_share=1)
    assert most_memory([sliced, whole]) == TransportMemory(buffers=10, heads_at_once=1.0)
