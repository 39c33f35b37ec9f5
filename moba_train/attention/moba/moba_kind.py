"""The kind `moba`: what a recipe, a plan and an export need to know about Mixture of Block Attention."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moba_train.attention.block_sparse import refused_triton, too_long
from moba_train.attention.kernels.common.selection import SELECTION
from moba_train.attention.kernels.table import triton_problem
from moba_train.attention.kind import (
    AttentionKind,
    KindFacts,
    LayerInput,
    MicroBatch,
    StageContext,
    TokenBytes,
)
from moba_train.attention.moba.key_convolution import KeyConvolution
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.statistics import SOFTMAX
from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig


class MobaKind(AttentionKind):
    """Each query and head attends to its own block and to its top-k blocks of history."""

    name = "moba"
    statistics = SOFTMAX | SELECTION
    Options = MobaAttention.Options
    options: MobaAttention.Options
    # A model with `key_conv` is not exported at all.
    facts = KindFacts(frozenset({"backend", "key_conv"}), takes_sink=True)

    def __init__(self, options: MobaAttention.Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.attentions = (self._attention(),)

    def _attention(self) -> MobaAttention:
        return MobaAttention(self.options, self.head_dim, section=f"attention.{self.name}")

    @classmethod
    def problems(cls, options: MobaAttention.Options, context: StageContext) -> Iterator[str]:
        """A block longer than the sequence, more forced blocks than topk, and a backend that cannot run."""
        yield from too_long(context, options, "block_size")
        forced = {"current", *options.always}
        if options.topk < len(forced):
            yield (
                f"topk: given {options.topk} {context.layers}, but {len(forced)} blocks are always selected "
                f"({', '.join(sorted(forced))}) and count towards it; allowed: >= {len(forced)}"
            )

        reason = triton_problem(context.device, context.model.head_width, options.block_size, options.history_blocks)
        yield from refused_triton(context, options.backend, reason)

    @classmethod
    def parameters(cls, options: MobaAttention.Options, model: ModelConfig, layer: int) -> nn.Module | None:
        """The convolution over keys, if there is one."""
        return KeyConvolution(model.kv_heads * model.head_width, options.key_conv) if options.key_conv else None

    @classmethod
    def initial_values(cls, parameter: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Zeros: keys are what they were, also if the convolution is inserted into a trained model."""
        return torch.zeros(shape, device=generator.device)

    @classmethod
    def full_attention(cls, options: MobaAttention.Options, keep_windows: bool = False) -> LayerAttention | None:
        """Kind `full`; with a convolution over keys this kind, whose topk then holds every document."""
        every = options.model_copy(update={"topk": 2**31, "backend": "auto"})
        return LayerAttention(cls.name, every) if options.key_conv else super().full_attention(options)

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, None]:
        """One engine call, on keys behind the convolution."""
        k_TKd = layer.k_TKd
        if self.options.key_conv:
            assert isinstance(parameters, KeyConvolution)
            k_TKd = parameters(k_TKd, layer.engine.shard(layer.layout))
        rotated = layer.rotate(layer.q_THd), layer.rotate(k_TKd)
        return layer.engine(*rotated, layer.v_TKd, self.attentions[0], layer.layout, *layer.sink)[0], None

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Own blocks up to the query, and at most topk - 1 complete blocks before."""
        options = self.options
        return sum(attended_pairs(length, options.block_size, options.topk) for length in lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention to the selected blocks, and the gate."""
        return super().flops(model, lengths) + gate_flops(model, lengths, self.options.block_size)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Saved are the selected block ids and their inverse lists, int32 each; none if every block is selected. With
        key_conv and without activation checkpointing, in 16 bits: the keys before it, those of the tokens before, and
        their sum."""
        options = self.options
        saved = 2 * model.kv_heads * model.head_width * (options.key_conv + 1) if options.key_conv else 0
        if batch.seq_len > options.topk * options.block_size:
            # Ids and slots are int32, one of each for every query head and block.
            saved += 2 * 4 * model.heads * options.history_blocks
        return super().token_bytes(model, batch)._replace(saved=saved)


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
    diagonal = (blocks * block_size**2 + rest**2) / 2
    # Complete block b has min(b, topk - 1) blocks of history: 0, 1, ..., then always topk - 1.
    growing = min(topk, blocks)
    history = growing * (growing - 1) // 2 + (blocks - growing) * (topk - 1)
    return diagonal + history * block_size**2 + min(topk - 1, blocks) * block_size * rest
