"""The kind `infllm`: training-free memory for evaluation and generation.

Shape suffixes: T tokens of the sequence, n tokens of this layer, m those that have a memory, H query heads, K key/value
heads, d head width.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.blocks.attention import BlockAttention
from moba_train.attention.blocks.statistics import Choice, key_share, routing_statistics
from moba_train.attention.full import FullAttention
from moba_train.attention.infllm.memory import (
    MemorySizes,
    attend_to_memory,
    readers,
    representative_keys,
    select_blocks,
)
from moba_train.attention.kind import AttentionKind, LayerInput, StageContext
from moba_train.attention.merge import merge
from moba_train.attention.moba.kind import attended_pairs
from moba_train.attention.protocol import Layout
from moba_train.attention.shard import Shard
from moba_train.attention.statistics import SELECTION, SOFTMAX, Statistics, joined
from moba_train.attention.window import WindowAttention
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.config.quantities import Length
from moba_train.errors import UserError

_ROWS_MERGED = 4096
"""Queries whose results are merged at once: in float32, so in several times the memory of 16 bits."""


class InfLLMOptions(Section):
    """Options of `kind: infllm`."""

    window: Length = Field(4096, description="tokens before a query, its own included, that it attends to as trained")
    block_size: Length = Field(128, description="tokens per block of what lies before the window")
    topk: int = Field(16, ge=0, description="blocks with the highest scores that a query attends to before its window")
    first_blocks: int = Field(1, ge=0, description="blocks at a document's start that every query attends to")
    representatives: int = Field(4, ge=1, description="tokens of a block whose keys give its score")
    backend: Literal["auto", "triton", "composed", "reference"] = Field(
        "auto",
        description="of attention to blocks; triton: kernels for CUDA and 16-bit dtypes; composed: varlen flash "
        "attention over gathered queries, then a merge; reference: plain PyTorch, any device; auto: triton where it "
        "can run, else composed where it can run",
    )


class InfLLMKind(AttentionKind):
    """A window as trained, and the best blocks before it at one relative position, under one softmax."""

    name = "infllm"
    Options = InfLLMOptions
    statistics = SOFTMAX | SELECTION | {"memory_mass": "probability of the keys before the window, where there are any"}

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        assert isinstance(options, InfLLMOptions)
        if options.representatives > options.block_size:
            raise ValueError(_too_many_representatives(options))
        self.sizes = MemorySizes(
            options.window, options.block_size, options.representatives, options.first_blocks, options.topk
        )
        self.scale = head_dim**-0.5
        self.full = FullAttention(FullAttention.Options(), head_dim)
        backend = "reference" if options.backend == "reference" else "auto"
        self.window = WindowAttention(options.window, head_dim, backend)
        self.blocks = BlockAttention(options.block_size, self.scale, options.backend, "attention.infllm.backend")
        self.attentions = ()

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """Training, tensor parallelism, and more representatives than a block has tokens."""
        assert isinstance(options, InfLLMOptions)
        if context.training:
            yield (
                f"kind: given 'infllm' {context.layers}, which has no gradient and cannot be trained with; train with "
                "another kind, then: moba-train eval RUN attention.default=infllm (or lm-eval, generate)"
            )
        if context.tp > 1:
            yield (
                f"parallel.tp: given {context.tp}, but infllm {context.layers} scores blocks by all heads together; "
                "set tp: 1"
            )
        if options.representatives > options.block_size:
            yield f"{_too_many_representatives(options)} ({context.layers})"

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, None]:
        """[n, H, d] without gradient. Raises UserError where one is asked for."""
        if torch.is_grad_enabled() and layer.q_THd.requires_grad:
            raise UserError(
                "attention kind 'infllm' has no gradient: it is for evaluation and generation; leave out evaluations "
                "that differentiate (gradient_reach), or choose another kind"
            )
        shard = layer.shard
        layout = shard.layout
        q_nHd = shard.own(layer.q_THd)
        near_q_nHd = shard.own(layer.rotate(layer.q_THd))
        unrotated_k_TKd = shard.gather("keys", shard.own(layer.k_TKd))
        v_TKd = shard.gather("values", shard.own(layer.v_TKd))
        kv_heads = v_TKd.shape[1]
        queries_TKd = shard.gather("queries", near_q_nHd.unflatten(1, (kv_heads, -1)).sum(2))
        k_TKd = layer.rotate_at(unrotated_k_TKd, layout.positions(layout.k_tokens, layout.k_documents))
        if shard.attends_to_all:
            out_nHd, _ = shard.attend(near_q_nHd, k_TKd, v_TKd, self.full)
        else:
            far_k_TKd = layer.rotate_at(unrotated_k_TKd, torch.zeros_like(layout.k_tokens))
            far_q_nHd = layer.rotate_at(q_nHd, torch.full_like(layout.q_tokens, self.sizes.window - 1))
            out_nHd = self._attend(near_q_nHd, far_q_nHd, k_TKd, far_k_TKd, v_TKd, queries_TKd, shard)
        return shard.padded(out_nHd), None

    @torch.compiler.disable
    def _attend(
        self,
        q_nHd: Tensor,
        far_q_nHd: Tensor,
        k_TKd: Tensor,
        far_k_TKd: Tensor,
        v_TKd: Tensor,
        queries_TKd: Tensor,
        shard: Shard,
    ) -> Tensor:
        """One softmax over the window and the memory. The `far` tensors are rotated as beyond the window."""
        layout = shard.layout
        with torch.autocast(q_nHd.device.type, enabled=False):
            out_nHd, lse_Hn = self.window.attend(q_nHd, k_TKd, v_TKd, layout, ())
            rows_m, readers_layout = readers(layout, self.sizes.window)
            if not len(rows_m):
                if shard.observer and len(out_nHd):
                    largest = Statistics({"max_lse": lse_Hn.max().item()})
                    shard.observer.report(joined([largest, key_share(None, layout)]))
                return out_nHd
            representatives = representative_keys(queries_TKd, k_TKd, far_k_TKd, readers_layout, self.sizes)
            memory_mHd, memory_lse_Hm = attend_to_memory(
                far_q_nHd[rows_m], far_k_TKd, v_TKd, representatives, readers_layout, self.blocks, self.sizes
            )
            if shard.observer:
                selected_mC = select_blocks(far_q_nHd[rows_m], representatives, readers_layout, self.sizes)[0]
                shard.observer.report(
                    self._statistics(lse_Hn, memory_lse_Hm, selected_mC, rows_m, readers_layout, layout)
                )
            parts = rows_m.split(_ROWS_MERGED), memory_mHd.split(_ROWS_MERGED), memory_lse_Hm.split(_ROWS_MERGED, 1)
            for rows_r, *memory in zip(*parts, strict=True):
                out_nHd[rows_r], _ = merge(out_nHd[rows_r], lse_Hn[:, rows_r], *memory)
        return out_nHd

    def _statistics(
        self,
        lse_Hn: Tensor,
        memory_lse_Hm: Tensor,
        selected_mC: Tensor,
        rows_m: Tensor,
        readers_layout: Layout,
        layout: Layout,
    ) -> Statistics:
        """The statistics of window and memory together; all heads select the same blocks."""
        sizes = self.sizes
        choice = Choice(sizes.block_size, sizes.first_blocks + sizes.topk + 1, sizes.first_blocks)
        both_Hm = torch.logaddexp(lse_Hn[:, rows_m], memory_lse_Hm)
        positions_n, positions_m = (
            each.positions(each.q_tokens, each.q_documents) for each in (layout, readers_layout)
        )
        keys = (positions_n + 1).clamp(max=sizes.window).sum() + (positions_m % sizes.block_size + 1).sum()
        keys += (selected_mC >= 0).sum() * sizes.block_size
        mass = (memory_lse_Hm - both_Hm).exp().mean().item()
        extremes = {"max_lse": max(lse_Hn.max().item(), both_Hm.max().item())}
        parts = [Statistics(extremes), Statistics({"memory_mass": mass}, len(rows_m)), key_share(float(keys), layout)]
        return joined([*parts, routing_statistics([selected_mC], readers_layout, choice)])

    def attended_pairs(self, lengths: Sequence[int]) -> float:
        """The window, a query's own key counting half; before it the block that the window is leaving, the first blocks
        and topk more."""
        window, block_size, _, first, topk = self.sizes
        pairs = 0.0
        for length in lengths:
            read = max(length - window, 0)
            pairs += min(length, window) ** 2 / 2 + read * (window - 0.5)
            pairs += attended_pairs(read, block_size, first + topk + 1) + read / 2
        return pairs

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention and the scores of blocks, forward only: a third of what training would take."""
        window, block_size, *_ = self.sizes
        scores = sum(max(length - window, 0) ** 2 / 2 / block_size for length in lengths)
        return super().flops(model, lengths) / 3 + 2 * model.kv_heads * model.head_width * scores


def _too_many_representatives(options: InfLLMOptions) -> str:
    return f"representatives: given {options.representatives}; allowed: at most block_size {options.block_size}"
