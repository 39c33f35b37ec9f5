"""States of linear attention that come from other ranks, or from earlier calls of generation.

A layer's rows are those of one or more ranges of the packed sequence (`Shard.layout`). Linear attention inside the
ranges begins with empty states. As it is linear, with a constant decay a state S before a range adds
silu(q_t) lambda^(t - start + 1) S to the tokens of the document that the range begins in; and the state that a range
leaves behind is one product of its keys and values. So ranks exchange the states behind their ranges, by one all-gather
of [H, d, d] each, and every rank adds up those that reach its own ranges (as in LASP-2, Sun et al. 2025,
arXiv:2502.07563).

Shape suffixes: n rows, r ranges of this layer, L rows of the longest, N ranges of all ranks (padded, so that each rank
has equally many), or states, H query heads, K key/value heads, G query heads of a key/value head, d head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moba_train.attention.layout import Layout, TokenRange, TokenRanges, layout_arguments
from moba_train.attention.shard import Shard
from moba_train.attention.statistics import Statistics, joined
from moba_train.mechanisms.layout_operators import with_layout

T = TypeVar("T")

_NO_TOKENS = TokenRange(0, 0)

STATES = {
    "state_norm": "Frobenius norm of a head's state",
    "max_state_norm": "the largest",
    "min_decay": "smallest factor that a state, or a channel of it, keeps from one token to the next",
    "max_decay": "the largest",
    "output_norm": "norm of a head's output before the output norm",
    "max_output_norm": "the largest",
}
"""Statistics of a kind with states, by name, with their meaning."""


@torch.compiler.disable
def once(layout: Layout, name: str, make: Callable[[], T]) -> T:
    """`layout.cached`, outside of compiled code.

    The forward pass would be compiled to make what the recomputation finds made, so that the two would save different
    tensors, which activation checkpointing refuses.
    """
    return layout.cached(name, make)


def query_ranges(layout: Layout) -> TokenRanges:
    """The ranges of the layout's queries; one without tokens if there are none."""
    return layout.query_ranges or (_NO_TOKENS,)


def all_ranges(shard: Shard) -> tuple[TokenRange, ...]:
    """The ranges of all ranks, in rank order; ranks with fewer than others have ranges without tokens."""
    most = _most_ranges(shard)
    padded = (list(ranges) + [_NO_TOKENS] * (most - len(ranges)) for ranges in shard.place.ranges_by_rank)
    return tuple(token_range for ranges in padded for token_range in ranges)


def gather_ranges(x_r: Tensor, shard: Shard) -> Tensor:
    """`x_r` of all ranks, [N, ...]: one entry for each range, in the order of `all_ranges`; differentiable."""
    missing = _most_ranges(shard) - len(x_r)
    # Padded to the most ranges of any rank: an all-gather needs equal sizes.
    return shard.all_ranks(torch.cat([x_r, x_r.new_zeros((missing, *x_r.shape[1:]))])).flatten(0, 1)


def _most_ranges(shard: Shard) -> int:
    return max(len(ranges) for ranges in shard.place.ranges_by_rank)


def segments(layout: Layout) -> Tensor:
    """int64 [n], never descending: rows with equal numbers share a document and a range of the layout's queries."""
    rows = sum(stop - start for start, stop in query_ranges(layout))
    return _segments(*layout_arguments(layout), rows)


@torch.library.custom_op("moba_train::linear_segments", mutates_args=())
@with_layout
def _segments(layout: Layout, rows: int) -> Tensor:
    """`segments`; an operator, so that torch.compile traces a layer as a whole (`once` would break it in two)."""
    ranges = query_ranges(layout)
    device = layout.cu_seqlens.device
    numbers_n = torch.cat([torch.full((stop - start,), i, device=device) for i, (start, stop) in enumerate(ranges)])
    return layout.q_documents * len(ranges) + numbers_n


@_segments.register_fake
@partial(with_layout, traced=True)
def _(layout: Layout, rows: int) -> Tensor:
    return layout.cu_seqlens.new_empty((rows,), dtype=torch.int64)


def segment_edges(layout: Layout) -> tuple[Tensor, Tensor]:
    """int64 [segments + 1], on the layout's device and on the CPU: rows where the segments begin, and the number of
    rows. No segment is empty."""
    return once(layout, "segment edges", lambda: _segment_edges(layout))


def _segment_edges(layout: Layout) -> tuple[Tensor, Tensor]:
    edges = [0]
    row = 0
    for start, stop in query_ranges(layout):
        edges += [row + edge - start for edge in layout.edges if start < edge < stop]
        row += stop - start
        edges.append(row)
    # Empty ranges and documents give an edge twice, which fla-core would take for segments without rows.
    on_cpu = torch.tensor(edges).unique()
    return on_cpu.to(layout.cu_seqlens.device, non_blocking=True), on_cpu


