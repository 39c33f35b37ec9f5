"""The rows before each of a rank's token ranges, from the ranks that hold them.

Shape suffixes: n tokens of this rank, m rows that every rank sends, r ranges of this rank, c rows before each, R ranks.

One rank's shard of a packed sequence, as a layer's kind sees it (attention/shard.py).

Shape suffixes: L rows of a shard (padding included), n tokens in it, T tokens of the sequence, R ranks.

The attention engine of a model whose sequence is sharded over ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moba_train.attention.call import AttentionCall
from moba_train.attention.operator_shard import OperatorShard, all_ranks
from moba_train.attention.operators import OperatorEngine
from moba_train.attention.previous import previous_rows, previous_rows_backward
from moba_train.attention.protocol import BackwardState, Gradients, Layout, Selection, TokenRanges
from moba_train.parallel.context.comm import Ranks
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPStrategy, check_heads, check_merges, check_sizes
from moba_train.parallel.context.transport.base import MakeTransport, ShardedCall, Transport
from moba_train.registry import TRANSPORTS


@dataclass(frozen=True)
class Edges:
    """What a rank sends and receives, so that all ranks have the rows before their ranges."""

    sent_n: Tensor
    """int64: this rank's rows that others need."""
    rows: int
    """m: as many as any rank sends."""
    heads_rc: Tensor
    """int64: which of the rows that all ranks send come before each range; R * m where there is no token."""

    def to_send(self, x_nx: Tensor) -> Tensor:
        """This rank's rows, filled up with zeros: [m, ...]."""
        sent_x = x_nx[self.sent_n]
        return torch.cat([sent_x, sent_x.new_zeros((self.rows - len(sent_x), *sent_x.shape[1:]))])

    def heads(self, sent_Rmx: Tensor) -> Tensor:
        """The rows before each range, [r, c, ...], from those of all ranks; zeros where there is no token."""
        return torch.cat([sent_Rmx, sent_Rmx.new_zeros((1, *sent_Rmx.shape[1:]))])[self.heads_rc]

    def heads_backward(self, grad_rcx: Tensor, ranks: int) -> Tensor:
        """The gradient [R * m, ...] of `heads`."""
        grad_Rmx = grad_rcx.new_zeros((ranks * self.rows + 1, *grad_rcx.shape[2:]))
        return grad_Rmx.index_put_((self.heads_rc,), grad_rcx, accumulate=True)[:-1]


def edges(layout: Layout, sequence: SequenceLayout, rank: int, count: int) -> Edges:
    """The edges of `count` rows before each range of `rank`; kept with the layout of the sequence."""
    return layout.cached(
        ("edges", sequence, rank, count), lambda: _edges(sequence, rank, count, layout.cu_seqlens.device)
    )


def _edges(sequence: SequenceLayout, rank: int, count: int, device: torch.device) -> Edges:
    needed = sorted({token for ranges in sequence.ranges for token in _tokens_before(ranges, count) if token >= 0})
    owned: list[list[int]] = [[] for _ in sequence.ranges]
    for token in needed:
        owned[sequence.owner(token)].append(token)
    rows = max(map(len, owned))
    place = {token: owner * rows + i for owner, tokens in enumerate(owned) for i, token in enumerate(tokens)}
    before = [place.get(token, sequence.ranks * rows) for token in _tokens_before(sequence.ranges[rank], count)]
    sent_n = sequence.local_rows(torch.tensor(owned[rank], dtype=torch.int64), rank)
    heads_rc = torch.tensor(before, dtype=torch.int64).view(-1, count)
    return Edges(sent_n.to(device), rows, heads_rc.to(device))


def _tokens_before(ranges: TokenRanges, count: int) -> Iterator[int]:
    """The `count` tokens before each of the ranges, negative before the sequence."""
    return (token for start, _ in ranges for token in range(start - count, start))


class RankShard(OperatorShard):
    """The tokens of this rank. Attention runs on this rank alone, over keys that it has gathered."""

    def __init__(self, engine: OperatorEngine, layout: Layout, sequence: SequenceLayout, rank: int) -> None:
        """`layout`: of the whole packed sequence; `sequence`: how it is shared."""
        super().__init__(engine, layout)
        self._sequence = sequence
        self.rank = rank
        self.ranks = sequence.ranks
        self._tokens = sequence.tokens(rank)

    @property
    def layout(self) -> Layout:
        """The layout of this rank's queries and all keys."""
        ranges = self._sequence.ranges[self.rank]
        # torch.compile takes no layer as a whole that adds to a layout's cache; what it traces has operators for all
        # that follows from a layout, so that nothing is derived twice.
        if torch.compiler.is_compiling():
            return replace(self._whole, q_ranges=ranges, _cache={})
        return self._whole.part(ranges, None)

    @property
    def ranges_by_rank(self) -> tuple[TokenRanges, ...]:
        """Tokens of each rank: one range, or two under the zigzag layout, or none."""
        return self._sequence.ranges

    def own(self, x_Lx: Tensor) -> Tensor:
        """The rows before the padding."""
        return x_Lx[: self._tokens]

    def padded(self, x_nx: Tensor) -> Tensor:
        """Zeros appended up to the rows of a shard."""
        missing = self._sequence.rows - self._tokens
        return F.pad(x_nx, (0, 0) * (x_nx.dim() - 1) + (0, missing)) if missing else x_nx

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows of all ranks in the order of the packed sequence, by one all-gather; gradients are sent back to the
        owners, which sum them in float32 or float64."""
        return self._sequence.to_packed(self._all_shards(self.padded(x_nx)))

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` of all ranks, [R, ...], by one all-gather."""
        return self._all_shards(x.unsqueeze(0))

    def _all_shards(self, x_Lx: Tensor) -> Tensor:
        return all_ranks(x_Lx, self._sequence.ranks, self._engine.handle)


