"""The attention engine of a model whose sequence is sharded over ranks, and the shard that a layer's kind sees.

Shape suffixes: L rows of a shard (padding included), n tokens in it, T tokens of the sequence, R ranks.
"""

from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.handles import by_handle
from moba_train.attention.layout import Layout
from moba_train.attention.operators import AcrossRanks
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection
from moba_train.attention.shard import Shard, ShardPlace, padded
from moba_train.parallel.context.comm import Ranks
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.policy import check_sizes, transport_spec
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.base import ShardedCall, Transport

_sequence = lru_cache(maxsize=64)(SequenceLayout.split)


class ContextParallel(OperatorEngine, AcrossRanks):
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

    def shard(self, layout: Layout) -> "RankShard":
        """This rank's part of a packed sequence, for kinds that gather what they need of the other ranks."""
        return RankShard(self, layout, self.sequence(int(layout.total)))

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
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor, Selection]:
        """Attention of this rank's queries: (out, lse, selection), with one row per row of the shard."""
        call = self._sharded(q_LHD, k_LKD, attention, layout)
        return self._exchange(call, q_LHD.device).forward(q_LHD, k_LKD, v_LKD, call)

    def backward(
        self, state: BackwardState, selection: Selection, attention: LocalAttention, layout: Layout
    ) -> Gradients:
        """Gradients of this rank's shard: (dq, dk, dv)."""
        call = self._sharded(state.q, state.k, attention, layout)
        return self._exchange(call, state.q.device).backward(state, selection, call)

    def _exchange(self, call: ShardedCall, device: torch.device) -> Any:
        """The transport, or the attention's own exchange, if it has one and the transport a communicator for it."""
        make = call.attention.facts.exchange
        communicator = self.transport.of_all_ranks
        return self.transport if make is None or communicator is None else make(communicator, call, device)

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, attention: LocalAttention, layout: Layout) -> Selection:
        """Tensors shaped like `forward`'s selection, with undefined contents, for tracing by torch.compile."""
        return self.transport.empty_selection(q_LHD, k_LKD, self._sharded(q_LHD, k_LKD, attention, layout))

    def _sharded(self, q_LHD: Tensor, k_LKD: Tensor, attention: LocalAttention, layout: Layout) -> ShardedCall:
        """Raises ValueError, before any message, for shapes that the transport cannot do."""
        sequence = self.sequence(int(layout.total))
        if q_LHD.shape[0] != sequence.rows:
            raise ValueError(
                f"q: {q_LHD.shape[0]} rows given, {sequence.rows} needed: this rank's shard of {layout.total} tokens"
            )
        heads, kv_heads = q_LHD.shape[1], k_LKD.shape[1]
        transport_spec(self.strategy.transport).check_attention(self.strategy, heads, kv_heads, attention.facts)
        return ShardedCall(attention, layout, sequence)


class RankShard(Shard):
    """The tokens of this rank. Attention runs on this rank alone, over keys that it has gathered."""

    def __init__(self, engine: ContextParallel, layout: Layout, sequence: SequenceLayout) -> None:
        """`layout`: of the whole packed sequence; `sequence`: how it is shared."""
        super().__init__(engine, layout)
        self._sequence = sequence
        self._rank = engine.rank

    @property
    def layout(self) -> Layout:
        """The layout of this rank's queries and all keys."""
        ranges = self._sequence.ranges[self._rank]
        # torch.compile takes no layer as a whole that adds to a layout's cache; what it traces has operators for all
        # that follows from a layout, so that nothing is derived twice.
        if torch.compiler.is_compiling():
            return replace(self._whole, q_ranges=ranges, _cache={})
        return self._whole.part(ranges, None)

    @property
    def place(self) -> ShardPlace:
        """A rank has one range of tokens, or two under the zigzag layout, or none."""
        return ShardPlace(self._rank, self._sequence.ranges)

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows of all ranks in the order of the packed sequence, by one all-gather; gradients are sent back to the
        owners, which sum them in float32 or float64."""
        rows_Lx = padded(x_nx, self._sequence.rows)
        return self._sequence.to_packed(_all_ranks(rows_Lx, self._sequence.ranks, self._engine.handle))

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` of all ranks, [R, ...], by one all-gather."""
        return _all_ranks(x.unsqueeze(0), self._sequence.ranks, self._engine.handle)


@torch.library.custom_op("moba_train::all_ranks", mutates_args=())
def _all_ranks(x: Tensor, ranks: int, engine: str) -> Tensor:
    """`x` [L, ...] of all ranks, [R * L, ...], by the transport of an engine (attention/handles.py). Its derivative is
    `_sum_shards`, and the reverse."""
    running: ContextParallel = by_handle(engine)
    # A copy: with one rank the transport returns its argument, and an operator's result must be no alias of that.
    return running.transport.gather(x.contiguous()).clone()


@torch.library.custom_op("moba_train::sum_shards", mutates_args=())
def _sum_shards(x: Tensor, ranks: int, engine: str) -> Tensor:
    running: ContextParallel = by_handle(engine)
    return running.transport.sum_shards(x.contiguous()).clone()


@_all_ranks.register_fake
def _(x: Tensor, ranks: int, engine: str) -> Tensor:
    return x.new_empty((ranks * x.shape[0], *x.shape[1:]))


@_sum_shards.register_fake
def _(x: Tensor, ranks: int, engine: str) -> Tensor:
    return x.new_empty((x.shape[0] // ranks, *x.shape[1:]))


def _keep_engine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.where = inputs
    ctx.kept_alive = by_handle(inputs[-1])


def _sum_of_all(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _sum_shards(grad, *ctx.where), None, None


def _all_of_the_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _all_ranks(grad, *ctx.where), None, None


_all_ranks.register_autograd(_sum_of_all, setup_context=_keep_engine)
_sum_shards.register_autograd(_all_of_the_sum, setup_context=_keep_engine)


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
    transport = transport_spec(strategy.transport).make(strategy, Ranks(group, device, timeout))
    return ContextParallel(strategy, transport)
