"""The ranks of a group exchange tokens for heads: each attends with some heads to all tokens of the group.

After DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Where there are fewer key/value heads than ranks, each
is sent to several. A rank that gets several key/value heads gets them in slices, and attends to one slice while the
next is on its way to it and the last one's results on theirs. When the group is all there is, attention sees whole
sequences (`Whole`); when it is one node of many, another transport takes the tokens of the node as one shard and goes
on across nodes, with few heads per rank.

Shape suffixes as in base.py; N rows of all shards of the group, h of the H heads, P ranks of the group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moba_train.attention.protocol import Plan
from moba_train.parallel.context.comm import Arrival, Peers
from moba_train.parallel.context.transport.base import Job, Transport, padded, padded_lse, sum_dtype
from moba_train.parallel.context.transport.slices import Heads, head_slices, plan_slices


class Ulysses(Transport):
    """See above."""

    def __init__(self, peers: Peers, across: Transport, slices: int) -> None:
        """`across` runs attention over the group's tokens; its `rank` is the group's place among all groups.

        `slices`: of this rank's key/value heads, at most; 1 where `across` has slices of its own.
        """
        self.peers, self.across, self.slices = peers, across, slices
        self.rank = across.rank * peers.size + peers.rank

    def forward(self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, job: Job) -> tuple[Tensor, Tensor, Plan]:
        """See `Transport.forward`."""
        swap = _Swap(self, job, q_LHD.shape[1], k_LKD.shape[1])
        plan, returning = list[Tensor](), list[Arrival]()
        for q_NhD, k_NhD, v_NhD in swap.arriving((q_LHD,), (k_LKD, v_LKD)):
            out_NhD, lse_hN, chosen = self.across.forward(q_NhD, k_NhD, v_NhD, swap.job)
            plan += chosen
            returning.append(swap.to_rows(out_NhD, lse_hN.T.unsqueeze(-1)))
        out_LHD, lse_LH1 = swap.joined(returning)
        lse_Hn = lse_LH1[: job.sequence.tokens(self.rank), :, 0].T.contiguous()
        return out_LHD, padded_lse(lse_Hn, q_LHD.shape[0]), tuple(plan)

    def backward(
        self,
        dout_LHD: Tensor,
        q_LHD: Tensor,
        k_LKD: Tensor,
        v_LKD: Tensor,
        out_LHD: Tensor,
        lse_HL: Tensor,
        plan: Plan,
        job: Job,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Transport.backward`."""
        kv_heads = k_LKD.shape[1]
        swap = _Swap(self, job, q_LHD.shape[1], kv_heads)
        arriving = swap.arriving((dout_LHD, q_LHD, out_LHD, lse_HL.T.unsqueeze(-1)), (k_LKD, v_LKD))
        returning = []
        for chosen, (dout, q, out, lse_Nh1, k, v) in zip(plan_slices(plan, len(swap.slices)), arriving, strict=True):
            lse_hN = lse_Nh1.squeeze(-1).T.contiguous()
            returning.append(swap.to_rows(*self.across.backward(dout, q, k, v, out, lse_hN, chosen, swap.job)))
        dq_LHD, dk_LPD, dv_LPD = swap.joined(returning)
        return dq_LHD, _sum_copies(dk_LPD, kv_heads), _sum_copies(dv_LPD, kv_heads)

    def empty_plan(self, q_LHD: Tensor, k_LKD: Tensor, job: Job) -> Plan:
        """See `Transport.empty_plan`."""
        swap, rows, plan = _Swap(self, job, q_LHD.shape[1], k_LKD.shape[1]), q_LHD.shape[0], list[Tensor]()
        for kv, of in swap.slices:
            q_NhD = q_LHD.new_empty(self.peers.size * rows, of.stop - of.start, q_LHD.shape[2])
            k_NhD = k_LKD.new_empty(self.peers.size * rows, kv.stop - kv.start, k_LKD.shape[2])
            plan += self.across.empty_plan(q_NhD, k_NhD, swap.job)
        return tuple(plan)


