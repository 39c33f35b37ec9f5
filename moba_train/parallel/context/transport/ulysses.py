"""Ulysses: the ranks of a group exchange tokens for heads, and each attends with some heads to all tokens of the group.

After DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). With fewer key/value heads than ranks, each head is sent
to several ranks. If the group holds the complete sequence, attention runs locally (`Local`). If it is one node of
several, another transport takes the tokens of the node as one shard and exchanges them across nodes, with few heads per
rank.

Shape suffixes as in base.py; N rows of all shards of the group, h of the H heads, P ranks of the group.
"""

from torch import Tensor

from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.parallel.context.comm import Communicator, Ranks
from moba_train.parallel.context.layout import contiguous
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.base import (
    ShardedCall,
    Transport,
    padded,
    padded_lse,
    sum_dtype,
    sum_over_ranks,
)
from moba_train.parallel.dims import hierarchical_groups


def make_ulysses(strategy: CPStrategy, ranks: Ranks) -> Transport:
    """The transport `ulysses`."""
    return Ulysses(ranks.communicator, Local())


def make_hierarchical(strategy: CPStrategy, ranks: Ranks) -> Transport:
    """The transport `hierarchical`: Ulysses inside a node, all-gather across nodes."""
    node, across = hierarchical_groups(ranks.group, strategy.node_size, ranks.timeout)
    across_nodes = AllGather(Communicator(across, ranks.device), strategy.slices)
    return Ulysses(Communicator(node, ranks.device), across_nodes)


class Ulysses(Transport):
    """Exchanges tokens for heads; see the top of this file."""

    def __init__(self, communicator: Communicator, across: Transport) -> None:
        """`across`: runs attention to the group's tokens; its `rank` is the index of the group among all groups."""
        self.communicator = communicator
        self.across = across
        self.rank = across.rank * communicator.size + communicator.rank

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Exchange tokens for heads, attend, and exchange the results back."""
        swap = _Swap(self, call)
        q_NhD, k_NhD, v_NhD = swap.to_heads(q_LHD, k_LKD, v_LKD)
        out_NhD, lse_hN, selection = self.across.forward(q_NhD, k_NhD, v_NhD, swap.call)
        out_LHD, lse_LH1 = swap.to_rows(out_NhD, lse_hN.T.unsqueeze(-1))
        lse_Hn = lse_LH1[: call.sequence.tokens(self.rank), :, 0].T.contiguous()
        return out_LHD, padded_lse(lse_Hn, q_LHD.shape[0]), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Exchange tokens for heads, compute the gradients, and exchange them back; copies of heads are summed."""
        swap = _Swap(self, call)
        dout, q, k, v, out, lse_Nh1 = swap.to_heads(*state._replace(lse=state.lse.T.unsqueeze(-1)))
        swapped = BackwardState(dout, q, k, v, out, lse_Nh1.squeeze(-1).T.contiguous())
        dq_LHD, dk_LPD, dv_LPD = swap.to_rows(*self.across.backward(swapped, selection, swap.call))
        kv_heads = state.k.shape[1]
        return dq_LHD, _sum_copies(dk_LPD, kv_heads), _sum_copies(dv_LPD, kv_heads)

    def gather(self, x_LHD: Tensor) -> Tensor:
        """An all-gather in this group, then one among the groups."""
        (shards_PL,) = self.communicator.all_gather(x_LHD.contiguous()).wait()
        return self.across.gather(shards_PL)

    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """The sums among the groups, then one all-to-all in this group."""
        return sum_over_ranks(self.across.sum_shards(x_RLx), self.communicator)

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """The empty selection of this rank's heads for all tokens of the group."""
        swap = _Swap(self, call)
        shapes = ((self.communicator.size * x.shape[0], swap.heads(x.shape[1]), *x.shape[2:]) for x in (q_LHD, k_LKD))
        q_NhD, k_NhD = (q_LHD.new_empty(shape) for shape in shapes)
        return self.across.empty_selection(q_NhD, k_NhD, swap.call)


class _Swap:
    """The exchange of tokens for heads in a group of ranks, for one call."""

    def __init__(self, ulysses: Ulysses, call: ShardedCall) -> None:
        self.communicator = ulysses.communicator
        self.size = self.communicator.size
        place = ulysses.across.rank
        self.group = call.sequence.select_ranks(range(place * self.size, (place + 1) * self.size))
        groups = call.sequence.merge_ranks(self.size)
        self.joint = groups.select_ranks(range(place, place + 1))
        self.call = ShardedCall(call.unsharded, groups)

    def heads(self, heads: int) -> int:
        """Number of heads that each rank gets out of `heads`."""
        return max(1, heads // self.size)

    def to_heads(self, *tensors_LHD: Tensor) -> list[Tensor]:
        """Exchange a shard's rows with all heads [L, H, D] for all rows of the group with some heads [N, h, D]."""
        sent = []
        for x_LHD in tensors_LHD:
            if x_LHD.shape[1] < self.size:
                x_LHD = x_LHD.repeat_interleave(self.size // x_LHD.shape[1], dim=1)
            sent.append(contiguous(x_LHD.unflatten(1, (self.size, -1)).transpose(0, 1)).flatten(0, 1))
        return [self.joint.to_shards(self.group.to_packed(x)) for x in self.communicator.all_to_all(*sent).wait()]

    def to_rows(self, *tensors_NhD: Tensor) -> list[Tensor]:
        """The inverse of `to_heads`; copies of heads are not summed yet, and padding is zero."""
        tokens = self.joint.tokens(0)
        sent = [self.group.to_shards(x_NhD[:tokens]).contiguous() for x_NhD in tensors_NhD]
        received = self.communicator.all_to_all(*sent).wait()
        return [contiguous(x.unflatten(0, (self.size, -1)).transpose(0, 1)).flatten(1, 2) for x in received]


def _sum_copies(x_LPD: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradients of the copies of each key/value head: [L, K, D]."""
    if x_LPD.shape[1] == kv_heads:
        return x_LPD
    return x_LPD.unflatten(1, (kv_heads, -1)).sum(2, dtype=sum_dtype(x_LPD.dtype)).to(x_LPD.dtype)


class Local(Transport):
    """Attention on this rank alone, which holds the complete sequence with padding at its end."""

    rank = 0

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Attend to the complete sequence, without communication."""
        everything = call.against_all(0)
        q, k, v = (x[: call.sequence.total] for x in (q_LHD, k_LKD, v_LKD))
        selection = everything.select(q, everything.summarize(k))
        out_THD, lse_HT = everything.attend(q, k, v, selection)
        return padded(out_THD, q_LHD.shape[0]), padded_lse(lse_HT, q_LHD.shape[0]), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Gradients for the complete sequence, without communication."""
        tokens = slice(0, call.sequence.total)
        here = state.with_queries(tokens).with_keys(state.k[tokens], state.v[tokens])
        grads = call.against_all(0).attend_backward(here, selection)
        dq, dk, dv = (padded(grad, state.q.shape[0]) for grad in grads)
        return dq, dk, dv

    def gather(self, x_LHD: Tensor) -> Tensor:
        """The shard itself: it is the complete sequence."""
        return x_LHD

    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """The rows themselves: there is one rank."""
        return x_RLx

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """The empty selection of the complete sequence."""
        tokens = call.sequence.total
        return call.against_all(0).empty_selection(q_LHD[:tokens], k_LKD[:tokens])
