"""Short causal depthwise convolutions over packed documents, and over keys the one that FlashMoBA proposes (Xiao et al.
2025, arXiv:2511.11571).

Each document is laid out behind as many rows of its own as the convolution looks back: zeros, or the rows before it
that an earlier call or another rank has seen. So one convolution of PyTorch does all documents, and none sees another.

Shape suffixes: L rows of the shard, n tokens among them, c channels, w taps before a token, r ranges of the shard, N
ranges of all ranks, R rows with those before each document, K key/value heads, d head width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.layout import (
    Layout,
    TokenRange,
    TokenRanges,
    argument_layout,
    kept,
    layout_arguments,
    paired,
)
from moba_train.attention.shard import Shard, own_rows, padded

_NO_TOKENS = TokenRange(0, 0)


class KeyConvolution(nn.Module):
    """k_t + silu(sum over l < width of weight_l * k_(t - l)), channel by channel, inside each document.

    Keys of neighbouring tokens become alike, so a block's mean key says more about each of its keys, and the gate finds
    the right block more often. Weights begin as zeros, which changes nothing: silu(0) = 0.
    """

    def __init__(self, channels: int, width: int) -> None:
        """channels: K * d."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))

    def forward(self, k_LKd: Tensor, shard: Shard) -> Tensor:
        """The keys of the shard's rows, [L, K, d], before RoPE."""
        k_nKd = own_rows(k_LKd, shard)
        mixed_nKd = causal_convolution(k_nKd, self.weight.flip(1), "keys", shard)
        return padded(k_nKd + F.silu(mixed_nKd), len(k_LKd))


def causal_convolution(x_nhd: Tensor, weight_cx: Tensor, name: str, shard: Shard) -> Tensor:
    """sum over j of weight_j x_(t - w + j) for each of the shard's tokens, [n, heads, d]; heads times d channels.

    Tokens before a document count as zeros. Only the last rows of each range of tokens travel. `name`: of these rows in
    the shard's states, unique in the layer's kind. All ranks must call it together.
    """
    by_rank = shard.place.ranges_by_rank
    everyone = all_ranges(shard) if len(by_rank) > 1 else ()
    places = _places(shard.layout, weight_cx.shape[1] - 1, everyone)
    rows_Rc = spread(x_nhd, places)
    states = None if shard.generation is None else shard.generation.states
    before_rwc = None if states is None else states.get(name)
    # A range may begin in the middle of a document: its first rows see the last ones of whichever rank holds those.
    if everyone:
        tails_xc = gather_ranges(rows_Rc[places.last_rw], shard).flatten(0, 1)
        before_rwc = torch.cat([tails_xc, tails_xc.new_zeros((1, tails_xc.shape[1]))])[places.sources_rw]
    if before_rwc is not None:
        rows_Rc = with_rows_before(rows_Rc, before_rwc, places)
    if states is not None:
        states[name] = rows_Rc[places.last_rw]
    return convolved(rows_Rc, weight_cx, places).view_as(x_nhd)


class Places(NamedTuple):
    """Indices of the rows in the layout that puts w further rows before each document; tensors are int64."""

    rows: int
    """Rows in all, R; some are unused."""
    rows_n: Tensor
    before_rw: Tensor
    """The rows before the first token of each range."""
    last_rw: Tensor
    """The last rows of each range; where its last document has fewer there, of those before the document too."""
    sources_rw: Tensor
    """The place of the tokens before each range among the last rows of all ranges; behind them all for no token."""


def spread(x_nhd: Tensor, places: Places) -> Tensor:
    """The rows among zeros, [R, c]."""
    x_nc = x_nhd.flatten(1)
    return x_nc.new_zeros((places.rows, x_nc.shape[1])).index_copy(0, places.rows_n, x_nc)


def with_rows_before(rows_Rc: Tensor, before_rwc: Tensor, places: Places) -> Tensor:
    """`rows_Rc` with these rows before the ranges."""
    return rows_Rc.index_copy(0, places.before_rw.flatten(), before_rwc.flatten(0, 1))


def convolved(rows_Rc: Tensor, weight_cx: Tensor, places: Places) -> Tensor:
    """The convolution of all tokens, [n, c]."""
    summed_cR = F.conv1d(rows_Rc.T.unsqueeze(0), weight_cx.unsqueeze(1), groups=len(weight_cx)).squeeze(0)
    # One convolution over all documents, with rows of zeros before each, instead of one for each document; the sums
    # over these rows are dropped here.
    return summed_cR.T.index_select(0, places.rows_n - (weight_cx.shape[1] - 1))


def query_ranges(layout: Layout) -> TokenRanges:
    """The ranges of the layout's queries; one without tokens if there are none."""
    return layout.query_ranges or (_NO_TOKENS,)


