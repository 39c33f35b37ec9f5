"""The cost model: bytes, seconds and memory that each transport needs for one layer, forward and backward together.

It predicts the bytes that a rank receives over the links of its node and from other nodes, the bytes that it copies and
sums in its own memory for the exchange, the seconds that both take at measured rates, and the memory of the buffers.
For 64K tokens per GPU on 4 x H200 the predicted seconds are within 20 % of those measured when exchanges were messages,
but for a ring, whose messages take 1.5 times as long (benchmarks/results/context-parallel-h200.json); for 16K tokens,
launching many small kernels takes up to 4 ms longer than predicted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from moba_train.config.parallel import CPTransport
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.links import LINKS, Links

COPY_BANDWIDTH = 4000e9
"""Bytes per second that are read and written in a GPU's memory when rows are reordered, merged and summed: fitted to
the transfers measured on H200 (see above)."""


class TransportMemory(NamedTuple):
    """What a transport makes of a rank's memory in one layer."""

    buffers: float = 0.0
    """Bytes of its buffers."""
    heads_at_once: float = 1.0
    """Share of the rank's heads that attention's kernels work on at once."""


@dataclass(frozen=True)
class TransportCost:
    """The predicted cost of a transport for one layer, forward and backward."""

    node_bytes: float
    """Bytes that a rank receives over the links of its node."""
    network_bytes: float
    """Bytes that arrive through a rank's network adapter, the busiest one."""
    copied_bytes: float
    """Bytes read and written in a rank's own memory."""
    memory_bytes: float
    """Bytes of the buffers, in the pass that needs more."""
    upfront_share: float
    """Share of the transfer that must arrive before attention can start."""
    heads_at_once: float = 1.0
    """Share of the rank's heads that attention's kernels work on at once: 1 / slices."""

    @property
    def memory(self) -> TransportMemory:
        """Its part of a rank's memory."""
        return TransportMemory(self.memory_bytes, self.heads_at_once)

    def transfer_seconds(self, links: Links = LINKS) -> float:
        """Seconds to receive all bytes."""
        return self.node_bytes / links.node + self.network_bytes / links.network

    def seconds(self, links: Links = LINKS, copy_bandwidth: float = COPY_BANDWIDTH) -> float:
        """Seconds of communication and copies without any overlap."""
        return self.transfer_seconds(links) + self.copied_bytes / copy_bandwidth

    def exposed_seconds(
        self, attention_seconds: float, links: Links = LINKS, copy_bandwidth: float = COPY_BANDWIDTH
    ) -> float:
        """Seconds that remain, at best, when attention of this length overlaps the transfer; copies never overlap."""
        hidden = min((1 - self.upfront_share) * self.transfer_seconds(links), attention_seconds)
        return self.seconds(links, copy_bandwidth) - hidden


def most_memory(costs: Iterable[TransportCost]) -> TransportMemory:
    """What the layers with these costs make of a rank's memory at most."""
    found = [cost.memory for cost in costs]
    return TransportMemory(max(one.buffers for one in found), max(one.heads_at_once for one in found))


