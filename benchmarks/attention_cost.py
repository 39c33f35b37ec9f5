"""The cost of attention: operations, memory traffic, and the ideal time that follows from them.

Symbols: T tokens, H query heads, Hkv key/value heads, d head width, B block size, k = topk, n blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.attention.moba.moba_kind import attended_pairs

MATRIX_TFLOPS = 790.0
"""bf16 matrix products, measured on one H200."""
MEMORY_GB_PER_MS = 4.3
"""Large copies, measured on one H200: 4.3 TB/s."""
BYTES = 2
"""Bytes of a bf16 number."""


@dataclass(frozen=True)
class Heads:
    """Shape of one attention; the default is Llama-3-8B's."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class Cost:
    """Costs of MoBA on some documents. Work in 10^12 operations, traffic in 10^9 bytes."""

    product: float
    """One matrix product over all pairs of a query and a key it attends to. Attention needs 2 forward, 5 backward."""
    gate: float
    """The gate: every query times the mean keys of the blocks before its own."""
    forward_traffic: float
    backward_traffic: float

    @property
    def forward(self) -> float:
        """Two products forward: scores, and weights times values."""
        return 2 * self.product

    @property
    def backward(self) -> float:
        """Five products backward: scores again, dv, dp, dq, dk. A kernel with a pass of its own for dq does two of them
        twice."""
        return 5 * self.product

    @property
    def forward_floor_ms(self) -> float:
        """Ideal milliseconds forward: the gate, then the longer of attention's work and its traffic."""
        work = 1000 * self.forward / MATRIX_TFLOPS
        gate = 1000 * self.gate / MATRIX_TFLOPS
        return gate + max(work, self.forward_traffic / MEMORY_GB_PER_MS)

    @property
    def backward_floor_ms(self) -> float:
        """Ideal milliseconds backward: the longer of work and traffic."""
        return max(1000 * self.backward / MATRIX_TFLOPS, self.backward_traffic / MEMORY_GB_PER_MS)


def moba_cost(lengths: Sequence[int], block_size: int, topk: int, shape: Heads | None = None) -> Cost:
    """Cost of MoBA on documents of these `lengths` (tokens).

    Traffic, with r bytes in a row of d numbers: a query and head reads and writes its row once (2 r; k and v: 2 r
    Hkv / H). Each of its history blocks makes it read its row again, write a partial result, read that for the merge,
    and read a list entry of 4 bytes. The backward pass moves twice as much: dout as well as q in two passes, and
    partial dq.
    """
    shape = shape or Heads()
    pairs = sum(attended_pairs(length, block_size, topk) for length in lengths)
    gates = sum(_gate_pairs(length, block_size) for length in lengths)
    history = shape.heads * sum(history_blocks(length, block_size, topk) for length in lengths)
    row = BYTES * shape.head_dim
    once = sum(lengths) * (2 * shape.heads + 2 * shape.kv_heads) * row
    traffic = 1e-9 * (once + history * (3 * row + 4))
    per_pair = 2e-12 * shape.heads * shape.head_dim
    return Cost(per_pair * pairs, per_pair * gates, traffic, 2 * traffic)


def dense_product(lengths: Sequence[int], shape: Heads | None = None) -> float:
    """10^12 operations of one matrix product of dense causal attention: 2 of them forward, 5 backward."""
    shape = shape or Heads()
    return 2e-12 * shape.heads * shape.head_dim * sum(length**2 / 2 for length in lengths)


def history_blocks(length: int, block_size: int, topk: int) -> int:
    """Selected history blocks, summed over the queries of one document and one head."""
    blocks, rest = divmod(length, block_size)
    growing = min(topk, blocks)
    selected = growing * (growing - 1) // 2 + (blocks - growing) * (topk - 1)
    return selected * block_size + min(topk - 1, blocks) * rest


def _gate_pairs(length: int, block_size: int) -> int:
    """Blocks before the own one, summed over the queries."""
    blocks, rest = divmod(length, block_size)
    return blocks * (blocks - 1) // 2 * block_size + blocks * rest
