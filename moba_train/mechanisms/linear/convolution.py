"""Short causal convolutions of the kinds with the delta rule.

Shape suffixes: n rows, c channels, w taps before a token, R rows with those before each document.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.convolution import (
    Places,
    causal_convolution,
    convolved,
    row_places,
    spread,
    with_rows_before,
)
from moba_train.attention.shard import Shard

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
        return F.silu(causal_convolution(x_nhd, self.weight, name, shard))

    def part(self, x_nhd: Tensor, before_whd: Tensor | None, places: Places) -> Tensor:
        """The convolution of consecutive rows, behind the `BEFORE` rows before them, None for zeros."""
        rows_Rc = spread(x_nhd, places)
        if before_whd is not None:
            rows_Rc = with_rows_before(rows_Rc, before_whd.flatten(1).unsqueeze(0), places)
        return F.silu(convolved(rows_Rc, self.weight, places)).view_as(x_nhd)


@lru_cache(maxsize=64)
def part_places(bounds: tuple[int, ...], device: torch.device) -> Places:
    """The places of consecutive rows, of which segments begin at all `bounds` but the last, their number."""
    on_cpu = torch.tensor(bounds)
    segments_n = torch.arange(len(bounds) - 1).repeat_interleave(on_cpu.diff())
    found = row_places(segments_n.to(device, non_blocking=True), [bounds[-1]], BEFORE)
    return Places(bounds[-1] + BEFORE * (len(bounds) - 1) + 1, *found, sources_rw=found[1][:0])
