"""Sharding of a sequence over a context-parallel group, and shape of the attention it is made for: plain data."""

from dataclasses import dataclass, field

from moba_train.attention.protocol import AttentionFacts, LocalAttention
from moba_train.config.parallel import CPLayout


@dataclass(frozen=True)
class CPStrategy:
    """Sharding of a sequence's tokens over ranks, and the ranks' exchange of queries, keys and values."""

    ranks: int
    """Ranks of the context-parallel group: `parallel.cp`."""
    transport: str
    """Name in the registry `TRANSPORTS`."""
    layout: CPLayout
    node_size: int
    """Consecutive ranks of the group that share a node; `ranks` if all do."""
    ring_depth: int | None = None
    """Buffers of the ring for the chunks of other ranks; None: one for each rank. See `chunks_per_call`."""
    slices: int = 1
    """Transfers, each with some of the key/value heads, in which keys and values are gathered; at most one for each
    head. Two slices are in memory at once. For transports that gather in slices."""

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
    facts: AttentionFacts = field(default_factory=AttentionFacts)
    """Facts that hold for the local attentions of all layers together."""
    attentions: tuple[LocalAttention, ...] = ()
    """The local attentions of all layers, for a transport that asks more of them."""

    @property
    def q_bytes(self) -> int:
        """Bytes of one token's queries; its output has the same size."""
        return self.heads * self.head_dim * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes
