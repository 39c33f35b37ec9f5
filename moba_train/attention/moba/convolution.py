"""The short causal convolution over keys that FlashMoBA proposes (Xiao et al. 2025, arXiv:2511.11571).

Keys of neighbouring tokens become alike, so a block's mean key says more about each of its keys, and the gate finds the
right block more often. Weights begin as zeros, which changes nothing: silu(0) = 0.

Shape suffixes: n tokens, K key/value heads, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.shard import Shard


class KeyConvolution(nn.Module):
    """k_t + silu(sum over l < width of weight_l * k_(t - l)), channel by channel, inside each document."""

    def __init__(self, channels: int, width: int) -> None:
        """channels: K * d."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))

    def forward(self, k_LKd: Tensor, shard: Shard) -> Tensor:
        """The keys of the shard's rows, [L, K, d], before RoPE."""
        k_nKd = shard.own(k_LKd)
        taps = self.weight.T.unflatten(1, k_nKd.shape[1:])
        mixed_nKd = k_nKd * taps[0]
        for tap, earlier_nKd in zip(taps[1:], shard.previous("keys", k_nKd, len(taps) - 1), strict=True):
            mixed_nKd = mixed_nKd + earlier_nKd * tap
        return shard.padded(k_nKd + F.silu(mixed_nKd))
