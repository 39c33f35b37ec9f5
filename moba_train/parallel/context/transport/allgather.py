"""All-gather: every rank gathers the keys and values of all ranks, one slice of the key/value heads after the other.

Selection and attention of a key/value head involve no other head, so attention runs on the heads of one slice while the
next slice is in flight; two slices are in memory at once. The backward pass gathers again and sends the gradients of
keys and values to their owners, which sum them in float32.

Shape suffixes as in base.py; T tokens of the sequence, R ranks.
"""

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.protocol import BackwardState, Gradients, Selection, head_parts
from moba_train.attention.shard import padded
from moba_train.parallel.context.comm import Communicator, Ranks, Work
from moba_train.parallel.context.costs import (
    TransportCost,
    gather_buffers,
    gather_copies,
    received_kv_bytes,
    slice_count,
)
from moba_train.parallel.context.layout import contiguous, copy_into
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.context.transport.base import (
    ShardedCall,
    Transport,
    TransportSpec,
    padded_lse,
)
from moba_train.parallel.context.units import all_summaries

Heads = tuple[slice, slice]
"""A slice of the key/value heads, and the query heads that share them."""


class AllGatherSpec(TransportSpec):
    """The transport `allgather`."""

    name = "allgather"
    uses_slices = True
    has_all_ranks = True

    def make(self, strategy: CPStrategy, ranks: Ranks) -> Transport:
        """Over the group's own connections."""
        return AllGather(ranks.communicator, strategy.slices)

    def cost(self, strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
        """Keys and values of all ranks, gathered in both passes, and their gradients."""
        received = received_kv_bytes(strategy, shape)
        slices = slice_count(strategy, shape.kv_heads)
        q_bytes = shape.tokens / strategy.ranks * shape.q_bytes
        kv_bytes = shape.tokens * shape.kv_bytes
        # NCCL's rings enter a node through all of its adapters.
        network = 0 if strategy.node_size == strategy.ranks else received / strategy.node_size
        copied = gather_copies(strategy, slices, q_bytes, kv_bytes)
        buffers = gather_buffers(slices, kv_bytes)
        return TransportCost(received, network, copied, buffers, upfront_share=1 / slices, heads_at_once=1 / slices)

    def has_unequal_shards(self, work_grows: bool) -> bool:
        """Always: MoBA's work grows until topk blocks lie behind a query. Zigzag shards are up to 27 % faster at 64K
        tokens, and never slower (benchmarks/results/context-parallel-h200.json)."""
        return True

    def with_least_memory(self, strategy: CPStrategy, shape: AttentionShape) -> CPStrategy:
        """The strategy itself: it is in slices already, as it does not fit."""
        return strategy


ALLGATHER = AllGatherSpec()


class AllGather(Transport):
    """Gathers keys and values in slices of heads; see the top of this file."""

    def __init__(self, communicator: Communicator, slices: int, *, by_ring: bool = False) -> None:
        """`slices`: number of transfers, at most one for each head. Attention overlaps all but the first. More slices
        make smaller transfers and smaller kernel launches. `by_ring`: gather by messages between neighbours."""
        self.communicator = self.of_all_ranks = communicator
        self.rank = communicator.rank
        self.slices = slices
        self.by_ring = by_ring

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Attend slice by slice of the heads while the next slice is gathered; the selection is that of all slices."""
        tokens = call.sequence.tokens(self.rank)
        part = call.against_all(self.rank)
        slices = self._slices(q_LHD, k_LKD)
        # Before the gather of keys is issued: it is small, and the selection waits for it alone.
        summaries = all_summaries(k_LKD, call, self.communicator)
        results = list[tuple[slice, Tensor]]()
        selections = list[Tensor]()
        lse_Hn = q_LHD.new_empty((q_LHD.shape[1], tokens), dtype=accumulation_dtype(q_LHD.dtype))
        for (kv, of), gather in self._gathers(k_LKD, v_LKD, slices):
            q_nHD = contiguous(q_LHD[:tokens, of])
            if tokens:  # selection needs no keys, so it overlaps even the first transfer
                selection = call.attention.select(q_nHD, None if summaries is None else summaries[:, kv], part)
            else:
                selection = call.attention.empty_selection(q_nHD, k_LKD[:, kv], part)
            k_TKD, v_TKD = (call.sequence.to_packed(x) for x in gather.wait())
            if tokens:
                out_nHD, lse_Hn[of] = call.attention.attend(q_nHD, k_TKD, v_TKD, part, selection)
                results.append((of, out_nHD))
            selections += selection
            del k_TKD, v_TKD  # otherwise three slices are in memory when the next but one is gathered
        return _side_by_side(results, q_LHD), padded_lse(lse_Hn, q_LHD.shape[0]), tuple(selections)

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Gather again, slice by slice, and send the gradients of keys and values to their owners."""
        dout_LHD, q_LHD, k_LKD, v_LKD, out_LHD, lse_HL = state
        tokens = call.sequence.tokens(self.rank)
        part = call.against_all(self.rank)
        slices = self._slices(q_LHD, k_LKD)
        length = len(selection) // len(slices)
        selections = [selection[i * length : (i + 1) * length] for i in range(len(slices))]
        results = list[tuple[slice, Tensor]]()
        dk_LKD = torch.empty_like(k_LKD)
        dv_LKD = torch.empty_like(v_LKD)
        in_flight: tuple[slice, Work] | None = None

        def receive(kv: slice, work: Work) -> None:
            (partial,) = work.wait()
            total = partial.unflatten(0, (self.communicator.size, -1)).sum(0, dtype=accumulation_dtype(partial.dtype))
            dk_LKD[:, kv], dv_LKD[:, kv] = total.chunk(2, dim=1)

        gathers = self._gathers(k_LKD, v_LKD, slices)
        for own, ((kv, of), gather) in zip(selections, gathers, strict=True):
            dout, q, out = (contiguous(x[:tokens, of]) for x in (dout_LHD, q_LHD, out_LHD))
            k_TKD, v_TKD = (call.sequence.to_packed(x) for x in gather.wait())
            if tokens:
                lse = lse_HL[of, :tokens].contiguous()
                own_state = BackwardState(dout, q, k_TKD, v_TKD, out, lse)
                dq, dk, dv = call.attention.attend_backward(own_state, part, own)
                results.append((of, dq))
            else:
                dk, dv = torch.zeros_like(k_TKD), torch.zeros_like(v_TKD)
            del k_TKD, v_TKD
            by_owner = call.sequence.to_shards(dk, dv)
            del dk, dv  # otherwise three copies of these gradients are in memory when they are exchanged
            sent = self.communicator.all_to_all(by_owner)
            del by_owner
            if in_flight:  # from the previous slice; this slice's attention overlapped it
                receive(*in_flight)
            in_flight = kv, sent
        assert in_flight
        receive(*in_flight)
        return _side_by_side(results, q_LHD), dk_LKD, dv_LKD

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """The empty selections of all slices, one after the other."""
        tokens = call.sequence.tokens(self.rank)
        part = call.against_all(self.rank)
        empty = call.attention.empty_selection
        selections = [empty(q_LHD[:tokens, of], k_LKD[:, kv], part) for kv, of in self._slices(q_LHD, k_LKD)]
        return tuple(tensor for selection in selections for tensor in selection)

    def _slices(self, q_LHD: Tensor, k_LKD: Tensor) -> list[Heads]:
        """All heads in slices of the same width, but the last may be narrower."""
        kv_heads = k_LKD.shape[1]
        return [(kv, of) for of, kv in head_parts(q_LHD.shape[1], kv_heads, -(-kv_heads // self.slices))]

    def _gather(self, k_LKD: Tensor, v_LKD: Tensor, heads: Heads) -> Work:
        """Start gathering the keys and values of one slice from all ranks."""
        all_gather = self.communicator.all_gather_by_ring if self.by_ring else self.communicator.all_gather
        return all_gather(*(contiguous(x[:, heads[0]]) for x in (k_LKD, v_LKD)))

    def _gathers(self, k_LKD: Tensor, v_LKD: Tensor, slices: list[Heads]) -> Iterator[tuple[Heads, Work]]:
        """Yield each slice with the handle of its gather, while the gather of the next slice is also in flight."""
        gather = self._gather(k_LKD, v_LKD, slices[0])
        for heads, following in zip_longest(slices, slices[1:]):
            next_gather = self._gather(k_LKD, v_LKD, following) if following else gather
            yield heads, gather
            gather = next_gather


def _side_by_side(results: list[tuple[slice, Tensor]], like_LHD: Tensor) -> Tensor:
    """The results of all slices of the heads, [n, h, D] each, in one tensor like `like`, zero in the rows of padding. A
    single slice's is not copied: both would be in memory at once. No results: no tokens."""
    if len(results) == 1:
        return padded(results[0][1], like_LHD.shape[0])
    all_LHD = torch.empty_like(like_LHD)
    tokens = len(results[0][1]) if results else 0
    all_LHD[tokens:] = 0
    for of, part_nHD in results:
        copy_into(all_LHD[:tokens, of], part_nHD)
    return all_LHD