def state_statistics(states_NHdd: Tensor, log_decay_x: Tensor, out_nHd: Tensor) -> Statistics:
    """The statistics of states, of logarithms of decays of any shape, and of outputs before their norm."""
    decay_x = log_decay_x.exp()
    decays = {"min_decay": decay_x.min().item(), "max_decay": decay_x.max().item()} if decay_x.numel() else {}
    norms = ("state_norm", torch.linalg.matrix_norm(states_NHdd)), ("output_norm", out_nHd.float().norm(dim=-1))
    return joined([Statistics(decays), *(_mean_and_largest(name, norm_xH) for name, norm_xH in norms)])


def _mean_and_largest(name: str, values: Tensor) -> Statistics:
    if not values.numel():
        return Statistics()
    return Statistics({name: values.mean().item(), f"max_{name}": values.max().item()}, values.numel())


def with_earlier_states(
    out_nHd: Tensor, q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor, log_decay_H: Tensor, shard: Shard
) -> Tensor:
    """`out_nHd`, linear attention of silu(q), silu(k) and v inside the shard's ranges, with what earlier states add.

    While tokens are generated, the states behind the new tokens are kept. All ranks must call it together.
    """
    if shard.generation is None and len(shard.place.ranges_by_rank) == 1:
        return out_nHd
    ranges = _Ranges.of_queries(shard.layout)
    states_rHdd = ranges.states_behind(k_nKd, v_nKd, log_decay_H)
    if shard.generation is not None:
        before_rHdd = shard.generation.states.get("state")
        if before_rHdd is not None:
            decay_rH = _powers(log_decay_H, ranges.lengths_r, states_rHdd.dtype)
            states_rHdd = states_rHdd + decay_rH[..., None, None] * before_rHdd
        shard.generation.states["state"] = states_rHdd
    else:
        before_rHdd = _from_other_ranks(states_rHdd, log_decay_H, shard)
    if before_rHdd is None:
        return out_nHd
    return out_nHd + ranges.added_by(before_rHdd, q_nHd, log_decay_H).to(out_nHd.dtype)


def states_behind(k_nKd: Tensor, v_nKd: Tensor, log_decay_H: Tensor, shard: Shard) -> Tensor:
    """The state behind the last token of each of the shard's ranges, [r, H, d, d], with what came before the range.

    One key/value head at a time, to spare memory. All ranks must call it together.
    """
    ranges = _Ranges.of_queries(shard.layout)
    heads = zip(k_nKd.split(1, 1), v_nKd.split(1, 1), log_decay_H.chunk(k_nKd.shape[1]), strict=True)
    states_rHdd = torch.cat([ranges.states_behind(*head) for head in heads], 1)
    if len(shard.place.ranges_by_rank) == 1:
        return states_rHdd
    before_rHdd = _from_other_ranks(states_rHdd, log_decay_H, shard)
    goes_on_r1 = (ranges.same_as_first_rL & ranges.same_as_last_rL).any(1, keepdim=True)
    weights_rH = _powers(log_decay_H, ranges.lengths_r, states_rHdd.dtype) * goes_on_r1
    return states_rHdd + weights_rH[..., None, None] * before_rHdd


@dataclass(frozen=True)
class _Ranges:
    """The ranges of a layer's rows; follows from the layout, and all layers share it."""

    lengths: list[int]
    lengths_r: Tensor
    same_as_first_rL: Tensor
    """True for tokens of the document in which their range begins; False for padding."""
    same_as_last_rL: Tensor
    """True for tokens of the document in which their range ends; False for padding."""

    @classmethod
    def of_queries(cls, layout: Layout) -> "_Ranges":
        lengths = [stop - start for start, stop in query_ranges(layout)]
        return cls(lengths, *_range_masks(*layout_arguments(layout), len(lengths), max(lengths)))

    def states_behind(self, k_nKd: Tensor, v_nKd: Tensor, log_decay_H: Tensor) -> Tensor:
        """The state behind each range, [r, H, d, d], from the rows of its last document in this range."""
        k_rLKd, v_rLKd = F.silu(self._by_range(k_nKd)), self._by_range(v_nKd)
        # Clamped before the power: padding lies behind the last row, and lambda^-n may overflow to inf, which times 0
        # is NaN.
        later_rL = (self.lengths_r[:, None] - 1 - self._places()).clamp(min=0)
        weights_rLH = _powers(log_decay_H, later_rL, k_rLKd.dtype) * self.same_as_last_rL[..., None]
        k_rLKGd = k_rLKd[:, :, :, None] * weights_rLH.unflatten(-1, (k_rLKd.shape[2], -1))[..., None]
        return torch.einsum("rlkgd,rlke->rkgde", k_rLKGd, v_rLKd).flatten(1, 2)

    def added_by(self, before_rHdd: Tensor, q_nHd: Tensor, log_decay_H: Tensor) -> Tensor:
        """Contribution of the states before the ranges to the rows' outputs, [n, H, d]."""
        weights_rLH = _powers(log_decay_H, self._places() + 1, before_rHdd.dtype) * self.same_as_first_rL[..., None]
        q_rLHd = F.silu(self._by_range(q_nHd)) * weights_rLH[..., None]
        added_rLHd = torch.einsum("rlhd,rhde->rlhe", q_rLHd, before_rHdd)
        if len(set(self.lengths)) == 1:
            return added_rLHd.flatten(0, 1)
        return torch.cat([added_LHd[:length] for added_LHd, length in zip(added_rLHd, self.lengths, strict=True)])

    def _by_range(self, x_nHd: Tensor) -> Tensor:
        """[r, L, H, d] in float32 or float64, zeros behind shorter ranges."""
        x_nHd = x_nHd.to(torch.promote_types(x_nHd.dtype, torch.float32))
        return pad_sequence(list(x_nHd.split(self.lengths)), batch_first=True)

    def _places(self) -> Tensor:
        """int64 [1, L]: rows before each row of a range."""
        return torch.arange(self.same_as_first_rL.shape[1], device=self.lengths_r.device)[None]


