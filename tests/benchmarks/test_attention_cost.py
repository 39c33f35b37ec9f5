"""The cost model reproduces the team's table, and counts what a count by hand gives."""

import pytest

from benchmarks.attention_cost import MATRIX_TFLOPS, MEMORY_GB_PER_MS, Heads, dense_product, history_blocks, moba_cost

K, M = 2**10, 2**20
# tokens, block, topk; TFLOP forward, gate, backward, dense forward, backward; ideal ms of work; ms of gather traffic.
TABLE = [
    (64 * K, 128, 8, 1.0, 0.14, 2.6, 35, 88, 1.5, 3.2, 3, 6),
    (256 * K, 128, 8, 4.1, 2.2, 10.3, 563, 1407, 8.0, 13, 12, 24),
    (1 * M, 128, 8, 16.5, 35.2, 41, 9007, 22518, 65, 52, 47, 94),
    (256 * K, 512, 8, 16.4, 0.55, 41, 563, 1407, 21, 52, 12, 23),
    (256 * K, 4096, 12, 184, 0.07, 460, 563, 1407, 233, 583, 16, 33),
    (1 * M, 4096, 12, 791, 1.1, 1978, 9007, 22518, 1003, 2504, 70, 139),
]


@pytest.mark.parametrize("line", TABLE, ids=lambda line: f"{line[0] // K}K-{line[1]}-{line[2]}")
def test_costs_are_those_of_the_table_to_its_last_digit(line: tuple[float, ...]) -> None:
    tokens, block_size, topk, *want = line
    cost, dense = moba_cost([int(tokens)], int(block_size), int(topk)), dense_product([int(tokens)])
    work = [cost.forward, cost.gate, cost.backward, 2 * dense, 5 * dense]
    ideal = [1000 * (cost.forward + cost.gate) / MATRIX_TFLOPS, 1000 * cost.backward / MATRIX_TFLOPS]
    traffic = [cost.forward_traffic / MEMORY_GB_PER_MS, cost.backward_traffic / MEMORY_GB_PER_MS]
    for got, expected in zip([*work, *ideal, *traffic], want, strict=True):
        digits = len(str(expected).partition(".")[2])
        assert got == pytest.approx(expected, abs=0.5001 * 10**-digits, rel=0.002)


@pytest.mark.parametrize(("length", "block_size", "topk"), [(1, 4, 3), (8, 4, 1), (23, 4, 3), (64, 8, 20), (37, 5, 4)])
def test_pairs_and_history_are_counted_as_by_hand(length: int, block_size: int, topk: int) -> None:
    own = [token // block_size for token in range(length)]
    history = sum(min(block, topk - 1) for block in own)
    assert history_blocks(length, block_size, topk) == history
    inside = sum(token % block_size + 0.5 for token in range(length))  # a query's own key counts half
    cost = moba_cost([length, 0, length], block_size, topk, Heads(2, 1, 16))
    assert cost.product == pytest.approx(2 * 2e-12 * 2 * 16 * (history * block_size + inside))
    assert cost.gate == pytest.approx(2 * 2e-12 * 2 * 16 * sum(own))


def test_choosing_every_block_costs_what_dense_attention_costs() -> None:
    assert moba_cost([4096, 1000], 512, 8).product == pytest.approx(dense_product([4096, 1000]))


def test_short_blocks_are_bound_by_memory_and_long_ones_by_the_matrix_units() -> None:
    short, long = moba_cost([256 * K], 128, 8), moba_cost([256 * K], 4096, 12)
    assert short.backward_floor_ms == short.backward_traffic / MEMORY_GB_PER_MS
    assert long.backward_floor_ms == 1000 * long.backward / MATRIX_TFLOPS
