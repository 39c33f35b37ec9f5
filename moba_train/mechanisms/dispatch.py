"""Dispatch: queries travel to the ranks that own the keys they attend to, and the results come back.

MoBA began with this transport: the tokens of a rank are an expert, and a query is sent to the experts that it selects
(docs/mechanisms.md). The owner of units that all queries select (an attention sink) has all the work, so `auto` never
takes it. Keys and values do not travel, except to complete the units that straddle shards (units.py), and their
gradients are summed where they are, in float32.

A query of one head is sent at most once to each rank, with the ids of the units that it selected there; the owner
attends to them, joins the results, and sends one back. The query's rank joins those of all owners with that of its own
unit. Key/value heads go one after the other, so that the rows which a rank receives, all queries in the worst case, are
those of one head. The backward pass sends the queries again, with the gradients and results that belong to them.

Sizes of messages depend on the selection: in both passes every rank waits for its device, which counts what it sends,
and exchanges these counts with the others. No communication overlaps attention.

Shape suffixes as in base.py; U rows of a rank's own units, N units, C selected units of a query, G query heads of a
key/value head, E queries that a rank sends, F queries that it receives, R ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.by_unit import UnitCall, UnitQueries
from moba_train.attention.merge import merge
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.parallel.context.comm import Communicator, Ranks
from moba_train.parallel.context.layout import SequenceLayout, contiguous
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.base import ShardedCall, Transport, padded, padded_lse, sum_dtype
from moba_train.parallel.context.units import owned_units, rows_of_own_units, rows_of_shard, summaries_of_own_units


def make_dispatch(strategy: CPStrategy, ranks: Ranks) -> Transport:
    """The transport `dispatch`."""
    return Dispatch(ranks.communicator)


class Dispatch(Transport):
    """Sends queries to the owners of keys; see the top of this file.

    Keys are gathered (`AllGather`) for an attention that is not offered by the unit: evaluations compare a model with
    full attention. Layers with such an attention are refused before training starts (resolve/recipe.py).
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        self.gathered = AllGather(communicator, slices=1)

    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Select, attend to own units, then to the selected ones, one key/value head after the other."""
        if call.unsharded.attention.by_unit is None:
            return self.gathered.forward(q_LHD, k_LKD, v_LKD, call)
        owner = _Owner(self.communicator, call)
        q_UHD, k_UKD, v_UKD = (owner.take(x) for x in (q_LHD, k_LKD, v_LKD))
        selection = self._select(q_LHD, k_UKD, call, owner)
        routing = _Routing(owner, call, selection, k_LKD.shape[1])
        own_UHD, own_HU = owner.call.attend_own(q_UHD, k_UKD, v_UKD)
        out_nHD = owner.give_back(own_UHD).to(sum_dtype(q_LHD.dtype)).contiguous()
        lse_nH = owner.give_back(own_HU.T.contiguous())
        if routing.weights_HnW is not None:
            out_nHD *= routing.weights_HnW[..., 0].T.unsqueeze(-1)
        q_rows, out_rows = (x.flatten(0, 1) for x in (contiguous(q_LHD[: out_nHD.shape[0]]), out_nHD))
        for kv_head, route in routing.routes():
            queries = route.send(q_rows)
            k_UD, v_UD = (contiguous(x[:, kv_head]) for x in (k_UKD, v_UKD))
            out_FD, lse_F = owner.call.attend(queries, k_UD, v_UD)
            route.join(out_rows, lse_nH.flatten(), route.send_back(out_FD), route.send_back(lse_F))
        rows = q_LHD.shape[0]
        return padded(out_nHD.to(q_LHD.dtype), rows), padded_lse(lse_nH.T, rows), selection

    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Send the queries again; gradients of queries come home, those of keys and values stay with their owner."""
        if call.unsharded.attention.by_unit is None:
            return self.gathered.backward(state, selection, call)
        rows = state.q.shape[0]
        owner = _Owner(self.communicator, call)
        routing = _Routing(owner, call, selection, state.k.shape[1])
        k_UKD, v_UKD = owner.take(state.k), owner.take(state.v)
        state = state.with_queries(slice(0, call.sequence.tokens(self.rank)))
        own = owner.own_state(state.with_keys(k_UKD, v_UKD), routing.weights_HnW)
        dq_UHD, dk_UKD, dv_UKD = owner.call.attend_own_backward(own)
        dq_nHD = owner.give_back(dq_UHD).to(sum_dtype(dq_UHD.dtype)).contiguous()
        q_rows, dout_rows, out_rows = (x.flatten(0, 1) for x in (state.q, state.dout, state.out))
        for kv_head, route in routing.routes():
            queries = route.send(q_rows)
            merged = route.send_merged(dout_rows, out_rows, state.lse.T.flatten())
            k_UD, v_UD = (contiguous(x[:, kv_head]) for x in (k_UKD, v_UKD))
            dq_FD, dk_UD, dv_UD = owner.call.attend_backward(queries, merged, k_UD, v_UD)
            dk_UKD[:, kv_head] += dk_UD
            dv_UKD[:, kv_head] += dv_UD
            route.add(dq_nHD.flatten(0, 1), route.send_back(dq_FD))
        dk_nKD, dv_nKD = (owner.give_back(x.to(state.k.dtype)) for x in (dk_UKD, dv_UKD))
        return padded(dq_nHD.to(state.q.dtype), rows), padded(dk_nKD, rows), padded(dv_nKD, rows)

    def gather(self, x_LHD: Tensor) -> Tensor:
        """One all-gather."""
        return self.gathered.gather(x_LHD)

    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """One all-to-all."""
        return self.gathered.sum_shards(x_RLx)

    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """The empty selection of this rank's queries."""
        if call.unsharded.attention.by_unit is None:
            return self.gathered.empty_selection(q_LHD, k_LKD, call)
        tokens = call.sequence.tokens(self.rank)
        return call.against_all(self.rank).by_unit.empty_selection(q_LHD[:tokens], k_LKD)

    def _select(self, q_LHD: Tensor, k_UKD: Tensor, call: ShardedCall, owner: "_Owner") -> Selection:
        """The units that this rank's queries select, from the summaries of all ranks."""
        summaries = summaries_of_own_units(k_UKD, owner.units, call.unsharded, self.communicator)
        tokens = call.sequence.tokens(self.rank)
        if not tokens:
            return self.empty_selection(q_LHD, k_UKD, call)
        return call.against_all(self.rank).by_unit.select(contiguous(q_LHD[:tokens]), summaries)


