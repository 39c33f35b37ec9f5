"""How a sequence is shared by the ranks of a context-parallel group, and the attention it is shared for: plain data.

What a transport cannot do: numbers of ranks, buffers, heads and attentions that it does not support.
"""

from dataclasses import dataclass
from typing import get_args

from moba_train.config.run import CPLayout, CPTransport

GATHERING_TRANSPORTS: tuple[CPTransport, ...] = ("allgather", "hierarchical")
"""Transports that gather keys and values, in slices of heads."""


@dataclass(frozen=True)
class CPStrategy:
    """How the tokens of a sequence are sharded over ranks, and how the ranks exchange queries, keys and values."""

    ranks: int
    """Ranks of the context-parallel group: `parallel.cp`."""
    transport: CPTransport
    layout: CPLayout
    node_size: int
    """Consecutive ranks of the group that share a node; `ranks` if all do."""
    ring_depth: int | None = None
    """Buffers of the ring for the chunks of other ranks; None: one for each rank. See `chunks_per_call`."""
    slices: int = 1
    """Transfers, each with some of the key/value heads, in which allgather and hierarchical gather keys and values; at
    most one for each head. Two slices are in memory at once."""

    @property
    def chunks_per_call(self) -> int:
        """Ranks, at most, whose keys and values one attention call of the ring takes.

        Inside a node all of them, after they have arrived: transfers take little time there, while calls over a part of
        the keys run slower kernels and their results must be merged. With buffers for half of the ranks or fewer, one
        chunk less than there are buffers. Between nodes also no more than a node has ranks, so that the chunks of the
        next call travel during this one; that is a choice, not measured.
        """
        depth = min(self.ring_depth or self.ranks, self.ranks)
        if self.node_size == self.ranks and 2 * depth > self.ranks:
            return self.ranks  # with more buffers than half, calls over parts would need more memory than this
        return min(self.node_size, depth - 1)


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one layer's attention that decide what its transport costs and whether it is possible."""

    tokens: int
    """Tokens of the whole packed sequence."""
    heads: int
    """Query heads on one rank, after tensor parallelism."""
    kv_heads: int
    """Key/value heads on one rank, after tensor parallelism."""
    head_dim: int
    element_bytes: int = 2
    """Bytes of one number of a query, key or value."""
    couples_heads: bool = False
    """Whether `LocalAttention.couples_heads` holds for any layer."""
    selected_units: int | None = None
    """Units that a query selects besides its own, at most, in any layer (`UnitAttention.selected`); None: queries
    cannot be sent to the owners of keys in every layer."""
    merges: bool = True
    """Whether `LocalAttention.merges` holds for all layers."""

    @property
    def q_bytes(self) -> int:
        """Bytes of one token's queries; its output has the same size."""
        return self.heads * self.head_dim * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes


def check_sizes(strategy: CPStrategy) -> None:
    """Raises ValueError, naming the YAML key, for a strategy that is impossible with any attention."""
    transport = strategy.transport
    if transport not in get_args(CPTransport):
        raise ValueError(f"parallel.cp_transport: {transport!r} given, allowed: {', '.join(get_args(CPTransport))}")
    if strategy.ranks < 1:
        raise ValueError(f"parallel.cp: {strategy.ranks} given, at least 1 needed")
    if strategy.ring_depth is not None and strategy.ring_depth < 2:
        raise ValueError(
            f"parallel.cp_ring_depth: {strategy.ring_depth} given, at least 2 needed (one to send, one to receive)"
        )
    if transport == "hierarchical" and (
        strategy.ranks % strategy.node_size or not 1 < strategy.node_size < strategy.ranks
    ):
        raise ValueError(
            f"parallel.cp_transport: 'hierarchical' needs several nodes with the same number of ranks, at least 2 in "
            f"each; parallel.cp is {strategy.ranks}, with {strategy.node_size} in a node; use ulysses, allgather or "
            f"ring"
        )


def check_heads(strategy: CPStrategy, heads: int, kv_heads: int, couples_heads: bool) -> None:
    """Raises ValueError, naming the YAML key, when the transport cannot divide these heads among its ranks.

    `heads`, `kv_heads`, `couples_heads`: see `AttentionShape`.
    """
    if strategy.transport not in ("ulysses", "hierarchical"):
        return
    transport = strategy.transport
    ranks = strategy.node_size if transport == "hierarchical" else strategy.ranks
    if heads % ranks:
        raise ValueError(
            f"parallel.cp_transport: {transport!r} cannot share {heads} query heads among {ranks} ranks; use allgather "
            f"or ring, or set parallel.cp so that the heads are divisible"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"parallel.cp_transport: {transport!r} cannot share {kv_heads} key/value heads among {ranks} ranks: one "
            f"number must divide the other; use allgather or ring"
        )
    if couples_heads and kv_heads % ranks:
        raise ValueError(
            f"parallel.cp_transport: {transport!r} would split the query heads of {kv_heads} key/value heads among "
            f"{ranks} ranks, but an attention selects blocks for them together (attention.moba.select: group); use "
            f"allgather or ring, or select: head"
        )


def check_units(strategy: CPStrategy, selected_units: int | None) -> None:
    """Raises ValueError, naming the YAML key, when the transport needs units that an attention does not select.

    `selected_units`: see `AttentionShape`.
    """
    if strategy.transport == "dispatch" and selected_units is None:
        raise ValueError(
            "parallel.cp_transport: 'dispatch' sends queries to the owners of the blocks that they select, and an "
            "attention of these layers selects none or cannot attend to one at a time; use another transport"
        )


def check_merges(strategy: CPStrategy, merges: bool) -> None:
    """Raises ValueError, naming the YAML key, when the transport attends to some of the keys after the others and the
    results do not merge.

    `merges`: see `AttentionShape`.
    """
    if strategy.transport == "ring" and strategy.chunks_per_call < strategy.ranks and not merges:
        raise ValueError(
            "parallel.cp_transport: 'ring' attends to the keys of some ranks after those of others when it spans "
            "several nodes or has few buffers (parallel.cp_ring_depth), but a layer adds up the results of its blocks, "
            "which cannot be merged over parts of a block's keys (attention.moba_v1.merge: sum or gate, kind "
            "moba_v05); inside a node leave parallel.cp_ring_depth out, or use allgather, ulysses, hierarchical or "
            "dispatch"
        )