_sequence = lru_cache(maxsize=64)(SequenceLayout.split)


class ContextParallel(OperatorEngine):
    """Attention of this rank's queries to the keys of all ranks.

    It takes this rank's shard of q, k and v (`SequenceLayout.shard`: tokens in ascending order, then padding) and the
    layout of the whole packed sequence. Results and selected blocks are those of one device; rows of padding have
    out = 0, lse = -inf. All ranks must call it with the same attention, layout and shapes.
    """

    def __init__(self, strategy: CPStrategy, transport: Transport) -> None:
        """`transport`: implements `strategy`; `context_engine` creates both."""
        self.strategy = strategy
        self.transport = transport

    @property
    def rank(self) -> int:
        """Index of this rank in the context-parallel group, and of its shard."""
        return self.transport.rank

    def sequence(self, total: int) -> SequenceLayout:
        """The layout of a packed sequence of `total` tokens over the ranks."""
        arguments = total, self.strategy.ranks, self.strategy.layout
        # What torch.compile traces may not fill a cache.
        return SequenceLayout.split(*arguments) if torch.compiler.is_compiling() else _sequence(*arguments)

    def shard(self, layout: Layout) -> RankShard:
        """This rank's part of a packed sequence, for kinds that gather what they need of the other ranks."""
        return RankShard(self, layout, self.sequence(int(layout.total)), self.rank)

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` of all ranks, one after the other in rank order."""
        return self.transport.gather(x)

    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """The sum over the ranks of what they have for this rank, summed in float32 or float64."""
        return self.transport.sum_shards(x_RLx)

    def previous(self, x_nx: Tensor, layout: Layout, count: int) -> Tensor:
        """The rows before each of this rank's ranges come from their owners, by one small all-gather."""
        sequence = self.sequence(int(layout.total))
        found = edges(layout, sequence, self.rank, count)
        heads_rcx = found.heads(self.all_ranks(found.to_send(x_nx)))
        return previous_rows(x_nx, heads_rcx, layout.part(sequence.ranges[self.rank], None))

    def previous_backward(self, grad_cnx: Tensor, layout: Layout) -> Tensor:
        """The gradients of rows that other ranks hold go to them, by one small all-to-all."""
        sequence = self.sequence(int(layout.total))
        found = edges(layout, sequence, self.rank, len(grad_cnx))
        part = layout.part(sequence.ranges[self.rank], None)
        grad_nx, heads_rcx = previous_rows_backward(grad_cnx, part)
        sent_x = self.sum_shards(found.heads_backward(heads_rcx, sequence.ranks))
        return grad_nx.index_add_(0, found.sent_n, sent_x[: len(found.sent_n)])

    def gather(self, x_LHD: Tensor, total: int) -> Tensor:
        """A whole sequence of `total` tokens, [T, ...], from this rank's shard and those of the others.

        Not differentiable, and no computation runs beside it: for evaluations.
        """
        return self.sequence(total).to_packed(self.transport.gather(x_LHD))

    def gather_tokens(self, x_LHD: Tensor, tokens_n: Tensor, total: int) -> Tensor:
        """The rows of these tokens of a whole sequence, [n, ...], on every rank; see `gather`."""
        rows_n = self.sequence(total).local_rows(tokens_n, self.rank)
        own_nHD = x_LHD[rows_n.clamp(min=0)]
        own_nHD[rows_n < 0] = 0
        return self.transport.gather(own_nHD).unflatten(0, (-1, len(tokens_n))).sum(0)

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Attention of this rank's queries: (out, lse, selection), with one row per row of the shard."""
        return self.transport.forward(q_THD, k_SKD, v_SKD, self._sharded(q_THD, k_SKD, call))

    def backward(self, state: BackwardState, selection: Selection, call: AttentionCall) -> Gradients:
        """Gradients of this rank's shard: (dq, dk, dv)."""
        return self.transport.backward(state, selection, self._sharded(state.q, state.k, call))

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, call: AttentionCall) -> Selection:
        """Tensors shaped like `forward`'s selection, with undefined contents, for tracing by torch.compile."""
        return self.transport.empty_selection(q_THD, k_SKD, self._sharded(q_THD, k_SKD, call))

    def _sharded(self, q_LHD: Tensor, k_LKD: Tensor, call: AttentionCall) -> ShardedCall:
        """Raises ValueError, before any message, for shapes that the transport cannot do."""
        total = call.layout.total
        sequence = self.sequence(int(total))
        if q_LHD.shape[0] != sequence.rows:
            raise ValueError(
                f"q: {q_LHD.shape[0]} rows given, {sequence.rows} needed: this rank's shard of {total} tokens"
            )
        check_heads(self.strategy, q_LHD.shape[1], k_LKD.shape[1], call.attention.couples_heads)
        check_merges(self.strategy, call.attention.merges)
        return ShardedCall(call, sequence)


def context_engine(
    strategy: CPStrategy, group: ProcessGroup, device: torch.device, timeout: timedelta | None = None
) -> ContextParallel:
    """Create the engine for the ranks of `group`, in their order, with all its connections.

    Collective over the whole world: every rank calls it with the same strategy and its own group. `timeout`: of the
    groups that it creates. Raises ValueError, naming the YAML key, for an impossible strategy.
    """
    size = group.size()
    if size != strategy.ranks:
        raise ValueError(f"parallel.cp: {strategy.ranks} given, the group has {size} ranks")
    check_sizes(strategy)
    make = cast(MakeTransport, TRANSPORTS[strategy.transport])
    return ContextParallel(strategy, make(strategy, Ranks(group, device, timeout)))
