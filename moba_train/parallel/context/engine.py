"""The attention engine of a model whose sequence is cut over ranks."""

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moba_train.attention.call import AttentionCall
from moba_train.attention.operators import OperatorEngine
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.parallel.context.choose import Scheme, check_heads, check_sizes
from moba_train.parallel.context.comm import Peers, nested_groups
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.base import ShardedCall, Transport
from moba_train.parallel.context.transport.ring import Ring
from moba_train.parallel.context.transport.ulysses import Ulysses, Whole


class ContextParallel(OperatorEngine):
    """Attention of this rank's queries to the keys of all ranks.

    Called with this rank's shard of q, k and v (`SequenceLayout.shard`: tokens in ascending order, then padding) and
    the layout of the whole packed sequence. The result is what one device would compute, and the selection is equal;
    padded rows give out = 0, lse = -inf. All ranks must call it alike: same attention, layout and shapes.
    """

    def __init__(self, scheme: Scheme, transport: Transport) -> None:
        """Use `context_engine`, unless `transport` is your own."""
        self.scheme, self.transport = scheme, transport

    @property
    def rank(self) -> int:
        """This rank's place in the context group: which shard it holds."""
        return self.transport.rank

    def sequence(self, total: int) -> SequenceLayout:
        """How a packed sequence of `total` tokens is cut."""
        return SequenceLayout.cut(total, self.scheme.ranks, self.scheme.layout)

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """(out, lse, selection) of this rank's rows, by the transport."""
        return self.transport.forward(q_THD, k_SKD, v_SKD, self._sharded(q_THD, k_SKD, call))

    def backward(self, state: BackwardState, selection: Selection, call: AttentionCall) -> Gradients:
        """(dq, dk, dv) of this rank's rows, by the transport."""
        return self.transport.backward(state, selection, self._sharded(state.q, state.k, call))

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, call: AttentionCall) -> Selection:
        """Shapes and dtypes of the selection that the transport returns."""
        return self.transport.empty_selection(q_THD, k_SKD, self._sharded(q_THD, k_SKD, call))

    def _sharded(self, q_LHD: Tensor, k_LKD: Tensor, call: AttentionCall) -> ShardedCall:
        """Raises ValueError, before anything is sent, for what the transport cannot do."""
        total = call.layout.total
        sequence = self.sequence(int(total))
        if q_LHD.shape[0] != sequence.rows:
            raise ValueError(
                f"q: {q_LHD.shape[0]} rows given, {sequence.rows} needed: this rank's shard of {total} tokens"
            )
        check_heads(self.scheme, q_LHD.shape[1], k_LKD.shape[1], call.attention.couples_heads)
        return ShardedCall(call, sequence)


def context_engine(
    scheme: Scheme, group: ProcessGroup, device: torch.device, timeout: timedelta | None = None
) -> ContextParallel:
    """The engine for the ranks of `group`, in their order. Sets up all communication. `timeout`: of groups made here.

    Every rank of the world must call it, with the same scheme and its own group. Raises ValueError for sizes that do
    not fit.
    """
    size = group.size()
    if size != scheme.ranks:
        raise ValueError(f"parallel.cp: {scheme.ranks} given, the group has {size} ranks")
    check_sizes(scheme)
    transport: Transport
    if scheme.transport == "ring":
        transport = Ring(Peers(group, device), scheme.ring_depth)
    elif scheme.transport == "allgather":
        transport = AllGather(Peers(group, device), scheme.slices)
    elif scheme.transport == "ulysses":
        transport = Ulysses(Peers(group, device), Whole())
    else:
        node, across = nested_groups(group, scheme.node, timeout)
        transport = Ulysses(Peers(node, device), AllGather(Peers(across, device), scheme.slices))
    return ContextParallel(scheme, transport)