def predict_cost(strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
    """The cost of a strategy that passes the checks of checks.py."""
    return _COSTS[strategy.transport](strategy, shape)


def gather_cost(strategy: CPStrategy, tokens: int, token_bytes: float) -> TransportCost:
    """The cost of a layer that gathers `token_bytes` of each token of the sequence by its shard, without a transport.

    Backward, the gradients of all tokens, its buffers, are summed for their owners. Attention waits for both. A
    recomputed layer gathers once more, which is not counted. Not compared with measured times.
    """
    whole = tokens * token_bytes
    received = 2 * (1 - 1 / strategy.ranks) * whole
    network = 0 if strategy.node_size == strategy.ranks else received / strategy.node_size
    return TransportCost(received, network, 4 * whole, whole, upfront_share=1)


def _allgather_cost(strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
    received = _received_kv_bytes(strategy, shape)
    slices = _slice_count(strategy, shape.kv_heads)
    q_bytes = shape.tokens / strategy.ranks * shape.q_bytes
    kv_bytes = shape.tokens * shape.kv_bytes
    # NCCL's rings enter a node through all of its adapters.
    network = 0 if strategy.node_size == strategy.ranks else received / strategy.node_size
    copied = _gather_copies(strategy, slices, q_bytes, kv_bytes)
    buffers = _gather_buffers(slices, kv_bytes)
    return TransportCost(received, network, copied, buffers, upfront_share=1 / slices, heads_at_once=1 / slices)


def _slice_count(strategy: CPStrategy, kv_heads: int) -> int:
    """Number of slices of a rank's key/value heads. All have the same width, but the last may be narrower."""
    width = -(-kv_heads // strategy.slices)
    return -(-kv_heads // width)


def _gather_buffers(slices: int, kv_bytes: float) -> float:
    """Bytes of two slices of all keys and values, and of their gradients.

    `kv_bytes`: bytes of all gathered keys and values.
    """
    return 2 * min(1, 2 / slices) * kv_bytes


def _gather_copies(strategy: CPStrategy, slices: int, q_bytes: float, kv_bytes: float) -> float:
    """Bytes copied and summed around a gather.

    `q_bytes`: bytes of a rank's queries. `kv_bytes`: bytes of all gathered keys and values.
    """
    # With several slices, the inputs are copied head by head and results are written to their rows.
    q_copies, kv_copies = (0, 5) if slices == 1 else (12, 9)
    own = q_copies * q_bytes + kv_copies * kv_bytes / strategy.ranks
    # The gradients of all keys are laid out for their owners and summed there; zigzag shards are also reordered.
    return own + (8 if strategy.layout == "zigzag" else 4) * kv_bytes


def _ring_cost(strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
    width = strategy.chunks_per_call
    if width == strategy.ranks:  # an all-gather by other messages; its time has not been measured
        return _allgather_cost(replace(strategy, slices=1), shape)
    received = _received_kv_bytes(strategy, shape)
    depth = min(strategy.ring_depth or strategy.ranks, strategy.ranks)
    tokens = shape.tokens / strategy.ranks
    # Chunks that arrive and gradients on the way to their owners; the keys of a call and their gradients.
    buffers = (2 * depth + 2 * width) * tokens * shape.kv_bytes
    # For every call, out and dq are merged in float32 (13 + 5 of a query's bytes); every chunk is copied into token
    # order in both passes, and its gradients are laid out and summed.
    calls = -(-strategy.ranks // width)
    copied = tokens * ((18 * calls + 8) * shape.q_bytes + (11 * strategy.ranks + 5) * shape.kv_bytes)
    network = 0 if strategy.node_size == strategy.ranks else received  # one link enters each node
    return TransportCost(received, network, copied, buffers, upfront_share=(width - 1) / (strategy.ranks - 1))


def _ulysses_cost(strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
    exchange = _head_exchange(strategy, shape, strategy.ranks)
    within = strategy.node_size / strategy.ranks
    node_bytes = exchange.received * within
    network_bytes = exchange.received * (1 - within)
    return TransportCost(node_bytes, network_bytes, exchange.copied, exchange.buffers, upfront_share=1)


def _hierarchical_cost(strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
    exchange = _head_exchange(strategy, shape, strategy.node_size)
    token_kv_bytes = shape.kv_bytes * max(1, strategy.node_size / shape.kv_heads) / strategy.node_size
    kv_bytes = shape.tokens * token_kv_bytes
    gathered = 3 * (1 - strategy.node_size / strategy.ranks) * kv_bytes  # keys and values twice, gradients once
    slices = _slice_count(strategy, max(1, shape.kv_heads // strategy.node_size))
    q_bytes = shape.tokens / strategy.ranks * shape.q_bytes
    copied = exchange.copied + _gather_copies(strategy, slices, q_bytes, kv_bytes)
    buffers = exchange.buffers + _gather_buffers(slices, kv_bytes)
    within = exchange.received / LINKS.node
    across = gathered / LINKS.network
    upfront_share = (within + across / slices) / (within + across)
    return TransportCost(exchange.received, gathered, copied, buffers, upfront_share, heads_at_once=1 / slices)


def _dispatch_cost(strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
    """The cost where queries select any units with equal probability. With an attention sink one rank receives up to
    `ranks` times as much. Not compared with measured times."""
    assert shape.selected_units is not None, "ask `check_units` first"
    tokens = shape.tokens / strategy.ranks
    # Ranks, its own included, that a query of one head is sent to.
    reached = strategy.ranks * (1 - (1 - 1 / strategy.ranks) ** shape.selected_units)
    remote = reached * (1 - 1 / strategy.ranks)
    # Forward: q is sent, out comes back. Backward: q, dout and out are sent, dq comes back. With them go the ids of the
    # selected units in both passes, and the log-sum-exp, to and fro.
    small = 4 * (2 * shape.selected_units + 2) * shape.heads
    received = tokens * remote * (6 * shape.q_bytes + small)
    within = (strategy.node_size - 1) / max(1, strategy.ranks - 1)
    # Rows are gathered (4 tensors, read and written); out and dq are joined in float32 (5 of a query's bytes each).
    copied = tokens * reached * 18 * shape.q_bytes
    # Rows of one key/value head, sent and received (q, dout, out, dq), and dq, dk and dv of the shard in float32.
    buffers = tokens * (8 * reached * shape.q_bytes / shape.kv_heads + 2 * shape.q_bytes + 2 * shape.kv_bytes)
    return TransportCost(received * within, received * (1 - within), copied, buffers, upfront_share=1)


def _received_kv_bytes(strategy: CPStrategy, shape: AttentionShape) -> float:
    """Bytes of other ranks' keys and values, received in both passes, and of the gradients that come back once."""
    return 3 * (shape.tokens * (1 - 1 / strategy.ranks)) * shape.kv_bytes


class _HeadExchange(NamedTuple):
    """Bytes of the exchange of tokens for heads."""

    received: float
    copied: float
    buffers: float


def _head_exchange(strategy: CPStrategy, shape: AttentionShape, ranks: int) -> _HeadExchange:
    """The cost of exchanging tokens for heads among `ranks` ranks.

    Forward: q, k and v are sent, out comes back. Backward: q, k, v, out and its gradient are sent, dq, dk and dv come
    back. Each tensor is split by heads before it is sent or joined afterwards; zigzag shards are also reordered.
    """
    tokens = shape.tokens / strategy.ranks
    kv_bytes = shape.kv_bytes * max(1, ranks / shape.kv_heads)
    received = tokens * (6 * shape.q_bytes + 3 * kv_bytes) * (1 - 1 / ranks)
    copied = tokens * (12 * shape.q_bytes + 6 * kv_bytes)
    if strategy.layout == "zigzag":
        copied += tokens * (14 * shape.q_bytes + 7 * kv_bytes)
    return _HeadExchange(received, copied, 2 * tokens * (3 * shape.q_bytes + kv_bytes))


_COSTS: dict[CPTransport, Callable[[CPStrategy, AttentionShape], TransportCost]] = {
    "allgather": _allgather_cost,
    "ulysses": _ulysses_cost,
    "hierarchical": _hierarchical_cost,
    "ring": _ring_cost,
    "dispatch": _dispatch_cost,
}
