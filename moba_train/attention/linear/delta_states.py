"""States of the delta rule that come from other ranks.

A range of tokens turns the state S before it into A S + B, where A is the product of its transitions: the state that it
leaves behind a unit matrix with values of zero, and B the one behind an empty state. Ranks exchange A and B of their
ranges by one all-gather, and each computes the states before its own ranges. The delta rule is linear in the state and
the values together, so what a state before a range adds is the output with values of zero that begins with it.

Shape suffixes: n rows, r ranges of this layer, N ranges of all ranks, H query heads, K key/value
heads, d head width.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.attention.linear.ranges import all_ranges, gather_ranges, query_ranges, segment_edges
from moba_train.attention.protocol import Layout, TokenRange
from moba_train.attention.shard import Shard


class DeltaInputs(NamedTuple):
    """What the delta rule needs of each row, before norms and activations, and of each head."""

    q_nHd: Tensor
    k_nKd: Tensor
    v_nKd: Tensor
    decay_nHd: Tensor
    beta_nH: Tensor
    A_log_H: Tensor
    dt_bias_h: Tensor

    @property
    def by_row(self) -> tuple[Tensor, ...]:
        """The tensors that have rows, the first five."""
        return self[:5]

    @property
    def of_heads(self) -> tuple[Tensor, ...]:
        """The tensors that all rows share, the other two."""
        return self[5:]

    def rows(self, parts: Sequence[slice]) -> "DeltaInputs":
        """Some rows, one part after the other."""
        return DeltaInputs(*(torch.cat([x[part] for part in parts]) for x in self.by_row), *self.of_heads)

    def without_values(self) -> "DeltaInputs":
        """Values of zero."""
        return self._replace(v_nKd=torch.zeros_like(self.v_nKd))

    def beside(self, other: "DeltaInputs") -> "DeltaInputs":
        """Both, with twice as many heads."""
        tensors = zip(self, other, strict=True)
        return DeltaInputs(*(torch.cat(pair, min(1, pair[0].dim() - 1)) for pair in tensors))


Edges = tuple[Tensor, Tensor]
"""Rows where segments begin, and the number of rows: on the device and on the CPU."""
DeltaRule = Callable[[DeltaInputs, Edges, Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""Outputs [n, H, d] and, if wanted, states [segments, H, d, d], from inputs, edges and the states before segments."""


def delta_over_ranks(inputs: DeltaInputs, rule: DeltaRule, shard: Shard) -> tuple[Tensor, Tensor | None]:
    """The delta rule [n, H, d] over the rows of a sequence that ranks share, and for an observer the states behind this
    rank's ranges, [r, H, d, d]. All ranks must call it together.

    It is computed once for all rows, and twice more for those of the documents that go on between ranges.
    """
    layout = shard.layout
    maps_r2Hdd = _maps(inputs, rule, layout)
    before_rHdd = _states_before(gather_ranges(maps_r2Hdd, shard), shard)
    behind_rHdd = None
    if shard.observer:
        added_rHdd, kept_rHdd = maps_r2Hdd.unbind(1)
        behind_rHdd = kept_rHdd @ before_rHdd[: len(kept_rHdd)] + added_rHdd
    if not len(inputs.q_nHd):  # its gradients must reach the other ranks all the same
        return inputs.q_nHd + before_rHdd[:0].sum(), behind_rHdd
    out_nHd, _ = rule(inputs, segment_edges(layout), None, False)
    firsts = [first for first, _ in _end_segments(layout)]
    added_nHd, _ = rule(inputs.rows(firsts).without_values(), _edges(firsts, out_nHd.device), before_rHdd, False)
    rows_n = torch.cat([torch.arange(part.start, part.stop) for part in firsts]).to(out_nHd.device, non_blocking=True)
    return out_nHd.index_add(0, rows_n, added_nHd), behind_rHdd


def _end_segments(layout: Layout) -> list[tuple[slice, slice]]:
    """Rows of the first and of the last segment of each range that has tokens; they may be the same."""
    edges = segment_edges(layout)[1].tolist()
    found = []
    row = 0
    for start, stop in query_ranges(layout):
        if start < stop:
            first = slice(row, edges[bisect_right(edges, row)])
            row += stop - start
            found.append((first, slice(edges[edges.index(row) - 1], row)))
    return found


def _edges(parts: Sequence[slice], device: torch.device) -> Edges:
    on_cpu = torch.tensor([0, *accumulate(part.stop - part.start for part in parts)])
    return on_cpu.to(device, non_blocking=True), on_cpu


def _maps(inputs: DeltaInputs, rule: DeltaRule, layout: Layout) -> Tensor:
    """B and A of each range, [r, 2, H, d, d]; A is zero where a document begins inside the range."""
    heads, width = inputs.q_nHd.shape[1:]
    ends = _end_segments(layout)
    if not ends:
        nothing = torch.stack([x.sum() for x in inputs.by_row]).sum()
        dtype = torch.promote_types(nothing.dtype, torch.float32)
        return nothing.to(dtype) + torch.zeros((1, 2, heads, width, width), dtype=dtype, device=nothing.device)
    lasts = [last for _, last in ends]
    rows = inputs.rows(lasts)
    dtype = torch.promote_types(inputs.v_nKd.dtype, torch.float32)
    unit_dd = torch.eye(width, dtype=dtype, device=inputs.v_nKd.device)
    initial_2Hdd = torch.stack([torch.zeros_like(unit_dd), unit_dd])[:, None].expand(2, heads, width, width)
    initial_r2Hdd = initial_2Hdd.flatten(0, 1).repeat(len(lasts), 1, 1, 1)
    _, behind_rHdd = rule(rows.beside(rows.without_values()), _edges(lasts, unit_dd.device), initial_r2Hdd, True)
    assert behind_rHdd is not None
    one_segment_r = torch.tensor([first == last for first, last in ends]).to(unit_dd.device, non_blocking=True)
    added_rHdd, kept_rHdd = behind_rHdd.unflatten(1, (2, heads)).unbind(1)
    return torch.stack([added_rHdd, kept_rHdd * one_segment_r.view(-1, 1, 1, 1)], 1)


def _states_before(maps_N2Hdd: Tensor, shard: Shard) -> Tensor:
    """The state before each of this rank's ranges, [r, H, d, d]."""
    layout = shard.layout
    everyone = all_ranges(shard)
    empty_Hdd = torch.zeros_like(maps_N2Hdd[0, 0]) + maps_N2Hdd[:0].sum()  # with gradient, so that all ranks send it
    before: dict[TokenRange, Tensor] = {}
    state_Hdd = empty_Hdd
    for index in sorted(range(len(everyone)), key=everyone.__getitem__):
        start, stop = everyone[index]
        if start == stop:
            continue
        if start in layout.edges:  # a document begins
            state_Hdd = empty_Hdd
        before[everyone[index]] = state_Hdd
        added_Hdd, kept_Hdd = maps_N2Hdd[index]
        state_Hdd = kept_Hdd @ state_Hdd + added_Hdd
    return torch.stack([before.get(token_range, empty_Hdd) for token_range in query_ranges(layout)])
