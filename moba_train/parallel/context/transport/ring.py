"""Ring: chunks of keys and values, one of each rank, travel around the ring of ranks.

Inside a node, a rank attends to all chunks in one call after they have arrived (`ring`): an all-gather by messages
between neighbours. `Ring` is for few buffers and several nodes: it attends to some chunks while the next ones travel,
and merges the partial results. How many one call takes: `CPStrategy.chunks_per_call`.

Either way a rank sends a chunk on when it has arrived, without waiting for its own attention to it. With a buffer for
every chunk, a rank that is busy for a moment delays no other rank. With an attention sink, ranks compute 96-98 % of the
time with all buffers, 71-92 % with two and 26-45 % in lockstep (a model of 8 ranks that attend to one chunk in a call;
measured on 4: benchmarks/measured/context-parallelism.md). In the backward pass the gradients of a chunk go straight to
its owner, which sums them in float32, in a fixed order.

Shape suffixes as in base.py.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.kernels.common.merge import merge_into, nothing_seen
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.protocol import AttentionFacts, BackwardState, Gradients, Selection
from moba_train.attention.shard import padded
from moba_train.parallel.context.comm import Communicator, Ranks, Work
from moba_train.parallel.context.costs import TransportCost, received_kv_bytes
from moba_train.parallel.context.layout import SequenceLayout, sees
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.context.transport.allgather import ALLGATHER, AllGather
from moba_train.parallel.context.transport.base import (
    ShardedCall,
    Transport,
    TransportSpec,
    padded_lse,
)
from moba_train.parallel.context.units import all_summaries
from moba_train.registry import TRANSPORTS


class RingSpec(TransportSpec):
    """The transport `ring`."""

    name = "ring"
    has_all_ranks = True

    def make(self, strategy: CPStrategy, ranks: Ranks) -> Transport:
        """Over the group's own connections."""
        return ring(ranks.communicator, strategy)

    def cost(self, strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
        """Chunks that travel around the ring, and their gradients, which go straight to their owners."""
        width = strategy.chunks_per_call
        if width == strategy.ranks:  # an all-gather by other messages; its time has not been measured
            return ALLGATHER.cost(replace(strategy, slices=1), shape)
        received = received_kv_bytes(strategy, shape)
        depth = min(strategy.ring_depth or strategy.ranks, strategy.ranks)
        tokens = shape.tokens / strategy.ranks
        # Chunks that arrive and gradients on the way to their owners; the keys of a call and their gradients.
        buffers = (2 * depth + 2 * width) * tokens * shape.kv_bytes
        # For every call, out and dq are merged in float32 (13 + 5 of a query's bytes); every chunk is copied into token
        # order in both passes, and its gradients are laid out and summed.
        calls = -(-strategy.ranks // width)
        copied = tokens * ((18 * calls + 8) * shape.q_bytes + (11 * strategy.ranks + 5) * shape.kv_bytes)
        network = 0 if strategy.node_size == strategy.ranks else received  # one link enters each node
        return TransportCost(received, network, copied, buffers, upfront_share=(width - 1) / (strategy.ranks - 1))

    def check_attention(self, strategy: CPStrategy, heads: int, kv_heads: int, facts: AttentionFacts) -> None:
        """Raises ValueError if it attends to some of the keys after the others and the results do not merge."""
        if strategy.chunks_per_call < strategy.ranks and not facts.merges:
            *others, last = (name for name in TRANSPORTS if name != self.name)
            raise ValueError(
                "parallel.cp_transport: 'ring' attends to the keys of some ranks after those of others when it spans "
                "several nodes, but a layer adds up the results of its blocks, which cannot be merged over parts of a "
                f"block's keys (attention.moba_v1.merge: sum or gate, kind moba_v05); use {', '.join(others)} or {last}"
            )

    def has_unequal_shards(self, work_grows: bool) -> bool:
        """Always: a rank's work also depends on the chunks that its queries see, and later queries see more."""
        return True

    def with_least_memory(self, strategy: CPStrategy, shape: AttentionShape) -> CPStrategy | None:
        """Two buffers, which only results that merge allow."""
        return replace(strategy, ring_depth=2) if shape.facts.merges else None

    def describe(self, strategy: CPStrategy) -> str:
        """Number of chunks that an attention call takes, for messages; empty if it takes all."""
        if strategy.chunks_per_call == strategy.ranks:
            return ""
        return f", {strategy.chunks_per_call} of {strategy.ranks} chunks in an attention call"


RING = RingSpec()


def ring(communicator: Communicator, strategy: CPStrategy) -> Transport:
    """The transport that attends to as many chunks at once as the strategy says."""
    width = strategy.chunks_per_call
    if width == communicator.size:
        # All keys in one call: 99.5 ms instead of 151.8 at 256K 512/8 on two H100, 24.2 for 39.6 at 64K
        # (benchmarks/results/context-parallel-h100-x2.json).
        return AllGather(communicator, slices=1, by_ring=True)
    return Ring(communicator, width, strategy.ring_depth)


class ArrivedChunks(NamedTuple):
    """The chunks that one attention call takes."""

    steps: range
    """Distances of their owners behind this rank in the ring."""
    owners: SequenceLayout
    """The layout with the shards of the owners only, in the order of `steps`."""
    keys: tuple[Tensor, Tensor] | None
    """k and v [S, K, D] in ascending token order, without padding; None: no query of this rank sees any of them."""


class Ring(Transport):
    """Attends to some chunks while the next ones travel; see the top of this file."""

    def __init__(self, communicator: Communicator, width: int, depth: int | None = None) -> None:
        """`width`: chunks that one attention call takes, at most. `depth`: number of buffers for chunks of other ranks,
        at least 2 and at least `width`; None: one for each rank."""
        self.communicator = self.of_all_ranks = communicator
        self.rank = communicator.rank
        self.width = width
        self.depth = min(depth or communicator.size, communicator.size)
        assert depth is None or depth >= 2, "one buffer is sent while another is received into"
        assert 1 <= width <= self.depth, "the chunks of a call are in buffers before it begins"

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Select, attend to chunks as they arrive, and merge the partial results by online softmax."""
        tokens = call.sequence.tokens(self.rank)
        summaries = all_summaries(k_LKD, call, self.communicator)
        q_nHD = q_LHD[:tokens]
        if tokens:
            selection = call.attention.select(q_nHD, summaries, call.against_all(self.rank))
        else:
            selection = self.empty_selection(q_LHD, k_LKD, call)
        merged: tuple[Tensor, Tensor] | None = None
        for _, owners, keys in self._arriving(k_LKD, v_LKD, call):
            if keys is None:
                continue
            out, lse = call.attention.attend(q_nHD, *keys, call.against(self.rank, owners), selection)
            if merged is None:
                # Partial results are merged in float32: with one for each rank, bf16 would round as many times.
                merged = out.to(accumulation_dtype(q_LHD.dtype)), lse
            else:
                merge_into(*merged, out, lse)
        out_nHD, lse_Hn = merged or nothing_seen(q_nHD)
        rows = q_LHD.shape[0]
        return padded(out_nHD.to(q_LHD.dtype), rows), padded_lse(lse_Hn, rows), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Pass the chunks around again and send the gradients of each straight to its owner."""
        _, q_LHD, k_LKD, v_LKD, _, _ = state
        rows, kv_heads, head_dim = k_LKD.shape
        dtype = accumulation_dtype(q_LHD.dtype)
        state = state.part(rows=slice(0, call.sequence.tokens(self.rank)))
        dq_nHD: Tensor | None = None
        dkv_LKD = k_LKD.new_empty((rows, 2 * kv_heads, head_dim), dtype=dtype)  # dk, then dv
        received_LKD = torch.empty_like(dkv_LKD, dtype=k_LKD.dtype)
        returning: deque[Work] = deque()

        def add_received() -> None:
            dkv_LKD.add_(received_LKD)

        for steps, owners, keys in self._arriving(k_LKD, v_LKD, call):
            if keys is not None:
                k_SKD, v_SKD = keys
                part = call.against(self.rank, owners)
                dq, dk, dv = call.attention.attend_backward(state._replace(k=k_SKD, v=v_SKD), part, selection)
                del keys, k_SKD, v_SKD  # otherwise they are in memory beside two copies of their gradients
                dq_nHD = dq.to(dtype) if dq_nHD is None else dq_nHD.add_(dq)
                partial = owners.to_shards(dk, dv)
                del dk, dv
            else:
                partial = received_LKD.new_zeros((len(steps) * rows, *received_LKD.shape[1:]))
            for step, partial_LKD in zip(steps, partial.split(rows), strict=True):
                if step == 0:
                    dkv_LKD.copy_(partial_LKD)
                    continue
                # No more gradients under way than there are buffers for chunks, or a slow rank would let memory grow.
                if len(returning) == self.depth:
                    returning.popleft().wait()
                returning.append(self.communicator.send_recv(partial_LKD, received_LKD, -step, then=add_received))
        for work in returning:
            work.wait()
        dk_LKD = torch.empty_like(k_LKD)  # operators may not return views of one tensor
        dv_LKD = torch.empty_like(v_LKD)
        dk_LKD[:], dv_LKD[:] = dkv_LKD.chunk(2, dim=1)
        dq_nHD = torch.zeros_like(state.q) if dq_nHD is None else dq_nHD.to(q_LHD.dtype)
        return padded(dq_nHD, rows), dk_LKD, dv_LKD

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """The empty selection of this rank's queries."""
        tokens = call.sequence.tokens(self.rank)
        return call.attention.empty_selection(q_LHD[:tokens], k_LKD, call.against_all(self.rank))

    def _arriving(self, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall) -> Iterator[ArrivedChunks]:
        """Yield the chunks of each attention call: this rank's first, then back around the ring."""
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
        for first in range(0, size, self.width):
            steps = range(first, min(first + self.width, size))
            for step in steps:
                if step:
                    receiving.pop(step).wait()
            # A copy in token order, so that the chunk's buffer can receive the next one while attention reads the copy.
            arrived = [self._copied(steps, [chunks[step] for step in steps], call)]
            for step in steps:
                if step:
                    start_receiving(step + len(buffers))  # into the buffer of a chunk that has been copied
            yield arrived.pop()  # so that no copy is kept here

    def _copied(self, steps: range, chunks_2LKD: list[Tensor], call: ShardedCall) -> ArrivedChunks:
        """These chunks with a copy of their keys and values, in token order."""
        owners = call.sequence.select_ranks([(self.rank - step) % self.communicator.size for step in steps])
        queries = call.sequence.ranges[self.rank]
        if not any(sees(queries, ranges, call.layout.edges) for ranges in owners.ranges):
            return ArrivedChunks(steps, owners, None)
        k_SKD, v_SKD = (owners.copy_to_packed([chunk[side] for chunk in chunks_2LKD]) for side in (0, 1))
        return ArrivedChunks(steps, owners, (k_SKD, v_SKD))
