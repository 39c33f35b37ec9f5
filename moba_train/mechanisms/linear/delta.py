"""The delta rule with a decay for each channel: token by token, over ranks, and part by part.

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,   out_t = S_t^T q_t

(Kimi Linear, arXiv:2510.26692, equation 1). Here it runs in plain PyTorch, for CPUs and short sequences; a GPU computes
it in chunks by fla-core (fla.py).

**Over ranks.** A range of tokens turns the state S before it into A S + B, where A is the product of its transitions:
the state that it leaves behind a unit matrix with values of zero, and B the one behind an empty state. Ranks exchange A
and B of their ranges by one all-gather, and each computes the states before its own ranges. The delta rule is linear in
the state and the values together, so what a state before a range adds is the output with values of zero that begins
with it.

**Part by part.** Each part of the rows hands its last state on, and the backward pass repeats it. Kernels of the delta
rule make some thirty tensors of the size of q in the backward pass; those of a part are small compared with the layer's
own.

Shape suffixes: n rows (of a part), r ranges of this layer, N segments, or ranges of all ranks, H query heads, K
key/value heads, d head width.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moba_train.attention.layout import Layout, TokenRange
from moba_train.attention.shard import Shard
from moba_train.mechanisms.linear.states import all_ranges, gather_ranges, query_ranges, segment_edges


def delta_attention(
    q_nHd: Tensor,
    k_nHd: Tensor,
    v_nHd: Tensor,
    log_alpha_nHd: Tensor,
    beta_nH: Tensor,
    edges: Sequence[int],
    initial_NHdd: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [n, H, d] in the dtype of v and the states behind the segments [N, H, d, d] in float32 or float64.

    `edges` [N + 1]: rows where segments begin, and n. `initial_NHdd`: the states before the segments; zeros if None.
    Autograd keeps several states for every token.
    """
    dtype = torch.promote_types(v_nHd.dtype, torch.float32)
    outputs = []
    finals = []
    for segment in range(len(edges) - 1):
        rows = slice(edges[segment], edges[segment + 1])
        inputs = [x[rows].to(dtype).unbind(0) for x in (q_nHd, k_nHd, v_nHd, log_alpha_nHd.exp(), beta_nH)]
        state_Hdd = (
            q_nHd.new_zeros((*q_nHd.shape[1:], v_nHd.shape[-1]), dtype=dtype)
            if initial_NHdd is None
            else initial_NHdd[segment]
        )
        for q_Hd, k_Hd, v_Hd, alpha_Hd, beta_H in zip(*inputs, strict=True):
            state_Hdd = alpha_Hd[..., None] * state_Hdd
            change_Hd = beta_H[..., None] * (v_Hd - torch.einsum("hd,hde->he", k_Hd, state_Hdd))
            state_Hdd = state_Hdd + k_Hd[..., None] * change_Hd[:, None]
            outputs.append(torch.einsum("hd,hde->he", q_Hd, state_Hdd))
        finals.append(state_Hdd)
    return torch.stack(outputs).to(v_nHd.dtype), torch.stack(finals)


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule, of each row and of each head, before norms and activations."""

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


def delta_over_ranks(
    inputs: DeltaInputs, rule: DeltaRule, shard: Shard, wants_states: bool
) -> tuple[Tensor, Tensor | None]:
    """The delta rule [n, H, d] over the rows of a sequence that ranks share and, if wanted, the states behind this
    rank's ranges, [r, H, d, d]. All ranks must call it together.

    It is computed once for all rows, and twice more for those of the documents that go on between ranges.
    """
    layout = shard.layout
    maps_r2Hdd = _maps(inputs, rule, layout)
    before_rHdd = _states_before(gather_ranges(maps_r2Hdd, shard), shard)
    behind_rHdd = None
    if wants_states:
        added_rHdd, kept_rHdd = maps_r2Hdd.unbind(1)
        behind_rHdd = kept_rHdd @ before_rHdd[: len(kept_rHdd)] + added_rHdd
    if not len(inputs.q_nHd):  # its gradients must reach the other ranks all the same
        return inputs.q_nHd + before_rHdd[:0].sum(), behind_rHdd
    out_nHd, _ = rule(inputs, segment_edges(layout), None, False)
    firsts = [first for first, _ in _end_segments(layout)]
    # The rule is linear in (state, values): only the first document of a range can have begun on another rank, so just
    # its rows are computed a second time, without values.
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
        # A rank without tokens takes part in the backward pass of the gather all the same: the collective needs every
        # rank.
        nothing = torch.stack([x.sum() for x in inputs.by_row]).sum()
        dtype = torch.promote_types(nothing.dtype, torch.float32)
        return nothing.to(dtype) + torch.zeros((1, 2, heads, width, width), dtype=dtype, device=nothing.device)
    lasts = [last for _, last in ends]
    rows = inputs.rows(lasts)
    dtype = torch.promote_types(inputs.v_nKd.dtype, torch.float32)
    unit_dd = torch.eye(width, dtype=dtype, device=inputs.v_nKd.device)
    # B from an empty state with the values, A from the unit matrix without: as further heads of one call, half the
    # launches.
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
    # By token, not by rank: a zigzag rank has an early and a late range.
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


_ROWS = 8_192
"""Rows of a part of a wide layer. With kernels of 32 heads of 64, whose launches take the host longer than 4,096 rows
take an H200, parts of 4,096 took 24.3 ms for 8,192 tokens, where one call took 8.8."""
_CHANNELS = 2_048
"""The narrowest layer that is wide. Parts of a narrower one have more rows, and the same memory: its launches take the
host as long, and the GPU less."""
_CHUNK = 64
"""Rows that the kernels take at a time: parts are multiples of it, so that they cut no chunk in two."""

Rows = tuple[Tensor, ...]
"""Tensors [n, ...] with the same rows."""
Part = Callable[[Rows, Rows | None, Edges, Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""Outputs [n, ...] and, if wanted, the states behind the segments [N, H, d, d] of a part, from its rows, those before
it, its edges, and the states before its segments."""


