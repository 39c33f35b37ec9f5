"""Short causal depthwise convolutions over packed documents, and their tails while tokens are generated.

Each document is laid out behind as many rows of its own as the convolution looks back: zeros, or the last rows of an
earlier call. So one convolution of PyTorch does all documents, and none sees another.

Shape suffixes: n rows, c channels, w taps, D documents, R rows with those before each document.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        """The convolution of all rows [n, heads, d], heads times d channels. `name`: of the tail in the shard.

        Each document must be whole, or continue what an earlier call of generation has seen.
        """
        if not len(x_nhd):
            return x_nhd
        places = shard.layout.cached("convolution", lambda: _places(shard.layout))
        x_nc = x_nhd.flatten(1)
        rows_Rc = x_nc.new_zeros((len(x_nc) + _BEFORE * len(places.before_Dw), x_nc.shape[1]))
        rows_Rc = rows_Rc.index_copy(0, places.rows_n, x_nc)
        tails_Dwc = shard.states(name)
        if tails_Dwc is not None:
            rows_Rc = rows_Rc.index_copy(0, places.before_Dw.flatten(), tails_Dwc.flatten(0, 1))
        if shard.generates:
            shard.keep_states(name, rows_Rc[places.last_Dw])
        summed_cR = F.conv1d(rows_Rc.T.unsqueeze(0), self.weight.unsqueeze(1), groups=len(self.weight)).squeeze(0)
        return F.silu(summed_cR.T[places.rows_n - _BEFORE]).view_as(x_nhd)


class _Places(NamedTuple):
    """Where the documents' rows are, in rows with those before each document; all int64."""

    rows_n: Tensor
    before_Dw: Tensor
    """The rows before each document."""
    last_Dw: Tensor
    """The last rows of each document; where it is shorter, of those before it too."""


def _places(layout: Layout) -> _Places:
    documents_n = layout.q_documents
    numbers_D = torch.arange(layout.cu_seqlens.numel() - 1, device=documents_n.device)
    steps_w = torch.arange(_BEFORE, device=documents_n.device)
    first_D = torch.searchsorted(documents_n, numbers_D) + _BEFORE * numbers_D
    stop_D = torch.searchsorted(documents_n, numbers_D, right=True) + _BEFORE * (numbers_D + 1)
    rows_n = torch.arange(len(documents_n), device=documents_n.device) + _BEFORE * (documents_n + 1)
    return _Places(rows_n, first_D[:, None] + steps_w, stop_D[:, None] - _BEFORE + steps_w)
