"""The parameters of a layer: gates, compression, and the branches' own projections.

Shape suffixes: n tokens, T tokens of the sequence, N compressed blocks of L tokens, D hidden size, H query heads,
K key/value heads, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moba_train.config.model import ModelConfig


class Compression(nn.Module):
    """One vector from the L vectors of a block: a position embedding is added to each, then an MLP takes all of them.
    Key/value heads share it."""

    def __init__(self, block: int, width: int, hidden: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(block, width))
        self.up = nn.Linear(block * width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_TKd: Tensor, first_N: Tensor) -> Tensor:
        """[N, K, d] from the vectors of all tokens and each block's first token; the backward pass gathers the blocks
        again."""
        compressed: Tensor = checkpoint(self._compress, x_TKd, first_N, use_reentrant=False, preserve_rng_state=False)
        return compressed

    def _compress(self, x_TKd: Tensor, first_N: Tensor) -> Tensor:
        tokens_NL = first_N.unsqueeze(-1) + torch.arange(len(self.positions), device=first_N.device)
        tokens_NL = tokens_NL.clamp(max=len(x_TKd) - 1)
        x_NLKd = x_TKd.index_select(0, tokens_NL.flatten()).unflatten(0, tokens_NL.shape)
        x_NLKd = x_NLKd + self.positions.unsqueeze(1)
        hidden = F.gelu(self.up(x_NLKd.transpose(1, 2).flatten(2)))
        return self.down(hidden)


class KeysAndValues(nn.Module):
    """A branch's own keys and values, as the layer makes its own."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.head_width
        self.width = width
        self.k_proj = nn.Linear(model.hidden_size, model.kv_heads * width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, model.kv_heads * width, bias=model.qkv_bias)
        self.k_norm = nn.RMSNorm(width, model.norm_eps) if model.qk_norm else nn.Identity()

    def forward(self, x_nD: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n, K, d], before the rotary embedding."""
        k_nKd = self.k_proj(x_nD).unflatten(-1, (-1, self.width))
        return self.k_norm(k_nKd), self.v_proj(x_nD).unflatten(-1, (-1, self.width))


class NsaParameters(nn.Module):
    """All parameters of one layer."""

    def __init__(self, model: ModelConfig, compressed_block: int, hidden: int, separate_kv: bool) -> None:
        super().__init__()
        self.gates = nn.Linear(model.hidden_size, 3 * model.heads, bias=False)
        self.compress_k = Compression(compressed_block, model.head_width, hidden)
        self.compress_v = Compression(compressed_block, model.head_width, hidden)
        self.compressed = KeysAndValues(model) if separate_kv else None
        self.window = KeysAndValues(model) if separate_kv else None