class _Owner:
    """This rank as the owner of units: rows on their way to it and back, and the call on its own units."""

    def __init__(self, communicator: Communicator, call: ShardedCall) -> None:
        self.communicator = communicator
        self.sequence = call.sequence
        self.layout = call.unsharded.layout
        self.unit_size = call.unsharded.attention.alignment
        self.units = owned_units(self.layout, call.sequence, self.unit_size)
        ranges = self.units.ranges[communicator.rank]
        self.call: UnitCall = call.unsharded.part(ranges, ranges).by_unit

    def take(self, x_L: Tensor) -> Tensor:
        """Rows [U, ...] of this rank's units, from every rank's shard [L, ...]."""
        return contiguous(rows_of_own_units(x_L, self.units, self.sequence, self.communicator))

    def give_back(self, x_U: Tensor) -> Tensor:
        """The inverse of `take`, without padding: [n, ...]."""
        return rows_of_shard(x_U, self.units, self.sequence, self.communicator)

    def own_state(self, state: BackwardState, weights_HnW: Tensor | None) -> BackwardState:
        """The state of `attend_own_backward`, from the merged one of this rank's queries and its units' keys."""
        if weights_HnW is None:
            dout, q, out, lse_UH = (self.take(x) for x in (state.dout, state.q, state.out, state.lse.T.contiguous()))
            return BackwardState(dout, q, state.k, state.v, out, lse_UH.T.contiguous())
        weighted = (state.dout * weights_HnW[..., 0].T.unsqueeze(-1)).to(state.dout.dtype)
        dout, q = self.take(weighted), self.take(state.q)
        return BackwardState(dout, q, state.k, state.v, *self.call.attend_own(q, state.k, state.v))

    def owners_of_units(self) -> Tensor:
        """The owner of each unit, see `_owners`; kept with the layout."""
        key = ("owners of units", self.sequence, self.unit_size)
        return self.layout.cached(key, lambda: _owners(self.call.first_tokens(), self.sequence))


class _Routing:
    """Which of this rank's queries go to which rank, for one call. Creating it waits for the device, and for others."""

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
        self.sent_KR, self.received_KR = torch.stack([sent_RK.T, received_RK.T]).tolist()

    def routes(self) -> Iterator[tuple[int, "_Route"]]:
        """(key/value head, its messages); nothing where no query selects any unit besides its own, on any rank."""
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
        both_F2D = self._send(torch.stack([dout_rows[self.row_E], out_rows[self.row_E]], dim=1))
        dout_FD, out_FD = (x.contiguous() for x in both_F2D.unbind(1))
        return dout_FD, out_FD, self._send(lse_rows[self.row_E])

    def send_back(self, x_F: Tensor) -> Tensor:
        """Send results [F, ...] to where the queries came from, and return those of this rank's queries [E, ...]."""
        return self.communicator.all_to_all_uneven(x_F.contiguous(), self.received, self.sent)

    def join(self, out_rows: Tensor, lse_rows: Tensor, part_ED: Tensor, part_E: Tensor) -> None:
        """Join the owners' results with those so far, in place, in the order of ranks."""
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