def segments(layout: Layout) -> Tensor:
    """int64 [n], never descending: rows with equal numbers share a document and a range of the layout's queries."""
    ranges = query_ranges(layout)
    device = layout.cu_seqlens.device
    numbers_n = torch.cat([torch.full((stop - start,), i, device=device) for i, (start, stop) in enumerate(ranges)])
    return layout.q_documents * len(ranges) + numbers_n


def all_ranges(shard: Shard) -> tuple[TokenRange, ...]:
    """The ranges of all ranks, in rank order; ranks with fewer than others have ranges without tokens."""
    most = _most_ranges(shard)
    filled = (list(ranges) + [_NO_TOKENS] * (most - len(ranges)) for ranges in shard.place.ranges_by_rank)
    return tuple(token_range for ranges in filled for token_range in ranges)


def gather_ranges(x_r: Tensor, shard: Shard) -> Tensor:
    """`x_r` of all ranks, [N, ...]: one entry for each range, in the order of `all_ranges`; differentiable."""
    missing = _most_ranges(shard) - len(x_r)
    # Padded to the most ranges of any rank: an all-gather needs equal sizes.
    return shard.all_ranks(torch.cat([x_r, x_r.new_zeros((missing, *x_r.shape[1:]))])).flatten(0, 1)


def _most_ranges(shard: Shard) -> int:
    return max(len(ranges) for ranges in shard.place.ranges_by_rank)


def row_places(segments_n: Tensor, lengths: Sequence[int], before: int) -> tuple[Tensor, Tensor, Tensor]:
    """`rows_n`, `before_rw` and `last_rw` of rows in segments of these numbers, of which none sees another one's rows.
    lengths: of the ranges. before: w."""
    device = segments_n.device
    begins_n = torch.ones_like(segments_n)
    begins_n[1:] = segments_n[1:] != segments_n[:-1]
    rows_n = torch.arange(len(segments_n), device=device) + before * begins_n.cumsum(0)
    steps_w = torch.arange(before, device=device)
    if not len(rows_n):
        nothing_rw = steps_w.repeat(len(lengths), 1)
        return rows_n, nothing_rw, nothing_rw.clone()
    stops_r = torch.tensor(lengths).cumsum(0).to(device, non_blocking=True)
    starts_r = F.pad(stops_r[:-1], (1, 0))
    before_rw = rows_n[starts_r][:, None] - before + steps_w
    return rows_n, before_rw, rows_n[stops_r - 1][:, None] - before + 1 + steps_w


def _places(layout: Layout, before: int, everyone: TokenRanges) -> Places:
    """The places of a layout's queries; `everyone`: the ranges of all ranks, if there are others."""
    rows = layout.queries + before * (layout.cu_seqlens.numel() - 1 + len(query_ranges(layout))) + 1
    if not torch.compiler.is_compiling():
        return Places(rows, *_kept_places(layout, before, everyone))
    # Traced, what is kept with a layout would make a recomputed layer another one than the first time.
    bounds = [token for token_range in everyone for token in token_range]
    return Places(rows, *_traced_places(*layout_arguments(layout), before, bounds))


@kept
def _kept_places(layout: Layout, before: int, everyone: TokenRanges) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors of `Places`."""
    ranges = query_ranges(layout)
    places = row_places(segments(layout), [stop - start for start, stop in ranges], before)
    sources = []
    for start, _ in ranges if everyone else ():
        document = max((edge for edge in layout.edges if edge <= start), default=0)
        for token in range(start - before, start):
            # A range may be shorter than the convolution, so each token is looked for by itself.
            holder = next((i for i, (first, stop) in enumerate(everyone) if first <= token < stop), None)
            if token < document or holder is None:
                sources.append(len(everyone) * before)
            else:
                sources.append((holder + 1) * before + token - everyone[holder].stop)
    return *places, torch.tensor(sources, dtype=torch.int64).view(-1, before).to(places[0].device, non_blocking=True)


def _places_again(*call: Any) -> list[Tensor]:
    *where, before, bounds = call
    # Copies: an operator's results are its caller's, and these stay with the layout for the next layer.
    return [x.clone() for x in _kept_places(argument_layout(*where), before, paired(bounds))]


_traced_places = torch.library.custom_op(
    "moba_train::convolution_places",
    _places_again,
    mutates_args=(),
    schema="(Tensor cu_seqlens, Tensor? cu_seqlens_cpu, SymInt max_seqlen, SymInt total, SymInt[] q_ranges, "
    "SymInt before, SymInt[] bounds) -> Tensor[]",
)


@_traced_places.register_fake
def _(cu_seqlens: Tensor, _on_cpu: Any, _longest: int, _total: int, q_ranges: Any, before: int, bounds: Any) -> Any:
    ranges = max(1, len(q_ranges) // 2)
    queries = sum(q_ranges[1::2]) - sum(q_ranges[::2])
    shapes = (queries,), (ranges, before), (ranges, before), (ranges if bounds else 0, before)
    return [cu_seqlens.new_empty(shape, dtype=torch.int64) for shape in shapes]
