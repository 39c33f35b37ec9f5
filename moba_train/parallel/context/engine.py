"""The attention engine of a model whose sequence is sharded over ranks."""

from datetime import timedelta
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moba_train.attention.call import AttentionCall
from moba_train.attention.operators import OperatorEngine
from moba_train.attention.previous import previous_rows, previous_rows_backward
from moba_train.attention.protocol import BackwardState, Gradients, Layout, Selection
from moba_train.parallel.context.checks import check_heads, check_merges, check_sizes
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.edges import edges
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.shard import RankShard
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.base import ShardedCall, Transport
from moba_train.parallel.context.transport.dispatch import Dispatch
from moba_train.parallel.context.transport.ring import make_ring
from moba_train.parallel.context.transport.ulysses import Local, Ulysses
from moba_train.parallel.dims import hierarchical_groups

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
    transport: Transport
    if strategy.transport == "ring":
        transport = make_ring(Communicator(group, device), strategy)
    elif strategy.transport == "allgather":
        transport = AllGather(Communicator(group, device), strategy.slices)
    elif strategy.transport == "ulysses":
        transport = Ulysses(Communicator(group, device), Local())
    elif strategy.transport == "dispatch":
        transport = Dispatch(Communicator(group, device))
    else:
        node, across = hierarchical_groups(group, strategy.node_size, timeout)
        transport = Ulysses(Communicator(node, device), AllGather(Communicator(across, device), strategy.slices))
    return ContextParallel(strategy, transport)
