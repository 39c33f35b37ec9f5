"""Short causal depthwise convolutions over packed documents, and their tails while tokens are generated.

Each document is laid out behind as many rows of its own as the convolution looks back: zeros, or the rows before it
that an earlier call or another rank has seen. So one convolution of PyTorch does all documents, and none sees another.

Shape suffixes: n rows, c channels, w taps before a token, r ranges of this layer, N ranges of all ranks, R rows with
those before each document.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.linear.ranges import all_ranges, gather_ranges, once, query_ranges, segments
from moba_train.attention.protocol import Layout
from moba_train.attention.shard import Shard

TAPS = 4
"""Tokens that a convolution sees, its own included (Kimi Linear, arXiv:2510.26692, section 4)."""
_BEFORE = TAPS - 1


class ShortConvolution(nn.Module):
    """y_t = silu(sum_j w_j x_{t - 3 + j}) for each channel, without bias; earlier documents count as zeros."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, TAPS))

    def forward(self, x_nhd: Tensor, name: str, shard: Shard) -> Tensor:
        """The convolution of all rows [n, heads, d], heads times d channels. `name`: of the tails in the shard."""
        places = once(shard.layout, "convolution", lambda: _places(shard.layout))
        x_nc = x_nhd.flatten(1)
        rows_Rc = x_nc.new_zeros((places.rows, x_nc.shape[1])).index_copy(0, places.rows_n, x_nc)
        tails_rwc = shard.states(name)
        if len(shard.ranges_by_rank) > 1:
            tails_rwc = _tails_of_other_ranks(rows_Rc[places.last_rw], shard)
        if tails_rwc is not None:
            rows_Rc = rows_Rc.index_copy(0, places.before_rw.flatten(), tails_rwc.flatten(0, 1))
        if shard.generates:
            shard.keep_states(name, rows_Rc[places.last_rw])
        summed_cR = F.conv1d(rows_Rc.T.unsqueeze(0), self.weight.unsqueeze(1), groups=len(self.weight)).squeeze(0)
        return F.silu(summed_cR.T.index_select(0, places.rows_n - _BEFORE)).view_as(x_nhd)


class _Places(NamedTuple):
    """Where the rows are among those with rows before each document; all int64."""

    rows: int
    """Rows in all, R; some are unused."""
    rows_n: Tensor
    before_rw: Tensor
    """The rows before the first token of each range."""
    last_rw: Tensor
    """The last rows of each range; where its last document has fewer there, of those before the document too."""


def _places(layout: Layout) -> _Places:
    ranges = query_ranges(layout)
    segments_n = segments(layout)
    device = segments_n.device
    begins_n = torch.ones_like(segments_n)
    begins_n[1:] = segments_n[1:] != segments_n[:-1]
    rows_n = torch.arange(len(segments_n), device=device) + _BEFORE * begins_n.cumsum(0)
    most_segments = layout.cu_seqlens.numel() - 1 + len(ranges)
    rows = len(rows_n) + _BEFORE * most_segments + 1
    steps_w = torch.arange(_BEFORE, device=device)
    if not len(rows_n):
        nothing_rw = steps_w.expand(len(ranges), -1)
        return _Places(rows, rows_n, nothing_rw, nothing_rw)
    stops_r = torch.tensor([stop - start for start, stop in ranges]).cumsum(0).to(device, non_blocking=True)
    starts_r = F.pad(stops_r[:-1], (1, 0))
    before_rw = rows_n[starts_r][:, None] - _BEFORE + steps_w
    last_rw = rows_n[stops_r - 1][:, None] - _BEFORE + 1 + steps_w
    return _Places(rows, rows_n, before_rw, last_rw)


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
        for token in range(start - _BEFORE, start):
            holder = next((i for i, (first, stop) in enumerate(everyone) if first <= token < stop), None)
            if token < document or holder is None:
                found.append((0, 0))
            else:
                found.append((_BEFORE * (holder + 1) + token - everyone[holder].stop, 1))
    places = torch.tensor(found).view(-1, _BEFORE, 2).to(layout.cu_seqlens.device, non_blocking=True)
    return places[..., 0], places[..., 1]
