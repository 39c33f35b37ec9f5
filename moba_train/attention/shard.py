"""The rows of the packed sequence that a layer is given, and the way to the others.

A kind whose selection has parameters, that convolves, compresses or carries states, is one program for one device, for
context parallelism and for generation: it computes with its own rows, gathers what it needs of the others, and attends
from its own queries to all keys. An engine gives it the shard (`kind.Engine`).

Shape suffixes: L rows given to the layer (padding included), n tokens among them, T tokens of the sequence, R ranks,
B running sequences, H query heads, K key/value heads, D head width, C selected blocks of a query.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moba_train.attention.protocol import Layout, LocalAttention, TokenRanges
from moba_train.attention.statistics import Statistics


class ShardCall(NamedTuple):
    """Attention of a shard's tokens to the keys of all tokens so far."""

    q_nHD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    attention: LocalAttention
    selected_HnC: Tensor | None
    """int32: the history blocks that the kind gives the attention; None where it gives none."""
    layout: Layout


class ShardObserver:
    """Sees what a layer does with its shard. The base class does nothing."""

    def attending(self, call: ShardCall) -> AbstractContextManager[object]:
        """The context in which `Shard.attend` runs."""
        return nullcontext()

    def could_select(self, call: ShardCall) -> None:
        """Called by a kind that has a gate and attends to everything all the same: what the gate would select."""

    def report(self, statistics: Statistics) -> None:
        """Called by a kind with what no one sees from outside: states, gates of its own."""


class Shard(Protocol):
    """One layer's part of a packed sequence.

    On one device it is the whole sequence; under context parallelism, the rows of this rank; while tokens are
    generated, the new rows, after those that the cache holds. All ranks must make the same calls in the same order.
    """

    @property
    def layout(self) -> Layout:
        """The sequence, with this layer's tokens as its queries and all tokens so far as its keys."""
        ...

    @property
    def attends_to_all(self) -> bool:
        """Whether tokens are being generated with `decode: full`: then a kind that selects keys attends to all."""
        ...

    @property
    def ranks(self) -> int:
        """Ranks that share the sequence, R; 1: what this rank gathers is all there is."""
        ...

    @property
    def rank(self) -> int:
        """This rank's number among those that share the sequence, from 0."""
        ...

    @property
    def ranges_by_rank(self) -> tuple[TokenRanges, ...]:
        """Tokens of each rank that shares the sequence, known on the host; the new ones while tokens are generated."""
        ...

    @property
    def generates(self) -> bool:
        """Whether tokens are being generated, so that what later tokens need must be kept."""
        ...

    def own(self, x_Lx: Tensor) -> Tensor:
        """The rows that carry tokens, [n, ...], without padding: in the order of the layout's queries."""
        ...

    def padded(self, x_nx: Tensor) -> Tensor:
        """The inverse of `own`: [L, ...], zeros for padding."""
        ...

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows of all tokens so far, [T, ...], from those of this layer's tokens; differentiable.

        `name` is unique in the layer's kind: while tokens are generated, the rows are kept under it.
        """
        ...

    def previous(self, name: str, x_nx: Tensor, count: int) -> list[Tensor]:
        """Rows of the tokens 1, 2, ... `count` before each of this layer's tokens, [n, ...] each; differentiable.

        Zeros where the document has no such token. Only the few rows that other ranks need travel. `name`: as for
        `gather`.
        """
        ...

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` of all ranks that share the sequence, [R, ...], in rank order; differentiable. Shapes must agree."""
        ...

    def states(self, name: str) -> Tensor | None:
        """What `keep_states` kept for the running sequences, [B, ...], zeros for those that have nothing yet.

        None where no sequence has, and where no tokens are generated. B counts the layout's query ranges.
        """
        ...

    def keep_states(self, name: str, states_Bx: Tensor) -> None:
        """Keep a state for each of the running sequences, in place of the one before; only while tokens are generated.

        `name` is unique in the layer's kind.
        """
        ...

    def attend(
        self, q_nHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, selected_HnC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out [n, H, D], lse [H, n]) of this layer's tokens over the keys of all tokens so far.

        `selected_HnC`: the history blocks that each query attends to, for an attention that is given them
        (blocks/given.py); else it summarizes and selects by itself. Differentiable in q, k and v; no gradient passes
        `lse`.
        """
        ...

    @property
    def observer(self) -> ShardObserver | None:
        """Who looks at what the layer does, a probe or the dump of a spike for example. Kinds compute what only an
        observer asks for where there is one."""
        ...


class ObservedShard:
    """A shard that someone looks at; else the shard itself. A `Shard`."""

    def __init__(self, shard: Shard, observer: ShardObserver) -> None:
        self._shard = shard
        self.observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)

    def attend(
        self, q_nHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, selected_HnC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The shard's own, looked at."""
        call = ShardCall(q_nHD, k_TKD, v_TKD, attention, selected_HnC, self._shard.layout)
        with self.observer.attending(call):
            return self._shard.attend(*call[:-1])