# Operators, so that torch.compile traces a layer as a whole, with what is kept with the layout left out.
@torch.library.custom_op("moba_train::linear_range_masks", mutates_args=())
@with_layout
def _range_masks(layout: Layout, ranges: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """`lengths_r`, `same_as_first_rL` and `same_as_last_rL` of `_Ranges`."""
    lengths_r, first_rL, last_rL = layout.cached("linear ranges", lambda: _make_range_masks(layout))
    # Copies: an operator's results are its caller's, and these stay with the layout for the next layer.
    return lengths_r.clone(), first_rL.clone(), last_rL.clone()


@_range_masks.register_fake
@partial(with_layout, traced=True)
def _(layout: Layout, ranges: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    like = layout.cu_seqlens
    mask_rL = like.new_empty((ranges, longest), dtype=torch.bool)
    return like.new_empty((ranges,), dtype=torch.int64), mask_rL, torch.empty_like(mask_rL)


def _make_range_masks(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    lengths = [stop - start for start, stop in query_ranges(layout)]
    parts = layout.q_documents.split(lengths)
    documents_rL = pad_sequence(list(parts), batch_first=True, padding_value=-1)
    # A range without tokens has no document; it has no rows either.
    nothing = layout.q_documents.new_full((1,), -2)
    firsts_r = torch.cat([part[:1] if len(part) else nothing for part in parts])
    lasts_r = torch.cat([part[-1:] if len(part) else nothing for part in parts])
    lengths_r = torch.tensor(lengths).to(documents_rL.device, non_blocking=True)
    return lengths_r, documents_rL == firsts_r[:, None], documents_rL == lasts_r[:, None]


def _from_other_ranks(states_rHdd: Tensor, log_decay_H: Tensor, shard: Shard) -> Tensor:
    """The state before each of this rank's ranges, from those behind the ranges of all ranks; zeros before the first.

    A range's document has a state before it only from ranges that end in this document.
    """
    all_NHdd = gather_ranges(states_rHdd, shard)
    bounds = [token for token_range in all_ranges(shard) for token in token_range]
    ranges = len(query_ranges(shard.layout))
    tokens_rN, reaches_rN = _distances(*layout_arguments(shard.layout), bounds, ranges)
    weights_rNH = _powers(log_decay_H, tokens_rN, all_NHdd.dtype) * reaches_rN[..., None]
    return torch.einsum("rnh,nhde->rhde", weights_rNH, all_NHdd)


@torch.library.custom_op("moba_train::linear_distances", mutates_args=())
@with_layout
def _distances(layout: Layout, bounds: Sequence[int], ranges: int) -> tuple[Tensor, Tensor]:
    """For each own range and each range of all ranks (start, stop, start, stop, ...): the tokens between them, int64
    [r, N], and whether the state behind the one reaches the other, bool."""
    tokens_rN, reaches_rN = layout.cached(("linear ranks", tuple(bounds)), lambda: _make_distances(layout, bounds))
    # Copies, as above.
    return tokens_rN.clone(), reaches_rN.clone()


@_distances.register_fake
@partial(with_layout, traced=True)
def _(layout: Layout, bounds: Sequence[int], ranges: int) -> tuple[Tensor, Tensor]:
    tokens_rN = layout.cu_seqlens.new_empty((ranges, len(bounds) // 2), dtype=torch.int64)
    return tokens_rN, torch.empty_like(tokens_rN, dtype=torch.bool)


def _make_distances(layout: Layout, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    starts_r = torch.tensor([start for start, __states in query_ranges(layout)])[:, None].to(layout.cu_seqlens.device)
    starts_N, stops_N = torch.tensor(bounds).view(-1, 2).to(layout.cu_seqlens.device).unbind(1)
    reaches_rN = (starts_N < stops_N) & (stops_N <= starts_r)
    reaches_rN &= layout.documents((stops_N - 1).clamp(min=0)) == layout.documents(starts_r)
    return (starts_r - stops_N).clamp(min=0), reaches_rN


def _powers(log_decay_H: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """lambda^exponents of each head, [..., H]."""
    return torch.exp(exponents[..., None] * log_decay_H).to(dtype)
