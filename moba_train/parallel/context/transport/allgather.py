"""Every rank gathers the keys and values of all, some key/value heads at a time.

Summary, selection and attention of a key/value head touch no other head, so one slice of heads is attended to while the
next is on its way; two slices are in memory at once. The backward pass gathers again and sends the gradients of
keys and values to their owners, who add them up in float32.

Shape suffixes as in base.py; T tokens of the sequence, R ranks.
"""

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.parallel.context.comm import Arrival, Peers
from moba_train.parallel.context.copies import contiguous, copy_into
from moba_train.parallel.context.transport.base import ShardedCall, Transport, padded_lse, sum_dtype
from moba_train.parallel.context.units import all_summaries

Heads = tuple[slice, slice]
"""A slice of the key/value heads, and the query heads that share them."""


class AllGather(Transport):
    """See above."""

    def __init__(self, peers: Peers, slices: int) -> None:
        """`slices`: all but the first of so many transfers can hide behind attention; more of them are smaller, and so
        are the attention's launches."""
        self.peers, self.rank, self.slices = peers, peers.rank, slices

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """(out, lse, selection): the selections of the slices, one after the other."""
        tokens, part = call.sequence.tokens(self.rank), call.against_all(self.rank)
        slices = self._slices(q_LHD, k_LKD)
        summaries = all_summaries(k_LKD, call.whole, call.sequence, self.peers)
        out_LHD, selections = _zero_behind(q_LHD, tokens), list[Tensor]()
        lse_Hn = q_LHD.new_empty((q_LHD.shape[1], tokens), dtype=sum_dtype(q_LHD.dtype))
        for (kv, of), coming in self._arriving(k_LKD, v_LKD, slices):
            q_nHD = contiguous(q_LHD[:tokens, of])
            if tokens:  # selecting needs no keys, so even the first slice travels while there is work
                selection = part.select(q_nHD, None if summaries is None else summaries[:, kv])
            else:
                selection = part.empty_selection(q_nHD, k_LKD[:, kv])
            k_TKD, v_TKD = (call.sequence.to_packed(x) for x in coming.wait())
            if tokens:
                out_nHD, lse_Hn[of] = part.attend(q_nHD, k_TKD, v_TKD, selection)
                copy_into(out_LHD[:tokens, of], out_nHD)
            selections += selection
            del k_TKD, v_TKD  # or three slices are in memory when the next but one is asked for
        return out_LHD, padded_lse(lse_Hn, q_LHD.shape[0]), tuple(selections)

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """(dq, dk, dv): gathers keys and values again, and sends their gradients to their owners."""
        dout_LHD, q_LHD, k_LKD, v_LKD, out_LHD, lse_HL = state
        tokens, part = call.sequence.tokens(self.rank), call.against_all(self.rank)
        slices = self._slices(q_LHD, k_LKD)
        length = len(selection) // len(slices)
        selections = [selection[i * length : (i + 1) * length] for i in range(len(slices))]
        dq_LHD, dk_LKD, dv_LKD = _zero_behind(q_LHD, tokens), torch.empty_like(k_LKD), torch.empty_like(v_LKD)
        on_their_way: tuple[slice, Arrival] | None = None

        def receive(kv: slice, arrival: Arrival) -> None:
            (partial,) = arrival.wait()
            total = partial.unflatten(0, (self.peers.size, -1)).sum(0, dtype=sum_dtype(partial.dtype))
            dk_LKD[:, kv], dv_LKD[:, kv] = total.chunk(2, dim=1)

        arriving = self._arriving(k_LKD, v_LKD, slices)
        for own, ((kv, of), coming) in zip(selections, arriving, strict=True):
            dout, q, out = (contiguous(x[:tokens, of]) for x in (dout_LHD, q_LHD, out_LHD))
            k_TKD, v_TKD = (call.sequence.to_packed(x) for x in coming.wait())
            if tokens:
                lse = lse_HL[of, :tokens].contiguous()
                dq, dk, dv = part.attend_backward(BackwardState(dout, q, k_TKD, v_TKD, out, lse), own)
                copy_into(dq_LHD[:tokens, of], dq)
            else:
                dk, dv = torch.zeros_like(k_TKD), torch.zeros_like(v_TKD)
            del k_TKD, v_TKD
            sent = self.peers.all_to_all(call.sequence.to_shards(dk, dv))
            if on_their_way:  # the last slice's: its transfer was hidden behind this one's attention
                receive(*on_their_way)
            on_their_way = kv, sent
        assert on_their_way
        receive(*on_their_way)
        return dq_LHD, dk_LKD, dv_LKD

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """Shapes and dtypes of the selections of the slices, one after the other."""
        tokens, part = call.sequence.tokens(self.rank), call.against_all(self.rank)
        selections = [part.empty_selection(q_LHD[:tokens, of], k_LKD[:, kv]) for kv, of in self._slices(q_LHD, k_LKD)]
        return tuple(tensor for selection in selections for tensor in selection)

    def _slices(self, q_LHD: Tensor, k_LKD: Tensor) -> list[Heads]:
        kv_heads = k_LKD.shape[1]
        group, width = q_LHD.shape[1] // kv_heads, -(-kv_heads // self.slices)
        slices = [slice(first, min(first + width, kv_heads)) for first in range(0, kv_heads, width)]
        return [(kv, slice(kv.start * group, kv.stop * group)) for kv in slices]

    def _gather(self, k_LKD: Tensor, v_LKD: Tensor, heads: Heads) -> Arrival:
        return self.peers.all_gather(*(contiguous(x[:, heads[0]]) for x in (k_LKD, v_LKD)))

    def _arriving(self, k_LKD: Tensor, v_LKD: Tensor, slices: list[Heads]) -> Iterator[tuple[Heads, Arrival]]:
        """Each slice with the keys and values of all shards, which are on their way, and so are those of the next."""
        coming = self._gather(k_LKD, v_LKD, slices[0])
        for heads, following in zip_longest(slices, slices[1:]):
            later = self._gather(k_LKD, v_LKD, following) if following else coming
            yield heads, coming
            coming = later


def _zero_behind(x_LHD: Tensor, tokens: int) -> Tensor:
    """A tensor like `x`, zero in the rows of padding and undefined before."""
    made_LHD = torch.empty_like(x_LHD)
    made_LHD[tokens:] = 0
    return made_LHD
