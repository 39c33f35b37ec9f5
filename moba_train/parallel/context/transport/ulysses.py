"""The ranks of a group exchange tokens for heads: each attends with some heads to all tokens of the group.

After DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Where there are fewer key/value heads than ranks, each
is sent to several. When the group is all there is, attention sees whole sequences (`Whole`); when it is one node of
many, another transport takes the tokens of the node as one shard and goes on across nodes, with few heads per rank.

Shape suffixes as in base.py; N rows of all shards of the group, h of the H heads, P ranks of the group.
"""

from torch import Tensor

from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.parallel.context.comm import Peers
from moba_train.parallel.context.copies import contiguous
from moba_train.parallel.context.transport.base import ShardedCall, Transport, padded, padded_lse, sum_dtype


class Ulysses(Transport):
    """See above."""

    def __init__(self, peers: Peers, across: Transport) -> None:
        """`across` runs attention over the group's tokens; its `rank` is the group's place among all groups."""
        self.peers, self.across = peers, across
        self.rank = across.rank * peers.size + peers.rank

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """(out, lse, selection): attends with some heads to all tokens of the group."""
        swap = _Swap(self, call)
        q_NhD, k_NhD, v_NhD = swap.to_heads(q_LHD, k_LKD, v_LKD)
        out_NhD, lse_hN, selection = self.across.forward(q_NhD, k_NhD, v_NhD, swap.call)
        out_LHD, lse_LH1 = swap.to_rows(out_NhD, lse_hN.T.unsqueeze(-1))
        lse_Hn = lse_LH1[: call.sequence.tokens(self.rank), :, 0].T.contiguous()
        return out_LHD, padded_lse(lse_Hn, q_LHD.shape[0]), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """(dq, dk, dv): the gradients of a key/value head's copies are summed."""
        swap = _Swap(self, call)
        dout, q, k, v, out, lse_Nh1 = swap.to_heads(*state._replace(lse=state.lse.T.unsqueeze(-1)))
        swapped = BackwardState(dout, q, k, v, out, lse_Nh1.squeeze(-1).T.contiguous())
        dq_LHD, dk_LPD, dv_LPD = swap.to_rows(*self.across.backward(swapped, selection, swap.call))
        kv_heads = state.k.shape[1]
        return dq_LHD, _sum_copies(dk_LPD, kv_heads), _sum_copies(dv_LPD, kv_heads)

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """Shapes and dtypes of the selection for this rank's heads."""
        swap = _Swap(self, call)
        shapes = ((self.peers.size * x.shape[0], swap.heads(x.shape[1]), *x.shape[2:]) for x in (q_LHD, k_LKD))
        q_NhD, k_NhD = (q_LHD.new_empty(shape) for shape in shapes)
        return self.across.empty_selection(q_NhD, k_NhD, swap.call)


class _Swap:
    """The exchange between the ranks of a group, for one call."""

    def __init__(self, ulysses: Ulysses, call: ShardedCall) -> None:
        self.peers, self.size = ulysses.peers, ulysses.peers.size
        place = ulysses.across.rank
        self.group = call.sequence.of(range(place * self.size, (place + 1) * self.size))
        groups = call.sequence.in_groups(self.size)
        self.joint = groups.of(range(place, place + 1))
        self.call = ShardedCall(call.whole, groups)

    def heads(self, heads: int) -> int:
        """How many of so many heads a rank gets."""
        return max(1, heads // self.size)

    def to_heads(self, *tensors_LHD: Tensor) -> list[Tensor]:
        """Shards of rows [L, H, D] with all heads to all rows of the group [N, h, D] with some heads."""
        sent = []
        for x_LHD in tensors_LHD:
            if x_LHD.shape[1] < self.size:
                x_LHD = x_LHD.repeat_interleave(self.size // x_LHD.shape[1], dim=1)
            sent.append(contiguous(x_LHD.unflatten(1, (self.size, -1)).transpose(0, 1)).flatten(0, 1))
        return [self.joint.to_shards(self.group.to_packed(x)) for x in self.peers.all_to_all(*sent).wait()]

    def to_rows(self, *tensors_NhD: Tensor) -> list[Tensor]:
        """The inverse of `to_heads`, copies of heads not yet summed; padding becomes 0."""
        tokens = self.joint.tokens(0)
        sent = [self.group.to_shards(x_NhD[:tokens]).contiguous() for x_NhD in tensors_NhD]
        received = self.peers.all_to_all(*sent).wait()
        return [contiguous(x.unflatten(0, (self.size, -1)).transpose(0, 1)).flatten(1, 2) for x in received]


def _sum_copies(x_LPD: Tensor, kv_heads: int) -> Tensor:
    """Add up the gradients of the copies of each key/value head: [L, K, D]."""
    if x_LPD.shape[1] == kv_heads:
        return x_LPD
    return x_LPD.unflatten(1, (kv_heads, -1)).sum(2, dtype=sum_dtype(x_LPD.dtype)).to(x_LPD.dtype)


class Whole(Transport):
    """No transport: all tokens are here, as on one device, with padding behind."""

    rank = 0

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """(out, lse, selection) as on one device."""
        everything = call.against_all(0)
        q, k, v = (x[: call.sequence.total] for x in (q_LHD, k_LKD, v_LKD))
        selection = everything.select(q, everything.summarize(k))
        out_THD, lse_HT = everything.attend(q, k, v, selection)
        return padded(out_THD, q_LHD.shape[0]), padded_lse(lse_HT, q_LHD.shape[0]), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """(dq, dk, dv) as on one device."""
        tokens = slice(0, call.sequence.total)
        here = state.with_queries(tokens).with_keys(state.k[tokens], state.v[tokens])
        grads = call.against_all(0).attend_backward(here, selection)
        dq, dk, dv = (padded(grad, state.q.shape[0]) for grad in grads)
        return dq, dk, dv

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """Shapes and dtypes of the selection for all tokens."""
        tokens = call.sequence.total
        return call.against_all(0).empty_selection(q_LHD[:tokens], k_LKD[:tokens])