class _Swap:
    """The exchange between the ranks of a group, for one job with so many heads."""

    def __init__(self, ulysses: Ulysses, job: Job, heads: int, kv_heads: int) -> None:
        self.peers, self.size = ulysses.peers, ulysses.peers.size
        place = ulysses.across.rank
        self.group = job.sequence.of(range(place * self.size, (place + 1) * self.size))
        groups = job.sequence.in_groups(self.size)
        self.joint = groups.of(range(place, place + 1))
        self.job = Job(job.attention, job.layout, groups)
        self.slices = head_slices(heads // self.size, max(1, kv_heads // self.size), ulysses.slices)

    def arriving(self, queries_LHD: tuple[Tensor, ...], keys_LKD: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
        """Each slice of this rank's heads with all rows of the group [N, h, D]; the next has been asked for.

        The tensors given are shards of rows with all heads, those of query heads and those of key/value heads.
        """
        coming = self._to_heads(self.slices[0], queries_LHD, keys_LKD)
        for following in [*self.slices[1:], None]:
            arrival = coming
            if following is not None:
                coming = self._to_heads(following, queries_LHD, keys_LKD)
            yield [self.joint.to_shards(self.group.to_packed(x)) for x in arrival.wait()]

    def _to_heads(self, heads: Heads, queries_LHD: tuple[Tensor, ...], keys_LKD: tuple[Tensor, ...]) -> Arrival:
        """Ask for one slice of the heads of each rank."""

        def by_rank(x_LHD: Tensor, part: slice) -> Tensor:
            if x_LHD.shape[1] < self.size:
                x_LHD = x_LHD.repeat_interleave(self.size // x_LHD.shape[1], dim=1)
            return x_LHD.unflatten(1, (self.size, -1))[:, :, part].transpose(0, 1).flatten(0, 1).contiguous()

        queries, keys = (by_rank(x, heads.of) for x in queries_LHD), (by_rank(x, heads.kv) for x in keys_LKD)
        return self.peers.all_to_all(*queries, *keys)

    def to_rows(self, *tensors_NhD: Tensor) -> Arrival:
        """Send the rows of other ranks home, with one slice of this rank's heads; `joined` puts them together."""
        tokens = self.joint.tokens(0)
        return self.peers.all_to_all(*(self.group.to_shards(x_NhD[:tokens]).contiguous() for x_NhD in tensors_NhD))

    def joined(self, returning: list[Arrival]) -> list[Tensor]:
        """This rank's rows with the heads of all ranks and slices, copies of heads not yet summed; padding is 0."""
        by_slice = [arrival.wait() for arrival in returning]
        return [self._join(pieces) for pieces in zip(*by_slice, strict=True)]

    def _join(self, slices_PLhD: tuple[Tensor, ...]) -> Tensor:
        by_rank = [x.unflatten(0, (self.size, -1)).transpose(0, 1) for x in slices_PLhD]  # [L, P, h, D]
        return torch.cat(by_rank, dim=2).flatten(1, 2)


def _sum_copies(x_LPD: Tensor, kv_heads: int) -> Tensor:
    """Add up the gradients of the copies of each key/value head: [L, K, D]."""
    if x_LPD.shape[1] == kv_heads:
        return x_LPD
    return x_LPD.unflatten(1, (kv_heads, -1)).sum(2, dtype=sum_dtype(x_LPD.dtype)).to(x_LPD.dtype)


class Whole(Transport):
    """No transport: all tokens are here, as on one device, with padding behind."""

    rank = 0

    def forward(self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, job: Job) -> tuple[Tensor, Tensor, Plan]:
        """See `Transport.forward`."""
        attention, layout, tokens = job.attention, job.part(0), job.sequence.total
        q, k, v = (x[:tokens] for x in (q_LHD, k_LKD, v_LKD))
        plan = attention.plan(q, attention.summarize(k, layout), layout)
        out_THD, lse_HT = attention.attend(q, k, v, layout, plan)
        return padded(out_THD, q_LHD.shape[0]), padded_lse(lse_HT, q_LHD.shape[0]), plan

    def backward(
        self,
        dout_LHD: Tensor,
        q_LHD: Tensor,
        k_LKD: Tensor,
        v_LKD: Tensor,
        out_LHD: Tensor,
        lse_HL: Tensor,
        plan: Plan,
        job: Job,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Transport.backward`."""
        tokens = job.sequence.total
        dout, q, k, v, out = (x[:tokens] for x in (dout_LHD, q_LHD, k_LKD, v_LKD, out_LHD))
        lse = lse_HL[:, :tokens].contiguous()
        grads = job.attention.attend_backward(dout, q, k, v, out, lse, job.part(0), plan)
        dq, dk, dv = (padded(grad, q_LHD.shape[0]) for grad in grads)
        return dq, dk, dv

    def empty_plan(self, q_LHD: Tensor, k_LKD: Tensor, job: Job) -> Plan:
        """See `Transport.empty_plan`."""
        tokens = job.sequence.total
        return job.attention.empty_plan(q_LHD[:tokens], k_LKD[:tokens], job.part(0))