def most_rows(channels: int) -> int:
    """The most rows of a part of a layer whose queries have this number of channels, all heads together."""
    return max(_ROWS, _ROWS * _CHANNELS // channels // _CHUNK * _CHUNK)


def in_parts(
    run: Part,
    rows: Rows,
    edges: Edges,
    initial_NHdd: Tensor | None = None,
    wants_states: bool = False,
    *,
    most: int,
    lookback: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Results of `run` for all rows, computed for at most `most` rows at a time.

    `run` is also given the `lookback` rows before its part: zeros for those that its document does not have, None if
    the document has none of them. Every part has at least `lookback` rows.
    """
    bounds = edges[1].tolist()
    sizes = _part_sizes(bounds[-1], most)
    pieces = list(zip(*(x.split(sizes) for x in rows), strict=True))
    outputs: list[Tensor] = []
    behind: list[Tensor] = []
    state_1Hdd: Tensor | None = None
    start = 0
    for number, size in enumerate(sizes):
        stop = start + size
        first, last = bisect_right(bounds, start) - 1, bisect_left(bounds, stop)  # segments first to last - 1 meet it
        inner = (*(max(bound, start) - start for bound in bounds[first:last]), size)
        goes_on = bounds[last] > stop
        known = min(lookback, start - bounds[first])
        # fla-core's passes hold 42 tensors of the size of q at 32K, most of them in the backward pass; recomputed in
        # parts, a whole layer of `kda` holds 17 (counted), 1.43 times full attention's peak (measured;
        # benchmarks/results/mechanisms-h200.json).
        out, behind_NHdd = checkpoint(
            run,
            pieces[number],
            _rows_before(pieces[number - 1], known, lookback) if known else None,
            _part_edges(inner, edges[0].device),
            _part_states(initial_NHdd, state_1Hdd, first, last),
            goes_on or wants_states,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outputs.append(out)
        state_1Hdd = behind_NHdd[-1:] if goes_on else None
        if wants_states:
            behind.append(behind_NHdd[:-1] if goes_on else behind_NHdd)
        start = stop
    return torch.cat(outputs), torch.cat(behind) if wants_states else None


def _part_sizes(total: int, most: int) -> list[int]:
    """Parts of nearly equal sizes."""
    parts = -(-total // most)
    # Nearly equal: a short last part would cost the host as many launches, and fla-core tunes some of its kernels again
    # for another number of rows.
    size = -(-total // parts)
    if size >= _CHUNK:
        size = min(most, -(-size // _CHUNK) * _CHUNK)
    return [min(size, total - start) for start in range(0, total, size)]


@lru_cache(maxsize=64)
def _part_edges(bounds: tuple[int, ...], device: torch.device) -> Edges:
    """Equal parts share these tensors, by which fla-core knows what it has computed from them."""
    on_cpu = torch.tensor(bounds)
    return on_cpu.to(device, non_blocking=True), on_cpu


def _rows_before(rows: Rows, known: int, lookback: int) -> Rows:
    """The last `known` rows, behind zeros up to `lookback`."""
    return tuple(torch.cat([x.new_zeros((lookback - known, *x.shape[1:])), x[len(x) - known :]]) for x in rows)


def _part_states(initial_NHdd: Tensor | None, state_1Hdd: Tensor | None, first: int, last: int) -> Tensor | None:
    """The states before segments `first` to `last` - 1, the first of which may have begun in an earlier part."""
    if state_1Hdd is None:
        return None if initial_NHdd is None else initial_NHdd[first:last]
    others = last - first - 1
    rest = (
        state_1Hdd.new_zeros(others, *state_1Hdd.shape[1:]) if initial_NHdd is None else initial_NHdd[first + 1 : last]
    )
    return torch.cat([state_1Hdd, rest])
