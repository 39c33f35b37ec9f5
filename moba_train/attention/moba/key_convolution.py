"""The short causal convolution over keys that FlashMoBA proposes (Xiao et al. 2025, arXiv:2511.11571).

Keys of neighbouring tokens become alike, so a block's mean key says more about each of its keys, and the gate finds the
right block more often. Weights begin as zeros, which changes nothing: silu(0) = 0.

The rows before a rank's ranges of tokens come from other ranks: each gathers the last rows of every range, its *tail*,
and takes the *heads* of its own ranges from these. While tokens are generated, the tails of the running sequences are
kept. Each step is an operator, which torch.compile keeps whole: traced, what is kept with a layout would make a
recomputed layer another one than the first time.

Shape suffixes: L rows of the shard, n tokens among them, T tokens of the sequence, K key/value heads, d head width,
r ranges of the shard, N ranges of all ranks, c rows before a token.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.layout import Layout, TokenRange, argument_layout, kept, layout_arguments, paired
from moba_train.attention.operators import no_second_derivative
from moba_train.attention.shard import Shard, own_rows, padded


class KeyConvolution(nn.Module):
    """k_t + silu(sum over l < width of weight_l * k_(t - l)), channel by channel, inside each document."""

    def __init__(self, channels: int, width: int) -> None:
        """channels: K * d."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))

    def forward(self, k_LKd: Tensor, shard: Shard) -> Tensor:
        """The keys of the shard's rows, [L, K, d], before RoPE."""
        k_nKd = own_rows(k_LKd, shard)
        taps = self.weight.T.unflatten(1, k_nKd.shape[1:])
        mixed_nKd = k_nKd * taps[0]
        for tap, earlier_nKd in zip(taps[1:], previous(k_nKd, "keys", len(taps) - 1, shard).unbind(), strict=True):
            mixed_nKd = mixed_nKd + earlier_nKd * tap
        return padded(k_nKd + F.silu(mixed_nKd), len(k_LKd))


def previous(x_nx: Tensor, name: str, count: int, shard: Shard) -> Tensor:
    """Rows of the tokens 1, 2, ... `count` before each of the shard's tokens, [c, n, ...]; differentiable.

    Zeros where the document has no such token. Only the last rows of each range of tokens travel. `name`: as for
    `Shard.gather`.
    """
    ranges = shard.layout.query_ranges
    states = None if shard.generation is None else shard.generation.states
    by_rank = shard.place.ranges_by_rank
    if states is not None or len(by_rank) == 1:
        heads_rcx = None if states is None else states.get(name)
        if heads_rcx is None:
            heads_rcx = x_nx.new_zeros((len(ranges), count, *x_nx.shape[1:]))
        if states is not None:
            states[name] = _tails(x_nx, ranges, heads_rcx)
        return _previous(x_nx, heads_rcx, *layout_arguments(shard.layout), [])
    most = max(map(len, by_rank))
    tails_rcx = _tails(x_nx, ranges, x_nx.new_zeros((most, count, *x_nx.shape[1:])))
    tails_Ncx = shard.all_ranks(tails_rcx).flatten(0, 1)
    # Ranks may have different numbers of ranges, and an all-gather needs equal shapes.
    filled = [(*rank, *[TokenRange(0, 0)] * (most - len(rank))) for rank in by_rank]
    numbers = [token for rank in filled for token_range in rank for token in token_range]
    return _previous(x_nx, tails_Ncx, *layout_arguments(shard.layout), numbers)


def _tails(x_nx: Tensor, ranges: Sequence[TokenRange], before_rcx: Tensor) -> Tensor:
    """The last c rows of each range, [r, c, ...], of shorter ones with rows of `before` in front; `before` itself where
    there are fewer ranges. Depends on `x` even then: every rank takes part in the exchange of the gradients."""
    count = before_rcx.shape[1]
    lengths = [stop - start for start, stop in ranges] + [0] * (len(before_rcx) - len(ranges))
    return torch.stack([torch.cat(rows)[-count:] for rows in zip(before_rcx, x_nx.split(lengths), strict=True)])


_SCHEMA = (
    "Tensor cu_seqlens, Tensor? cu_seqlens_cpu, SymInt max_seqlen, SymInt total, SymInt[] q_ranges, SymInt[] all_ranges"
)
"""`layout_arguments`, and the ranges whose tails are given."""


