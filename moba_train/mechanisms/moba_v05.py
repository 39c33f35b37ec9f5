"""The kind `moba_v05`: self attention inside segments, and a second sublayer that attends to earlier ones.

Shape suffixes: T tokens, D hidden size, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moba_train.attention.block_sparse import BlockOptions, too_long
from moba_train.attention.kernels.common.selection import SELECTION
from moba_train.attention.kind import (
    AttentionKind,
    KindFacts,
    LayerInput,
    MicroBatch,
    StageContext,
    SublayerInput,
    TokenBytes,
    TwoSublayers,
)
from moba_train.attention.layout import Layout
from moba_train.attention.moba.moba_kind import attended_pairs, gate_flops
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import Selection
from moba_train.attention.statistics import SOFTMAX, Statistics
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.moba_v1 import SummedMoba


class CrossAttention(nn.Module):
    """Norm, q, k, v and o of the shapes that the layer's own attention has, and norms of each head if it has any."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.head_width
        self.head_dim = width
        self.norm = nn.RMSNorm(model.hidden_size, model.norm_eps)
        self.q_proj = nn.Linear(model.hidden_size, model.heads * width, bias=model.qkv_bias)
        self.k_proj = nn.Linear(model.hidden_size, model.kv_heads * width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, model.kv_heads * width, bias=model.qkv_bias)
        self.o_proj = nn.Linear(model.heads * width, model.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(width, model.norm_eps) if model.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, model.norm_eps) if model.qk_norm else nn.Identity()

    def forward(self, x_TD: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The update [T, D] of the residual stream `x_TD`; `attend`: out [T, H, d] from q, k and v before RoPE.

        The normalised stream is not kept for the backward pass, which normalises again.
        """
        q_THd, k_TKd, v_TKd = checkpoint(self._project, x_TD, use_reentrant=False, preserve_rng_state=False)
        return self.o_proj(attend(q_THd, k_TKd, v_TKd).flatten(1))

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TD = self.norm(x_TD)
        q_THd = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TKd = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        return q_THd, k_TKd, self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))


class OwnSegment(MobaAttention):
    """Causal attention inside the query's own segment, also for new tokens."""

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """Nothing: the description of the earlier segments counts the own ones."""
        return Statistics()


class MobaV05Kind(AttentionKind, TwoSublayers):
    """Self attention inside a token's own segment, and a second sublayer that attends to earlier segments.

    Attention, second sublayer and feed-forward follow each other in a block, each behind a norm of its own and added to
    the residual stream. The second sublayer has its own q, k, v and o; each query attends to the topk - 1 earlier
    segments whose mean key fits best, with a softmax for each segment, and the results are added up.
    """

    name = "moba_v05"
    statistics = SOFTMAX | SELECTION

    class Options(BlockOptions):
        """Options of `kind: moba_v05`."""

        block_size: Length = Field(512, description="tokens of a segment; segments start again with each document")
        topk: int = Field(
            3,
            ge=2,
            description="segments each query attends to: its own, then topk - 1 earlier ones by cross attention",
        )
        backend: Literal["auto", "composed", "reference"] = Field(
            "auto",
            description="composed: varlen flash attention over gathered queries; reference: plain PyTorch, any device; "
            "auto: the fastest kernels that can run",
        )

    options: Options

    def __init__(self, options: Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.facts = KindFacts(own_kernels=options.backend == "auto")
        segment = {"block_size": options.block_size, "backend": options.backend}
        section = f"attention.{self.name}"
        self.own = OwnSegment(MobaAttention.Options(**segment, topk=1), head_dim, section=section)
        self.earlier = SummedMoba(
            MobaAttention.Options(**segment, topk=options.topk), head_dim, section=section, own=False
        )
        self.attentions = (self.own, self.earlier)

    @classmethod
    def problems(cls, options: Options, context: StageContext) -> Iterator[str]:
        """A segment longer than the sequence."""
        yield from too_long(context, options, "block_size")

    @classmethod
    def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module:
        """The second sublayer's norm and projections."""
        return CrossAttention(model)

    @classmethod
    def initial_values(cls, parameter: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """Zeros for the output projection: a sublayer that is inserted into a trained model adds nothing at first."""
        return torch.zeros(shape, device=generator.device) if parameter == "o_proj.weight" else None

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """Self attention inside the own segment."""
        q_THd = layer.rotate(layer.q_THd)
        k_TKd = layer.rotate(layer.k_TKd)
        out_THd, _ = layer.engine(q_THd, k_TKd, layer.v_TKd, self.own, layer.layout)
        return out_THd, None

    def second_sublayer(self, layer: SublayerInput, parameters: CrossAttention) -> Tensor:
        """Cross attention to earlier segments."""

        def attend(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            return layer.engine(layer.rotate(q_THd), layer.rotate(k_TKd), v_TKd, self.earlier, layer.layout)[0]

        update: Tensor = parameters(layer.x_TD, attend)
        return update

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """The own segment up to the query, and at most topk - 1 complete segments before: as many as MoBA's."""
        return sum(attended_pairs(length, self.options.block_size, self.options.topk) for length in lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention of both sublayers, the second one's projections, and its gate."""
        return super().flops(model, lengths) + gate_flops(model, lengths, self.options.block_size)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Saved is what the second sublayer keeps without activation checkpointing: in 16 bits its input, queries,
        keys, values and output; in 32 its LSE, the selected segments and their lists."""
        queries = model.heads * model.head_width
        keys = model.kv_heads * model.head_width
        rows = model.hidden_size + 2 * queries + 2 * keys
        saved = 2 * rows + 4 * model.heads + 2 * 4 * model.heads * self.options.history_blocks
        return super().token_bytes(model, batch)._replace(saved=saved)
