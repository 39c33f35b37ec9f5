"""The cost of context parallelism: bytes, seconds and memory of one layer, forward and backward together.

It predicts the bytes that a rank receives over the links of its node and from other nodes, the bytes that it copies and
sums in its own memory for the exchange, the seconds that both take at measured rates, and the memory of the buffers.
For 64K tokens per GPU on 4 x H200 the predicted seconds are within 20 % of those measured when exchanges were messages.
The ring is an exception: its messages take 1.5 times as long (benchmarks/results/context-parallel-h200.json). For 16K
tokens, launching many small kernels takes up to 4 ms longer than predicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.links import LINKS, Links

COPY_BANDWIDTH = 4000e9
"""Bytes per second that are read and written in a GPU's memory when rows are reordered, merged and summed: fitted to
the transfers measured on H200 (see above)."""


class TransportMemory(NamedTuple):
    """Effects of a transport on a rank's memory in one layer."""

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
    """Largest effects on a rank's memory among layers with these costs, each field by itself."""
    found = [cost.memory for cost in costs]
    return TransportMemory(max(one.buffers for one in found), max(one.heads_at_once for one in found))


def gather_cost(strategy: CPStrategy, tokens: int, token_bytes: float) -> TransportCost:
    """The cost of a layer that gathers `token_bytes` of each token of the sequence by its shard, without a transport.

    Backward, the gradients of all tokens, its buffers, are summed for their owners. Attention waits for both. A
    recomputed layer gathers once more, which is not counted. Not compared with measured times.
    """
    whole = tokens * token_bytes
    received = 2 * (1 - 1 / strategy.ranks) * whole
    network = 0 if strategy.node_size == strategy.ranks else received / strategy.node_size
    return TransportCost(received, network, 4 * whole, whole, upfront_share=1)


def exchange_cost(strategy: CPStrategy, shape: AttentionShape, received_tokens: int) -> TransportCost:
    """The cost of a layer whose attention has its own exchange (`AttentionFacts.exchange`): keys and values of
    `received_tokens` of other ranks, in both passes, and their gradients. Attention waits for both. Not compared with
    measured times."""
    received = 3 * received_tokens * shape.kv_bytes
    network = 0 if strategy.node_size == strategy.ranks else received
    held = (shape.tokens / strategy.ranks + received_tokens) * shape.kv_bytes
    return TransportCost(received, network, 8 * held, 2 * held, upfront_share=1)


def slice_count(strategy: CPStrategy, kv_heads: int) -> int:
    """Number of slices of a rank's key/value heads. All have the same width, but the last may be narrower."""
    width = -(-kv_heads // strategy.slices)
    return -(-kv_heads // width)


def gather_buffers(slices: int, kv_bytes: float) -> float:
    """Bytes of two slices of all keys and values, and of their gradients.

    `kv_bytes`: bytes of all gathered keys and values.
    """
    return 2 * min(1, 2 / slices) * kv_bytes


def gather_copies(strategy: CPStrategy, slices: int, q_bytes: float, kv_bytes: float) -> float:
    """Bytes copied and summed around a gather.

    `q_bytes`: bytes of a rank's queries. `kv_bytes`: bytes of all gathered keys and values.
    """
    # With several slices, the inputs are copied head by head and results are written to their rows.
    q_copies, kv_copies = (0, 5) if slices == 1 else (12, 9)
    own = q_copies * q_bytes + kv_copies * kv_bytes / strategy.ranks
    # The gradients of all keys are laid out for their owners and summed there; zigzag shards are also reordered.
    return own + (8 if strategy.layout == "zigzag" else 4) * kv_bytes


def received_kv_bytes(strategy: CPStrategy, shape: AttentionShape) -> float:
    """Bytes of other ranks' keys and values, received in both passes, and of the gradients that come back once."""
    return 3 * (shape.tokens * (1 - 1 / strategy.ranks)) * shape.kv_bytes


class HeadExchange(NamedTuple):
    """Bytes of the exchange of tokens for heads."""

    received: float
    copied: float
    buffers: float


def head_exchange(strategy: CPStrategy, shape: AttentionShape, ranks: int) -> HeadExchange:
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
    return HeadExchange(received, copied, 2 * tokens * (3 * shape.q_bytes + kv_bytes))
