"""Ulysses: the ranks of a group exchange tokens for heads, and each attends with some heads to all tokens of the group.

After DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). With fewer key/value heads than ranks, each head is sent
to several ranks. If the group holds the complete sequence, attention runs locally (`Local`). If it is one node of
several, another transport takes the tokens of the node as one shard and exchanges them across nodes, with few heads per
rank.

Shape suffixes as in base.py; N rows of all shards of the group, h of the H heads, P ranks of the group.
"""

from dataclasses import replace

from torch import Tensor

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.protocol import AttentionFacts, BackwardState, Gradients, Selection
from moba_train.attention.shard import padded
from moba_train.parallel.context.comm import Communicator, Ranks
from moba_train.parallel.context.costs import (
    TransportCost,
    gather_buffers,
    gather_copies,
    head_exchange,
    slice_count,
)
from moba_train.parallel.context.layout import contiguous
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.base import (
    ShardedCall,
    Transport,
    TransportSpec,
    padded_lse,
)
from moba_train.parallel.dims import hierarchical_groups
from moba_train.parallel.links import LINKS


class UlyssesSpec(TransportSpec):
    """The transport `ulysses`."""

    name = "ulysses"

    def make(self, strategy: CPStrategy, ranks: Ranks) -> Transport:
        """Over the group's own connections."""
        return Ulysses(ranks.communicator, Local())

    def cost(self, strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
        """Tokens exchanged for heads, among all ranks."""
        exchange = head_exchange(strategy, shape, strategy.ranks)
        within = strategy.node_size / strategy.ranks
        node_bytes = exchange.received * within
        network_bytes = exchange.received * (1 - within)
        return TransportCost(node_bytes, network_bytes, exchange.copied, exchange.buffers, upfront_share=1)

    def check_attention(self, strategy: CPStrategy, heads: int, kv_heads: int, facts: AttentionFacts) -> None:
        """Raises ValueError for heads that the ranks cannot share."""
        _check_heads(self.name, strategy.ranks, heads, kv_heads, facts)

    def has_unequal_shards(self, work_grows: bool) -> bool:
        """Never: every rank attends to whole sequences."""
        return False

    def is_preferred(self, strategy: CPStrategy, shape: AttentionShape) -> bool:
        """True among more than two ranks of a node, without repeated key/value heads.

        Ranks attend to whole sequences with some of the heads, in larger kernel launches and with less memory. On 4 x
        H200 at 256K tokens it takes 9 % less time than all-gather for MoBA 4096/12, but 4 % more for dense attention
        and 6 % more for MoBA 512/8 (benchmarks/results/context-parallel-h200.json, context-parallel-dense-h200.json).
        In training at 128K tokens with MoBA 512/8 it is 2.6 % faster in bf16, as smaller buffers leave more for
        activations, and 1.6 % slower in FP8 (training-8b-128k-h200-x4.json). Two ranks have half of all keys already,
        and Ulysses would send half of the queries and outputs as well: on 2 x H100 it takes 17 % more time for MoBA
        512/8 at 64K and 256K tokens, and the same for dense attention (context-parallel-h100-x2.json).
        """
        return 2 < strategy.ranks == strategy.node_size and shape.kv_heads % strategy.ranks == 0


class HierarchicalSpec(TransportSpec):
    """The transport `hierarchical`: Ulysses inside a node, all-gather across nodes."""

    name = "hierarchical"
    uses_slices = True
    needs_nodes = True

    def make(self, strategy: CPStrategy, ranks: Ranks) -> Transport:
        """Creates a group for each node, and one across the nodes for each place in a node."""
        node, across = hierarchical_groups(ranks.group, strategy.node_size, ranks.timeout)
        across_nodes = AllGather(Communicator(across, ranks.device), strategy.slices)
        return Ulysses(Communicator(node, ranks.device), across_nodes)

    def cost(self, strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
        """Tokens exchanged for heads in the node, then keys and values of these heads gathered across nodes."""
        exchange = head_exchange(strategy, shape, strategy.node_size)
        token_kv_bytes = shape.kv_bytes * max(1, strategy.node_size / shape.kv_heads) / strategy.node_size
        kv_bytes = shape.tokens * token_kv_bytes
        gathered = 3 * (1 - strategy.node_size / strategy.ranks) * kv_bytes  # keys and values twice, gradients once
        slices = slice_count(strategy, max(1, shape.kv_heads // strategy.node_size))
        q_bytes = shape.tokens / strategy.ranks * shape.q_bytes
        copied = exchange.copied + gather_copies(strategy, slices, q_bytes, kv_bytes)
        buffers = exchange.buffers + gather_buffers(slices, kv_bytes)
        within = exchange.received / LINKS.node
        across = gathered / LINKS.network
        upfront_share = (within + across / slices) / (within + across)
        return TransportCost(exchange.received, gathered, copied, buffers, upfront_share, heads_at_once=1 / slices)

    def check_sizes(self, strategy: CPStrategy) -> None:
        """Raises ValueError unless several nodes have equally many ranks, and several each."""
        if strategy.ranks % strategy.node_size or not 1 < strategy.node_size < strategy.ranks:
            raise ValueError(
                f"parallel.cp_transport: 'hierarchical' needs several nodes with the same number of ranks, at least 2 "
                f"in each; parallel.cp is {strategy.ranks}, with {strategy.node_size} in a node; use ulysses, "
                f"allgather or ring"
            )

    def check_attention(self, strategy: CPStrategy, heads: int, kv_heads: int, facts: AttentionFacts) -> None:
        """Raises ValueError for heads that the ranks of a node cannot share."""
        _check_heads(self.name, strategy.node_size, heads, kv_heads, facts)


def _check_heads(name: str, ranks: int, heads: int, kv_heads: int, facts: AttentionFacts) -> None:
    if heads % ranks:
        raise ValueError(
            f"parallel.cp_transport: {name!r} cannot share {heads} query heads among {ranks} ranks; use allgather or "
            f"ring, or set parallel.cp so that the heads are divisible"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"parallel.cp_transport: {name!r} cannot share {kv_heads} key/value heads among {ranks} ranks: one number "
            f"must divide the other; use allgather or ring"
        )
    if facts.couples_heads and kv_heads % ranks:
        raise ValueError(
            f"parallel.cp_transport: {name!r} would split the query heads of {kv_heads} key/value heads among {ranks} "
            f"ranks, but an attention selects blocks for them together (attention.moba.select: group); use allgather "
            f"or ring, or select: head"
        )


ULYSSES = UlyssesSpec()
HIERARCHICAL = HierarchicalSpec()


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
        # In one piece. Cut into slices of heads, half of the exchange was to be hidden; attention in smaller launches
        # lost as much (512/8 at 256K 131 ms, 130 with two slices), and the composition more (benchmarks/LOG.md,
        # "Transfers").
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
        return self.across.gather(super().gather(x_LHD))

    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """The sums among the groups, then one all-to-all in this group."""
        return super().sum_shards(self.across.sum_shards(x_RLx))

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
        self.call = replace(call, sequence=groups)

    def heads(self, heads: int) -> int:
        """Number of heads that each rank gets out of `heads`."""
        return max(1, heads // self.size)

    def to_heads(self, *tensors_LHD: Tensor) -> list[Tensor]:
        """Exchange a shard's rows with all heads [L, H, D] for all rows of the group with some heads [N, h, D]."""
        sent = []
        for x_LHD in tensors_LHD:
            if x_LHD.shape[1] < self.size:
                # Every rank gets its head's copy in the same exchange; their gradients are summed by `_sum_copies`.
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
    return x_LPD.unflatten(1, (kv_heads, -1)).sum(2, dtype=accumulation_dtype(x_LPD.dtype)).to(x_LPD.dtype)


class Local(Transport):
    """Attention on this rank alone, which holds the complete sequence with padding at its end."""

    rank = 0

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Attend to the complete sequence, without communication."""
        everything = call.against_all(0)
        q, k, v = (x[: call.sequence.total] for x in (q_LHD, k_LKD, v_LKD))
        selection = call.attention.select(q, call.attention.summarize(k, everything), everything)
        out_THD, lse_HT = call.attention.attend(q, k, v, everything, selection)
        return padded(out_THD, q_LHD.shape[0]), padded_lse(lse_HT, q_LHD.shape[0]), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Gradients for the complete sequence, without communication."""
        tokens = slice(0, call.sequence.total)
        here = state.part(rows=tokens)._replace(k=state.k[tokens], v=state.v[tokens])
        grads = call.attention.attend_backward(here, call.against_all(0), selection)
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
        return call.attention.empty_selection(q_LHD[:tokens], k_LKD[:tokens], call.against_all(0))