def _rows_before(x: Tensor, tails: Tensor, *where: Any) -> Tensor:
    """Previous rows [c, n, ...] of x [n, ...], given the tails [N, c, ...] of `all_ranges` or, if these are empty, the
    heads [r, c, ...] of the layout's ranges."""
    *layout_, all_ranges = where
    layout = argument_layout(*layout_)
    heads = tails
    if all_ranges:
        with_zeros = torch.cat([tails.flatten(0, 1), tails.new_zeros((1, *tails.shape[2:]))])
        heads = with_zeros[_sources(layout, tuple(all_ranges), tails.shape[1])]
    count = tails.shape[1]
    found = x.new_empty((count, *x.shape))
    for head, rows in zip(heads, _rows_of_ranges(layout), strict=False):
        torch.stack(_shifted(torch.cat([head, x[rows]]), count), out=found[:, rows])
    return found.masked_fill_(_outside(layout, count, x.dim()), 0)


def _rows_before_backward(grad: Tensor, tails: int, *where: Any) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and of that many `tails`, summed in float32 or float64."""
    *layout_, all_ranges = where
    layout = argument_layout(*layout_)
    count, tokens, *rest = grad.shape
    wide = accumulation_dtype(grad.dtype)
    grad_x = grad.new_zeros((tokens, *rest), dtype=wide)
    ranges = list(_rows_of_ranges(layout))
    heads = grad.new_zeros((len(ranges), count, *rest), dtype=wide)
    grad = grad.masked_fill(_outside(layout, count, grad.dim() - 1), 0)
    for head, rows in zip(heads, ranges, strict=True):
        # The sum is made in float32 and rounded once: a row gets a term for each distance.
        both = grad_x.new_zeros((count + rows.stop - rows.start, *rest))
        for target, part in zip(_shifted(both, count), grad[:, rows], strict=True):
            target += part
        head.copy_(both[:count])
        grad_x[rows] = both[count:]
    if all_ranges:
        sums = grad.new_zeros((tails * count + 1, *rest), dtype=wide)
        heads = sums.index_put_((_sources(layout, tuple(all_ranges), count),), heads, accumulate=True)[:-1]
    return grad_x.to(grad.dtype), heads.view(tails, count, *rest).to(grad.dtype)


_previous = torch.library.custom_op(
    "moba_train::previous", _rows_before, mutates_args=(), schema=f"(Tensor x, Tensor tails, {_SCHEMA}) -> Tensor"
)
_previous_backward = torch.library.custom_op(
    "moba_train::previous_backward",
    _rows_before_backward,
    mutates_args=(),
    schema=f"(Tensor grad, SymInt tails, {_SCHEMA}) -> (Tensor, Tensor)",
)


@_previous.register_fake
def _(x: Tensor, tails: Tensor, *_where: Any) -> Tensor:
    return x.new_empty((tails.shape[1], *x.shape))


@_previous_backward.register_fake
def _(grad: Tensor, tails: int, *_where: Any) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape[1:]), grad.new_empty((tails, grad.shape[0], *grad.shape[2:]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, tails, cu_seqlens, cu_seqlens_cpu, *ctx.rest = inputs
    ctx.tails = len(tails)
    ctx.save_for_backward(cu_seqlens, cu_seqlens_cpu)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_previous_backward(grad.contiguous(), ctx.tails, *ctx.saved_tensors, *ctx.rest), *[None] * 6)


_previous.register_autograd(_gradients, setup_context=_save)
_previous_backward.register_autograd(no_second_derivative)


def _shifted(x: Tensor, count: int) -> list[Tensor]:
    """The rows 1, 2, ... c before each row of `x` [c + n, ...] but the first c: views, [n, ...]."""
    rows = len(x) - count
    return [x[count - distance : count - distance + rows] for distance in range(1, count + 1)]


def _rows_of_ranges(layout: Layout) -> Iterator[slice]:
    first = 0
    for start, stop in layout.query_ranges:
        yield slice(first, first + stop - start)
        first += stop - start


@kept
def _sources(layout: Layout, all_ranges: tuple[int, ...], count: int) -> Tensor:
    """int64 [r, c]: the row among all tails of each token before the layout's ranges; behind them all for no token."""
    ranges = paired(all_ranges)
    found = []
    for start, _ in layout.query_ranges:
        for token in range(start - count, start):
            holder = next((i for i, (first, stop) in enumerate(ranges) if first <= token < stop), None)
            row = len(ranges) * count if holder is None else (holder + 1) * count + token - ranges[holder].stop
            found.append(row)
    return torch.tensor(found, dtype=torch.int64).view(-1, count).to(layout.cu_seqlens.device)


@kept
def _outside(layout: Layout, count: int, dimensions: int) -> Tensor:
    """bool [c, n, 1, ...]: True for queries whose document has no token that far before them."""
    distance_c1 = torch.arange(1, count + 1, device=layout.cu_seqlens.device).unsqueeze(1)
    outside_cn = layout.positions(layout.q_tokens, layout.q_documents) < distance_c1
    return outside_cn.view(*outside_cn.shape, *(1,) * (dimensions - 1))
