"""Short causal depthwise convolutions over packed documents, and their tails while tokens are generated.

Each document is laid out behind as many rows of its own as the convolution looks back: zeros, or the rows before it
that an earlier call or another rank has seen. So one convolution of PyTorch does all documents, and none sees another.

Shape suffixes: n rows, c channels, w taps before a token, r ranges of this layer, N ranges of all ranks, R rows with
those before each document.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.layout import Layout
from moba_train.attention.shard import Shard
from moba_train.mechanisms.linear.states import all_ranges, gather_ranges, once, query_ranges, segments

TAPS = 4
"""Tokens that a convolution sees, its own included (Kimi Linear, arXiv:2510.26692, section 4)."""
BEFORE = TAPS - 1
"""Earlier tokens among them."""


class ShortConvolution(nn.Module):
    """y_t = silu(sum_j w_j x_{t - 3 + j}) for each channel, without bias; earlier documents count as zeros."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, TAPS))

    def forward(self, x_nhd: Tensor, name: str, shard: Shard) -> Tensor:
        """The convolution of all rows [n, heads, d], heads times d channels. `name`: of the tails in the shard."""
        places = once(shard.layout, "convolution", lambda: _layout_places(shard.layout))
        rows_Rc = _spread(x_nhd, places)
        states = None if shard.generation is None else shard.generation.states
        tails_rwc = None if states is None else states.get(name)
        # A range may begin in the middle of a document: its first rows see the last three of whichever rank holds
        # those.
        if len(shard.place.ranges_by_rank) > 1:
            tails_rwc = _tails_of_other_ranks(rows_Rc[places.last_rw], shard)
        if tails_rwc is not None:
            rows_Rc = rows_Rc.index_copy(0, places.before_rw.flatten(), tails_rwc.flatten(0, 1))
        if states is not None:
            states[name] = rows_Rc[places.last_rw]
        return self._convolve(rows_Rc, places).view_as(x_nhd)

    def part(self, x_nhd: Tensor, before_whd: Tensor | None, places: "Places") -> Tensor:
        """The convolution of consecutive rows, behind the `BEFORE` rows before them, None for zeros."""
        rows_Rc = _spread(x_nhd, places)
        if before_whd is not None:
            rows_Rc = rows_Rc.index_copy(0, places.before_rw.flatten(), before_whd.flatten(1))
        return self._convolve(rows_Rc, places).view_as(x_nhd)

    def _convolve(self, rows_Rc: Tensor, places: "Places") -> Tensor:
        summed_cR = F.conv1d(rows_Rc.T.unsqueeze(0), self.weight.unsqueeze(1), groups=len(self.weight)).squeeze(0)
        # One convolution over all documents, with three rows of zeros before each, instead of one for each document;
        # the sums over these rows are dropped here.
        return F.silu(summed_cR.T.index_select(0, places.rows_n - BEFORE))


class Places(NamedTuple):
    """Indices of the rows in the layout that puts `BEFORE` further rows before each document; tensors are int64."""

    rows: int
    """Rows in all, R; some are unused."""
    rows_n: Tensor
    before_rw: Tensor
    """The rows before the first token of each range."""
    last_rw: Tensor
    """The last rows of each range; where its last document has fewer there, of those before the document too."""


def _spread(x_nhd: Tensor, places: Places) -> Tensor:
    """The rows among zeros, [R, c]."""
    x_nc = x_nhd.flatten(1)
    return x_nc.new_zeros((places.rows, x_nc.shape[1])).index_copy(0, places.rows_n, x_nc)


def _layout_places(layout: Layout) -> Places:
    ranges = query_ranges(layout)
    most_segments = layout.cu_seqlens.numel() - 1 + len(ranges)
    return _places(segments(layout), [stop - start for start, stop in ranges], most_segments)


@lru_cache(maxsize=64)
def part_places(bounds: tuple[int, ...], device: torch.device) -> Places:
    """The places of consecutive rows, of which segments begin at all `bounds` but the last, their number."""
    on_cpu = torch.tensor(bounds)
    segments_n = torch.arange(len(bounds) - 1).repeat_interleave(on_cpu.diff())
    return _places(segments_n.to(device, non_blocking=True), [bounds[-1]], len(bounds) - 1)


def _places(segments_n: Tensor, lengths: Sequence[int], most_segments: int) -> Places:
    """lengths: of the ranges."""
    device = segments_n.device
    begins_n = torch.ones_like(segments_n)
    begins_n[1:] = segments_n[1:] != segments_n[:-1]
    rows_n = torch.arange(len(segments_n), device=device) + BEFORE * begins_n.cumsum(0)
    rows = len(rows_n) + BEFORE * most_segments + 1
    steps_w = torch.arange(BEFORE, device=device)
    if not len(rows_n):
        nothing_rw = steps_w.expand(len(lengths), -1)
        return Places(rows, rows_n, nothing_rw, nothing_rw)
    stops_r = torch.tensor(lengths).cumsum(0).to(device, non_blocking=True)
    starts_r = F.pad(stops_r[:-1], (1, 0))
    before_rw = rows_n[starts_r][:, None] - BEFORE + steps_w
    last_rw = rows_n[stops_r - 1][:, None] - BEFORE + 1 + steps_w
    return Places(rows, rows_n, before_rw, last_rw)


def _tails_of_other_ranks(last_rwc: Tensor, shard: Shard) -> Tensor:
    """The rows before each of this rank's ranges, [r, w, c], from the last rows of the ranges of all ranks."""
    all_Nwc = gather_ranges(last_rwc, shard)
    sources_rw, same_rw = once(shard.layout, "convolution tails", lambda: _sources(shard))
    return all_Nwc.flatten(0, 1)[sources_rw] * same_rw[..., None]


def _sources(shard: Shard) -> tuple[Tensor, Tensor]:
    """For the tokens before each of this rank's ranges, [r, w]: their place among the last rows of all ranges, and
    whether they are tokens of the document that the range begins in."""
    layout = shard.layout
    everyone = all_ranges(shard)
    found = []
    for start, _ in query_ranges(layout):
        document = max((edge for edge in layout.edges if edge <= start), default=0)
        for token in range(start - BEFORE, start):
            # A range may be shorter than three tokens, so each of the three is looked for by itself.
            holder = next((i for i, (first, stop) in enumerate(everyone) if first <= token < stop), None)
            if token < document or holder is None:
                found.append((0, 0))
            else:
                found.append((BEFORE * (holder + 1) + token - everyone[holder].stop, 1))
    places = torch.tensor(found).view(-1, BEFORE, 2).to(layout.cu_seqlens.device, non_blocking=True)
    return places[..., 0], places[..., 1]
