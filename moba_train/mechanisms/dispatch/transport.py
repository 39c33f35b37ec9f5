"""Dispatch: queries travel to the ranks that own the keys they attend to, and the results come back.

MoBA began with this transport: the tokens of a rank are an expert, and a query is sent to the experts that it selects
(docs/reference/attention-kinds.md). The owner of units that all queries select (an attention sink) has all the work, so
`auto` never takes it. Keys and values do not travel, except to complete the units that straddle shards (units.py), and
their gradients are summed where they are, in float32.

A query of one head is sent at most once to each rank, with the ids of the units that it selected there; the owner
attends to them, joins the results, and sends one back. The query's rank joins those of all owners with that of its own
unit. Key/value heads go one after the other, so that the rows which a rank receives, all queries in the worst case, are
those of one head. The backward pass sends the queries again, with the gradients and results that belong to them.

Sizes of messages depend on the selection: in both passes every rank waits for its device, which counts what it sends,
and exchanges these counts with the others. No communication overlaps attention.

Shape suffixes as in base.py; U rows of a rank's own units, N units, C selected units of a query, G query heads of a
key/value head, E queries that a rank sends, F queries that it receives, R ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.kernels.common.merge import merge
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.attention.shard import padded
from moba_train.config.model import ModelConfig
from moba_train.errors import number_ranges
from moba_train.mechanisms.dispatch.blocks_by_unit import BlocksByUnit, UnitQueries, units_of
from moba_train.parallel.context.comm import Communicator, Ranks
from moba_train.parallel.context.costs import TransportCost
from moba_train.parallel.context.layout import SequenceLayout, contiguous
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.base import (
    ShardedCall,
    Transport,
    TransportSpec,
    padded_lse,
)
from moba_train.parallel.context.units import owned_units, rows_of_own_units, rows_of_shard, summaries_of_own_units


class DispatchSpec(TransportSpec):
    """The transport `dispatch`."""

    name = "dispatch"
    # Measured on four H200 at 256K, MoBA 512/8: 2,897 ms with a sink, 608 without
    # (benchmarks/results/context-skew-h200.json).
    not_for_auto = "only if it is named: the owner of blocks that all queries select would attend for all of them"

    def make(self, strategy: CPStrategy, ranks: Ranks) -> Transport:
        """Over the group's own connections."""
        return Dispatch(ranks.communicator)

    def cost(self, strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
        """The cost if queries select any units with equal probability. With an attention sink one rank receives up to
        `ranks` times as much. Not compared with measured times."""
        units = max((found.history_units for local in shape.attentions if (found := units_of(local))), default=0)
        tokens = shape.tokens / strategy.ranks
        # Ranks, its own included, that a query of one head is sent to.
        reached = strategy.ranks * (1 - (1 - 1 / strategy.ranks) ** units)
        remote = reached * (1 - 1 / strategy.ranks)
        # Forward: q is sent, out comes back. Backward: q, dout and out are sent, dq comes back. With them go the ids of
        # the selected units in both passes, and the log-sum-exp, to and fro.
        small = 4 * (2 * units + 2) * shape.heads
        received = tokens * remote * (6 * shape.q_bytes + small)
        within = (strategy.node_size - 1) / max(1, strategy.ranks - 1)
        # Rows are gathered (4 tensors, read and written); out and dq are joined in float32 (5 of a query's bytes each).
        copied = tokens * reached * 18 * shape.q_bytes
        # Rows of one key/value head, sent and received (q, dout, out, dq), and dq, dk and dv of the shard in float32.
        buffers = tokens * (8 * reached * shape.q_bytes / shape.kv_heads + 2 * shape.q_bytes + 2 * shape.kv_bytes)
        # All of it up front: sizes of messages follow from the selection, so no transfer overlaps attention.
        return TransportCost(received * within, received * (1 - within), copied, buffers, upfront_share=1)

    def check_shape(self, strategy: CPStrategy, shape: AttentionShape) -> None:
        """Raises ValueError for layers that cannot attend to one unit at a time."""
        if not all(map(units_of, shape.attentions)):
            raise ValueError(
                "parallel.cp_transport: 'dispatch' sends queries to the owners of the blocks that they select, and an "
                "attention of these layers selects none or cannot attend to one at a time; use another transport"
            )

    def problems(
        self, kinds: Sequence[AttentionKind], model: ModelConfig, device: str | None, compute: str
    ) -> Iterator[str]:
        """Layers that cannot attend to one unit at a time, and what the varlen kernels that do so cannot do on CUDA."""
        others = [layer for layer, kind in enumerate(kinds) if not all(map(units_of, kind.attentions))]
        if others:
            names = " or ".join(map(repr, sorted({kinds[layer].name for layer in others})))
            yield (
                f"which sends queries to the owners of the blocks that they select; kind {names} (layers "
                f"{number_ranges(others)}) cannot be divided so; use another transport"
            )
        if device == "cuda" and compute == "fp32":
            yield "which computes in 16 bits on CUDA; set precision.compute: bf16, or use another transport"
        width = model.head_width
        if device == "cuda" and (width % 8 or width > 256):
            yield f"which needs heads of a width of 8, 16, ... or 256 on CUDA; the model's have {width}"

    def has_unequal_shards(self, work_grows: bool) -> bool:
        """Always: a rank's work is that of its keys, and earlier keys are selected by more queries."""
        return True


DISPATCH = DispatchSpec()


class Dispatch(Transport):
    """Sends queries to the owners of keys; see the top of this file.

    Keys are gathered (`AllGather`) for an attention that is not offered by the unit: evaluations compare a model with
    full attention. Layers with such an attention are refused before training starts (resolve/recipe.py).
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        # For layers of full attention and for evaluations on the same weights, which name no owner to send to.
        self.gathered = AllGather(communicator, slices=1)

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Select, attend to own units, then to the selected ones, one key/value head after the other."""
        units = units_of(call.attention)
        if units is None:
            return self.gathered.forward(q_LHD, k_LKD, v_LKD, call)
        owner = _Owner(self.communicator, call, units)
        q_UHD, k_UKD, v_UKD = (owner.take(x) for x in (q_LHD, k_LKD, v_LKD))
        selection = self._select(q_LHD, k_UKD, call, owner)
        routing = _Routing(owner, call, selection, k_LKD.shape[1])
        # By the owner, not by the query's rank: a unit that straddles two shards is complete only there.
        own_UHD, own_HU = units.attend_own(q_UHD, k_UKD, v_UKD, owner.layout)
        # Joined in float32: up to cp results are added, each rounded once.
        out_nHD = owner.give_back(own_UHD).to(accumulation_dtype(q_LHD.dtype)).contiguous()
        lse_nH = owner.give_back(own_HU.T.contiguous())
        if routing.weights_HnW is not None:
            out_nHD *= routing.weights_HnW[..., 0].T.unsqueeze(-1)
        q_rows, out_rows = (x.flatten(0, 1) for x in (contiguous(q_LHD[: out_nHD.shape[0]]), out_nHD))
        for kv_head, route in routing.routes():
            queries = route.send(q_rows)
            k_UD, v_UD = (contiguous(x[:, kv_head]) for x in (k_UKD, v_UKD))
            out_FD, lse_F = units.attend(queries, k_UD, v_UD, owner.layout)
            route.join(out_rows, lse_nH.flatten(), route.send_back(out_FD), route.send_back(lse_F))
        rows = q_LHD.shape[0]
        return padded(out_nHD.to(q_LHD.dtype), rows), padded_lse(lse_nH.T, rows), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Send the queries again; gradients of queries come home, those of keys and values stay with their owner."""
        units = units_of(call.attention)
        if units is None:
            return self.gathered.backward(state, selection, call)
        rows = state.q.shape[0]
        owner = _Owner(self.communicator, call, units)
        routing = _Routing(owner, call, selection, state.k.shape[1])
        k_UKD, v_UKD = owner.take(state.k), owner.take(state.v)
        state = state.part(rows=slice(0, call.sequence.tokens(self.rank)))
        own = owner.own_state(state._replace(k=k_UKD, v=v_UKD), routing.weights_HnW)
        dq_UHD, dk_UKD, dv_UKD = units.attend_own_backward(own, owner.layout)
        dq_nHD = owner.give_back(dq_UHD).to(accumulation_dtype(dq_UHD.dtype)).contiguous()
        q_rows, dout_rows, out_rows = (x.flatten(0, 1) for x in (state.q, state.dout, state.out))
        for kv_head, route in routing.routes():
            queries = route.send(q_rows)
            merged = route.send_merged(dout_rows, out_rows, state.lse.T.flatten())
            k_UD, v_UD = (contiguous(x[:, kv_head]) for x in (k_UKD, v_UKD))
            dq_FD, dk_UD, dv_UD = units.attend_backward(queries, merged, k_UD, v_UD, owner.layout)
            dk_UKD[:, kv_head] += dk_UD
            dv_UKD[:, kv_head] += dv_UD
            route.add(dq_nHD.flatten(0, 1), route.send_back(dq_FD))
        dk_nKD, dv_nKD = (owner.give_back(x.to(state.k.dtype)) for x in (dk_UKD, dv_UKD))
        return padded(dq_nHD.to(state.q.dtype), rows), padded(dk_nKD, rows), padded(dv_nKD, rows)

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """The empty selection of this rank's queries."""
        units = units_of(call.attention)
        if units is None:
            return self.gathered.empty_selection(q_LHD, k_LKD, call)
        tokens = call.sequence.tokens(self.rank)
        return units.empty_selection(q_LHD[:tokens], k_LKD, call.against_all(self.rank))

    def _select(self, q_LHD: Tensor, k_UKD: Tensor, call: ShardedCall, owner: "_Owner") -> Selection:
        """The units that this rank's queries select, from the summaries of all ranks."""
        summaries = summaries_of_own_units(k_UKD, owner.owned, call, self.communicator)
        tokens = call.sequence.tokens(self.rank)
        if not tokens:
            return self.empty_selection(q_LHD, k_UKD, call)
        return owner.units.select(contiguous(q_LHD[:tokens]), summaries, call.against_all(self.rank))


class _Owner:
    """This rank as the owner of units: rows on their way to it and back, and the layout of its own units."""

    def __init__(self, communicator: Communicator, call: ShardedCall, units: BlocksByUnit) -> None:
        self.communicator = communicator
        self.units = units
        self.sequence = call.sequence
        self.unit_size = call.attention.facts.alignment
        self.owned = owned_units(call.layout, call.sequence, self.unit_size)
        ranges = self.owned.ranges[communicator.rank]
        self.layout: Layout = call.layout.part(ranges, ranges)
        self._whole = call.layout

    def take(self, x_L: Tensor) -> Tensor:
        """Rows [U, ...] of this rank's units, from every rank's shard [L, ...]."""
        return contiguous(rows_of_own_units(x_L, self.owned, self.sequence, self.communicator))

    def give_back(self, x_U: Tensor) -> Tensor:
        """The inverse of `take`, without padding: [n, ...]."""
        return rows_of_shard(x_U, self.owned, self.sequence, self.communicator)

    def own_state(self, state: BackwardState, weights_HnW: Tensor | None) -> BackwardState:
        """The state of `attend_own_backward`, from the merged one of this rank's queries and its units' keys."""
        if weights_HnW is None:
            dout, q, out, lse_UH = (self.take(x) for x in (state.dout, state.q, state.out, state.lse.T.contiguous()))
            return BackwardState(dout, q, state.k, state.v, out, lse_UH.T.contiguous())
        weighted = (state.dout * weights_HnW[..., 0].T.unsqueeze(-1)).to(state.dout.dtype)
        dout, q = self.take(weighted), self.take(state.q)
        return BackwardState(dout, q, state.k, state.v, *self.units.attend_own(q, state.k, state.v, self.layout))

    def owners_of_units(self) -> Tensor:
        """The owner of each unit, see `_owners`; kept with the layout."""
        key = ("owners of units", self.sequence, self.unit_size)
        return self._whole.cached(key, lambda: _owners(self.units.first_tokens(self._whole), self.sequence))


class _Routing:
    """Destinations of this rank's queries in one call. Creating it waits for the device and for the other ranks."""

    def __init__(self, owner: _Owner, call: ShardedCall, selection: Selection, kv_heads: int) -> None:
        self.communicator = owner.communicator
        self.units_HnC = selection[0]
        self.weights_HnW = selection[1] if len(selection) > 1 else None
        self.owners_N = owner.owners_of_units()
        self.kv_heads = kv_heads
        owners_HnC = self.owners_N[self.units_HnC]
        ranks = range(self.communicator.size)
        self.is_sent_RHn = torch.stack([(owners_HnC == rank).any(-1) for rank in ranks])
        # One exchange for all heads: the host must know the sizes of messages.
        sent_RK = self.is_sent_RHn.unflatten(1, (kv_heads, -1)).flatten(2).sum(2)
        (received_RK,) = self.communicator.all_to_all(sent_RK).wait()
        # One copy to the host for both, as each waits for the device.
        self.sent_KR, self.received_KR = torch.stack([sent_RK.T, received_RK.T]).tolist()

    def routes(self) -> Iterator[tuple[int, "_Route"]]:
        """(key/value head, its messages); nothing if no query on any rank selects a unit other than its own."""
        if self.units_HnC.shape[2]:
            for kv_head in range(self.kv_heads):
                yield kv_head, self._route(kv_head)

    def _route(self, kv_head: int) -> "_Route":
        heads, tokens, _ = self.units_HnC.shape
        group = heads // self.kv_heads
        some = slice(kv_head * group, (kv_head + 1) * group)
        found_E = self.is_sent_RHn[:, some].flatten().nonzero().squeeze(1)  # by rank, then by head and token
        place_E = found_E % max(1, group * tokens)
        rank_E = found_E // max(1, group * tokens)
        row_E = place_E % max(1, tokens) * heads + some.start + place_E // max(1, tokens)
        units_EC = self.units_HnC[some].flatten(0, 1)[place_E]
        # The width C stays, with -1 for units of other owners: lists of different lengths would need a further exchange
        # of sizes.
        units_EC = torch.where(self.owners_N[units_EC] == rank_E.unsqueeze(1), units_EC, -1)
        weights_EC = None
        if self.weights_HnW is not None:
            weights_EC = self.weights_HnW[some, :, 1:].flatten(0, 1)[place_E]
        sent = self.sent_KR[kv_head]
        return _Route(self.communicator, sent, self.received_KR[kv_head], row_E, units_EC, weights_EC)


@dataclass(frozen=True)
class _Route:
    """The messages of the query heads that share a key/value head."""

    communicator: Communicator
    sent: list[int]
    """Queries that go to each rank."""
    received: list[int]
    """Queries that come from each rank."""
    row_E: Tensor
    """int64: row (token x heads + head) of each query that is sent, by rank."""
    units_EC: Tensor
    """int32: the units that each attends to there; -1 for none."""
    weights_EC: Tensor | None

    def send(self, q_rows: Tensor) -> UnitQueries:
        """Send queries, from the rows [n * H, D] of all, and return those that came."""
        weights = None if self.weights_EC is None else self._send(self.weights_EC)
        return UnitQueries(self._send(q_rows[self.row_E]), self._send(self.units_EC), weights)

    def send_merged(self, dout_rows: Tensor, out_rows: Tensor, lse_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Send the gradients and the merged results of the queries, and return those that came."""
        # One message for both, as every uneven exchange costs a launch and a wait of all ranks.
        both_F2D = self._send(torch.stack([dout_rows[self.row_E], out_rows[self.row_E]], dim=1))
        dout_FD, out_FD = (x.contiguous() for x in both_F2D.unbind(1))
        return dout_FD, out_FD, self._send(lse_rows[self.row_E])

    def send_back(self, x_F: Tensor) -> Tensor:
        """Send results [F, ...] to where the queries came from, and return those of this rank's queries [E, ...]."""
        return self.communicator.all_to_all_uneven(x_F.contiguous(), self.received, self.sent)

    def join(self, out_rows: Tensor, lse_rows: Tensor, part_ED: Tensor, part_E: Tensor) -> None:
        """Join the owners' results with those so far, in place, in the order of ranks."""
        # Rank by rank: within a rank no row comes twice, so the indexed writes do not collide and the order of sums is
        # fixed.
        for row, part_eD, part_e in self._by_rank(self.row_E, part_ED, part_E):
            if self.weights_EC is None:
                out_e1D, lse_1e = merge(
                    out_rows[row].unsqueeze(1), lse_rows[row].unsqueeze(0), part_eD.unsqueeze(1), part_e.unsqueeze(0)
                )
                out_rows[row] = out_e1D.squeeze(1)
                lse_rows[row] = lse_1e.squeeze(0)
            else:
                out_rows[row] += part_eD
                lse_rows[row] = torch.logaddexp(lse_rows[row], part_e)

    def add(self, sum_rows: Tensor, part_ED: Tensor) -> None:
        """Add the owners' parts to the sums so far, in place, in the order of ranks."""
        for row, part_eD in self._by_rank(self.row_E, part_ED):
            sum_rows[row] += part_eD  # no row goes to a rank twice

    def _send(self, x_E: Tensor) -> Tensor:
        return self.communicator.all_to_all_uneven(x_E.contiguous(), self.sent, self.received)

    def _by_rank(self, *tensors_E: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The rows of each tensor that belong to each rank."""
        return zip(*(x.split(self.sent) for x in tensors_E), strict=True)


def _owners(first_N: Tensor, sequence: SequenceLayout) -> Tensor:
    """int16 [N + 1]: the rank that owns each unit, given its first token; -1 for ids of no unit, and at the end, where
    an id of -1 finds it."""
    owners = torch.full((first_N.numel() + 1,), -1, dtype=torch.int16, device=first_N.device)
    for rank, ranges in enumerate(sequence.ranges):
        for start, stop in ranges:
            owners[:-1].masked_fill_((start <= first_N) & (first_N < stop), rank)
    return owners
