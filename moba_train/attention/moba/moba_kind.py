"""The short causal convolution over keys that FlashMoBA proposes (Xiao et al. 2025, arXiv:2511.11571).

Keys of neighbouring tokens become alike, so a block's mean key says more about each of its keys, and the gate finds the
right block more often. Weights begin as zeros, which changes nothing: silu(0) = 0.

Shape suffixes: n tokens, K key/value heads, d head width.

The kind `moba`: what a recipe, a plan and an export need to know about Mixture of Block Attention.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.kernels.table import triton_problem
from moba_train.attention.kind import AttentionKind, LayerInput, StageContext
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.shard import Shard
from moba_train.attention.statistics import SELECTION, SOFTMAX
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig


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


class MobaKind(AttentionKind):
    """Each query and head attends to its own block and to its top-k blocks of history."""

    name = "moba"
    statistics = SOFTMAX | SELECTION
    Options = MobaAttention.Options

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.attentions = (self._attention(),)

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """A block longer than the sequence, more forced blocks than topk, and a backend that cannot run."""
        assert isinstance(options, MobaAttention.Options)
        if options.block_size > context.seq_len:
            yield (
                f"block_size: given {options.block_size} {context.layers}, which does not fit in a sequence of "
                f"{context.seq_len} tokens; allowed: at most seq_len"
            )
        forced = {"current", *options.always}
        if options.topk < len(forced):
            yield (
                f"topk: given {options.topk} {context.layers}, but {len(forced)} blocks are always selected "
                f"({', '.join(sorted(forced))}) and count towards it; allowed: >= {len(forced)}"
            )

        reason = triton_problem(context.device, context.model.head_width, options.block_size, options.topk - 1)
        if options.backend == "triton" and reason:
            yield f"backend: given 'triton' {context.layers}, which cannot run: {reason}; set auto"

    @classmethod
    def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module | None:
        """The convolution over keys, if there is one."""
        assert isinstance(options, MobaAttention.Options)
        return KeyConvolution(model.kv_heads * model.head_width, options.key_conv) if options.key_conv else None

    @classmethod
    def initial_std(cls, parameter: str, std: float) -> float:
        """Zero: keys are what they were, also where the convolution is inserted into a trained model."""
        return 0.0

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """One engine call, on keys behind the convolution."""
        if self._key_conv:
            assert isinstance(parameters, KeyConvolution)
            layer = layer._replace(k_TKd=parameters(layer.k_TKd, layer.shard))
        return super().mix(layer, parameters)

    def attended_pairs(self, lengths: Sequence[int]) -> float:
        """Own blocks up to the query, and at most topk - 1 complete blocks before."""
        return sum(attended_pairs(length, self._block_size, self._topk) for length in lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention to the selected blocks, and the gate."""
        return super().flops(model, lengths) + gate_flops(model, lengths, self._block_size)

    def saved_bytes(self, model: ModelConfig, seq_len: int) -> int:
        """The selected block ids and their inverse lists, int32 each; none where every block is selected. With key_conv
        and without activation checkpointing, in 16 bits: the keys before it, those of the tokens before, and their sum.
        """
        convolved = 2 * model.kv_heads * model.head_width * (self._key_conv + 1) if self._key_conv else 0
        if seq_len <= self._topk * self._block_size:
            return convolved
        return 2 * 4 * model.heads * (self._topk - 1) + convolved

    def export_entry(self) -> dict[str, Any]:
        """All options but `key_conv`, whose parameters `export_problem` refuses."""
        entry = super().export_entry()
        del entry["key_conv"]
        return entry

    def _attention(self) -> MobaAttention:
        return MobaAttention(self.options, self.head_dim, section=f"attention.{self.name}")

    @property
    def _block_size(self) -> int:
        assert isinstance(self.options, MobaAttention.Options)
        return self.options.block_size

    @property
    def _key_conv(self) -> int:
        assert isinstance(self.options, MobaAttention.Options)
        return self.options.key_conv

    @property
    def _topk(self) -> int:
        assert isinstance(self.options, MobaAttention.Options)
        return self.options.topk


def gate_flops(model: ModelConfig, lengths: Sequence[int], block_size: int) -> float:
    """Floating-point operations of MoBA's gate: 2 H d for every block before a query, half of a document's blocks on
    average, forward only, as no gradient passes it (Lu et al. 2025, arXiv:2502.13189, section 2.2)."""
    gates = sum(length * -(-length // block_size) for length in lengths)
    return model.heads * model.head_width * gates


def attended_pairs(length: int, block_size: int, topk: int) -> float:
    """Pairs of a query and a key that MoBA attends to in one document of `length` tokens, for one query head.

    A query sees its own block up to itself, its own key counting half, and at most topk - 1 complete blocks before.
    Equal to length^2 / 2, dense attention's, when topk blocks hold the document.
    """
    blocks, rest = divmod(length, block_size)
    own = (blocks * block_size**2 + rest**2) / 2
    # Complete block b has min(b, topk - 1) blocks of history: 0, 1, ..., then always topk - 1.
    growing = min(topk, blocks)
    history = growing * (growing - 1) // 2 + (blocks - growing) * (topk - 1)
    return own + history * block_size**2 + min(topk - 1, blocks) * block_size * rest
