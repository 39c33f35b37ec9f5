"""Ring: chunks of keys and values travel around the ring of ranks; each rank merges its partial results.

A rank sends a chunk on when it has arrived, without waiting for its own attention to it, and receives a chunk as soon
as a buffer is free. With a buffer for every chunk (the default), a rank that is busy for a moment delays no other rank.
With an attention sink, ranks compute 96-98 % of the time with all buffers, 71-92 % with two and 26-45 % in lockstep (a
model of 8 ranks; measured on 4: docs/context-parallelism.md). In the backward pass the gradients of a chunk go straight
to its owner, which sums them in float32, in the order of the ring.

Shape suffixes as in base.py.
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from moba_train.attention.merge import merge_into, nothing_seen
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.parallel.context.comm import Communicator, Work
from moba_train.parallel.context.layout import sees
from moba_train.parallel.context.summaries import all_summaries
from moba_train.parallel.context.transport.base import (
    ShardedCall,
    Transport,
    padded,
    padded_lse,
    sum_dtype,
    sum_over_ranks,
)


class Ring(Transport):
    """Passes chunks of keys and values around the ring; see the top of this file."""

    def __init__(self, communicator: Communicator, depth: int | None = None) -> None:
        """`depth`: number of buffers for chunks of other ranks, at least 2; None: one for each rank."""
        assert depth is None or depth >= 2, "one buffer is sent while another is received into"
        self.communicator = communicator
        self.rank = communicator.rank
        self.depth = min(depth or communicator.size, communicator.size)

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Select, attend to each chunk as it arrives, and merge the partial results by online softmax."""
        tokens = call.sequence.tokens(self.rank)
        summaries = all_summaries(k_LKD, call.unsharded, call.sequence, self.communicator)
        q_nHD = q_LHD[:tokens]
        if tokens:
            selection = call.against_all(self.rank).select(q_nHD, summaries)
        else:
            selection = self.empty_selection(q_LHD, k_LKD, call)
        merged: tuple[Tensor, Tensor] | None = None
        for owner, k, v in self._chunks(k_LKD, v_LKD, call):
            if not self._is_seen(owner, call):
                continue
            out, lse = call.against(self.rank, owner).attend(q_nHD, k, v, selection)
            if merged is None:
                merged = out.to(sum_dtype(q_LHD.dtype)), lse
            else:
                merge_into(*merged, out, lse)
        out_nHD, lse_Hn = merged or nothing_seen(q_nHD)
        rows = q_LHD.shape[0]
        return padded(out_nHD.to(q_LHD.dtype), rows), padded_lse(lse_Hn, rows), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Pass the chunks around again and send the gradients of each straight to its owner."""
        _, q_LHD, k_LKD, v_LKD, _, _ = state
        rows = q_LHD.shape[0]
        dtype = sum_dtype(q_LHD.dtype)
        state = state.with_queries(slice(0, call.sequence.tokens(self.rank)))
        dq_nHD: Tensor | None = None
        dkv_2LKD = torch.empty(2, *k_LKD.shape, dtype=dtype, device=k_LKD.device)
        received_2LKD = torch.empty_like(dkv_2LKD, dtype=k_LKD.dtype)
        returning: deque[Work] = deque()

        def add_received() -> None:
            dkv_2LKD.add_(received_2LKD)

        for step, (owner, k, v) in enumerate(self._chunks(k_LKD, v_LKD, call)):
            if self._is_seen(owner, call):
                pair = call.against(self.rank, owner)
                dq, dk, dv = pair.attend_backward(state.with_keys(k, v), selection)
                dq_nHD = dq.to(dtype) if dq_nHD is None else dq_nHD.add_(dq)
                partial_2LKD = torch.stack([padded(dk, rows), padded(dv, rows)])
            else:
                partial_2LKD = torch.zeros_like(received_2LKD)
            if step == 0:
                dkv_2LKD.copy_(partial_2LKD)
                continue
            if len(returning) == self.depth:
                returning.popleft().wait()
            returning.append(self.communicator.send_recv(partial_2LKD, received_2LKD, -step, then=add_received))
        for work in returning:
            work.wait()
        dk_LKD, dv_LKD = (
            x.to(k_LKD.dtype, copy=True) for x in dkv_2LKD
        )  # operators may not return views of one tensor
        dq_nHD = torch.zeros_like(state.q) if dq_nHD is None else dq_nHD.to(q_LHD.dtype)
        return padded(dq_nHD, rows), dk_LKD, dv_LKD

    def gather(self, x_LHD: Tensor) -> Tensor:
        """One all-gather."""
        (shards_RL,) = self.communicator.all_gather(x_LHD.contiguous()).wait()
        return shards_RL

    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """One all-to-all."""
        return sum_over_ranks(x_RLx, self.communicator)

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """The empty selection of this rank's queries."""
        tokens = call.sequence.tokens(self.rank)
        return call.against_all(self.rank).empty_selection(q_LHD[:tokens], k_LKD)

    def _is_seen(self, owner: int, call: ShardedCall) -> bool:
        """Whether any of this rank's queries sees any key of rank `owner`."""
        ranges = call.sequence.ranges
        return sees(ranges[self.rank], ranges[owner], call.unsharded.layout.edges)

    def _chunks(self, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each rank with its keys and values, without padding: this rank first, then back around the ring."""
        size = self.communicator.size
        own_2LKD = torch.stack([k_LKD, v_LKD])
        buffers = [torch.empty_like(own_2LKD) for _ in range(min(self.depth, size - 1))]
        chunks = [own_2LKD, *(buffers[step % len(buffers)] for step in range(size - 1))]
        receiving: dict[int, Work] = {}

        def start_receiving(step: int) -> None:
            if step < size:
                receiving[step] = self.communicator.send_recv(chunks[step - 1], chunks[step], 1)

        for step in range(1, len(buffers) + 1):
            start_receiving(step)
        for step, chunk_2LKD in enumerate(chunks):
            if step:
                receiving.pop(step).wait()
            owner = (self.rank - step) % size
            yield owner, *chunk_2LKD[:, : call.sequence.tokens(owner)]
            if step:
                start_receiving(step + len(buffers))  # into the buffer whose chunk attention has just used
