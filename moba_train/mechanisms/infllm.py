"""The kind `infllm`: training-free memory for evaluation and generation (Xiao et al. 2024, arXiv:2402.04617).

The memory of a query are the tokens that lie before its window: with a window of L tokens, those up to p - L for the
query at position p. It attends to the complete blocks with the highest scores, to the document's first blocks, and to
the block that the window is leaving, up to p - L. That is attention to selected blocks (kernels/block_attention.py) for
a query that stands at p - L.

Shape suffixes: T tokens of the sequence, n tokens of this layer, m those that have a memory, t a chunk of queries, N
blocks, B tokens of a block, H query heads, K key/value heads, d and D head width, C selected blocks.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.block_sparse import BlockOptions
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common.geometry import block_edges, query_blocks
from moba_train.attention.kernels.common.merge import merge
from moba_train.attention.kernels.common.reference import accumulation_dtype, query_chunks
from moba_train.attention.kernels.common.selection import (
    SELECTION,
    Choice,
    choose_blocks,
    key_share,
    routing_statistics,
)
from moba_train.attention.kind import AttentionKind, LayerInput, MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import Layout, joined_ranges, kept
from moba_train.attention.moba.moba_kind import attended_pairs
from moba_train.attention.observer import StatisticsObserver, statistics_observer
from moba_train.attention.shard import attends_to_all, own_rows, padded
from moba_train.attention.statistics import SOFTMAX, Statistics, joined
from moba_train.config.base import Length
from moba_train.config.model import ModelConfig
from moba_train.errors import UserError
from moba_train.mechanisms.window import WindowAttention


class InfLLMOptions(BlockOptions):
    """Options of `kind: infllm`."""

    window: Length = Field(4096, description="tokens before a query, its own included, that it attends to as trained")
    block_size: Length = Field(128, description="tokens per block of what lies before the window")
    topk: int = Field(16, ge=0, description="blocks with the highest scores that a query attends to before its window")
    first_blocks: int = Field(1, ge=0, description="blocks at a document's start that every query attends to")
    representatives: int = Field(4, ge=1, description="tokens of a block whose keys give its score")

    @property
    def history_blocks(self) -> int:
        """The first blocks, and those with the highest scores."""
        return self.first_blocks + self.topk


class Readers(NamedTuple):
    """The queries that have a memory."""

    rows_n: Tensor
    """int64: their rows among the layout's queries."""
    layout: Layout
    """The sequence, with these queries at p - L."""


@kept
def readers(layout: Layout, window: int) -> Readers:
    """The layout's queries at positions from `window` on."""
    rows = []
    ranges = []
    row = 0
    for start, stop in layout.query_ranges:
        for begin, end in pairwise(layout.edges):
            first, last = max(start, begin + window), min(stop, end)
            if first < last:
                rows.append(torch.arange(row + first - start, row + last - start))
                ranges.append((first - window, last - window))
        row += stop - start
    rows_n = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    device = layout.cu_seqlens.device
    return Readers(rows_n.to(device, non_blocking=True), layout.part(joined_ranges(ranges), None))


def representative_keys(
    queries_TKD: Tensor, k_TKD: Tensor, far_k_TKD: Tensor, layout: Layout, options: InfLLMOptions
) -> Tensor:
    """The sum of the representative keys of each block, [N, K, D] in float32 (float64 for float64).

    A token's representative score is the mean of q . k over the L queries after it, here summed over the
    query heads that share its key/value head. The tokens of a block with the highest scores represent it. Blocks that a
    window still reaches have no meaning; nothing reads them.

    queries_TKD  rotated queries, summed over the query heads of each key/value head
    k_TKD        rotated keys
    far_k_TKD    keys as a query sees them from beyond its window
    """
    tokens_NB = block_edges(layout, options.block_size)[:-1, None].long()
    tokens_NB = tokens_NB + torch.arange(options.block_size, device=k_TKD.device)
    tokens_NB = tokens_NB.clamp(max=max(layout.total - 1, 0))
    last_T = (torch.arange(layout.total, device=k_TKD.device) + options.window).clamp(max=layout.total - 1)
    sums = []
    for head in range(k_TKD.shape[1]):  # a head at a time: prefix sums of long sequences need float64
        prefix_TD = queries_TKD[:, head].double().cumsum(0)
        score_T = ((prefix_TD[last_T] - prefix_TD) * k_TKD[:, head]).sum(-1)
        best_NR = score_T[tokens_NB].topk(options.representatives, dim=-1).indices
        keys_NRD = far_k_TKD[:, head][tokens_NB.gather(1, best_NR)]
        sums.append(keys_NRD.to(accumulation_dtype(keys_NRD.dtype)).sum(1))
    return torch.stack(sums, 1)


def select_blocks(far_q_nHD: Tensor, representatives_NKD: Tensor, layout: Layout, options: InfLLMOptions) -> Tensor:
    """The blocks of memory that each reader attends to, int32 [H, n, C]: the first ones, and those with the highest
    scores.

    A block's score is the sum of q . representative key over all query heads, so that a token's heads
    read the same blocks, as in the authors' code.
    """
    queries, heads, _ = far_q_nHD.shape
    blocks, kv_heads, _ = representatives_NKD.shape
    where = query_blocks(layout, options.block_size)
    representatives_EN = representatives_NKD.flatten(1).T
    chosen = []
    for rows in query_chunks(queries, blocks, far_q_nHD.device):
        # All heads select together: the sum of their products is one product over K D channels.
        grouped_tKD = far_q_nHD[rows].to(representatives_EN.dtype).unflatten(1, (kv_heads, -1)).sum(2)
        scores_1tN = (grouped_tKD.flatten(1) @ representatives_EN).unsqueeze(0)
        chosen.append(choose_blocks(scores_1tN, where.rows(rows), options.history_blocks, first=options.first_blocks))
    return torch.cat(chosen, 1).repeat(heads, 1, 1)


_ROWS_MERGED = 4096
"""Queries whose results are merged at once: in float32, so in several times the memory of 16 bits."""


class InfLLMKind(AttentionKind):
    """A window as trained, and the best blocks before it at one relative position, under one softmax."""

    name = "infllm"
    Options = InfLLMOptions
    options: InfLLMOptions
    statistics = SOFTMAX | SELECTION | {"memory_mass": "probability of the keys before the window, where there are any"}

    def __init__(self, options: InfLLMOptions, head_dim: int) -> None:
        super().__init__(options, head_dim)
        if options.representatives > options.block_size:
            raise ValueError(_too_many_representatives(options))
        self.scale = head_dim**-0.5
        self.full = FullAttention(FullAttention.Options(), head_dim)
        backend = "reference" if options.backend == "reference" else "auto"
        self.window = WindowAttention(options.window, head_dim, backend)
        self.blocks = BlockAttention(options.block_size, self.scale, options.backend, "attention.infllm.backend")

    @classmethod
    def problems(cls, options: InfLLMOptions, context: StageContext) -> Iterator[str]:
        """Training, tensor parallelism, and more representatives than a block has tokens."""
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
        shard = layer.engine.shard(layer.layout)
        layout = shard.layout
        q_nHd = own_rows(layer.q_THd, shard)
        near_q_nHd = own_rows(layer.rotate(layer.q_THd), shard)
        unrotated_k_TKd = shard.gather("keys", own_rows(layer.k_TKd, shard))
        v_TKd = shard.gather("values", own_rows(layer.v_TKd, shard))
        kv_heads = v_TKd.shape[1]
        queries_TKd = shard.gather("queries", near_q_nHd.unflatten(1, (kv_heads, -1)).sum(2))
        k_TKd = layer.rotate_at(unrotated_k_TKd, layout.positions(layout.k_tokens, layout.k_documents))
        if attends_to_all(shard):
            out_nHd, _ = shard.attend(near_q_nHd, k_TKd, v_TKd, self.full)
        else:
            far_k_TKd = layer.rotate_at(unrotated_k_TKd, torch.zeros_like(layout.k_tokens))
            far_q_nHd = layer.rotate_at(q_nHd, torch.full_like(layout.q_tokens, self.options.window - 1))
            observer = statistics_observer(layer.engine)
            out_nHd = self._attend(near_q_nHd, far_q_nHd, k_TKd, far_k_TKd, v_TKd, queries_TKd, layout, observer)
        return padded(out_nHd, len(layer.x_TD)), None

    @torch.compiler.disable
    def _attend(
        self,
        q_nHd: Tensor,
        far_q_nHd: Tensor,
        k_TKd: Tensor,
        far_k_TKd: Tensor,
        v_TKd: Tensor,
        queries_TKd: Tensor,
        layout: Layout,
        observer: StatisticsObserver | None,
    ) -> Tensor:
        """One softmax over the window and the memory. The `far` tensors are rotated as beyond the window."""
        # Autocast would cut the float32 sums of representatives to 16 bits before they are multiplied.
        with torch.autocast(q_nHd.device.type, enabled=False):
            out_nHd, lse_Hn = self.window.attend(q_nHd, k_TKd, v_TKd, layout, ())
            rows_m, readers_layout = readers(layout, self.options.window)
            if not len(rows_m):
                if observer and len(out_nHd):
                    largest = Statistics({"max_lse": lse_Hn.max().item()})
                    observer.report(joined([largest, key_share(None, layout)]))
                return out_nHd
            representatives = representative_keys(queries_TKd, k_TKd, far_k_TKd, readers_layout, self.options)
            far_q_mHd = far_q_nHd[rows_m]
            selected_HmC = select_blocks(far_q_mHd, representatives, readers_layout, self.options)
            selection = self.blocks.selection(selected_HmC, far_q_mHd, readers_layout, kv_heads=v_TKd.shape[1])
            memory_mHd, memory_lse_Hm = self.blocks.attend(far_q_mHd, far_k_TKd, v_TKd, readers_layout, selection)
            if observer:
                statistics = self._statistics(lse_Hn, memory_lse_Hm, selected_HmC[0], rows_m, readers_layout, layout)
                observer.report(statistics)
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
        options = self.options
        choice = Choice(options.block_size, options.history_blocks + 1, options.first_blocks)
        both_Hm = torch.logaddexp(lse_Hn[:, rows_m], memory_lse_Hm)
        positions_n, positions_m = (
            each.positions(each.q_tokens, each.q_documents) for each in (layout, readers_layout)
        )
        keys = (positions_n + 1).clamp(max=options.window).sum() + (positions_m % options.block_size + 1).sum()
        keys += (selected_mC >= 0).sum() * options.block_size
        mass = (memory_lse_Hm - both_Hm).exp().mean().item()
        extremes = {"max_lse": max(lse_Hn.max().item(), both_Hm.max().item())}
        parts = [Statistics(extremes), Statistics({"memory_mass": mass}, len(rows_m)), key_share(float(keys), layout)]
        return joined([*parts, routing_statistics([selected_mC], readers_layout, choice)])

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """The window, a query's own key counting half; before it the block that the window is leaving, the first blocks
        and topk more."""
        options = self.options
        window, blocks = options.window, options.history_blocks + 1
        pairs = 0.0
        for length in lengths:
            read = max(length - window, 0)
            pairs += min(length, window) ** 2 / 2 + read * (window - 0.5)
            pairs += attended_pairs(read, options.block_size, blocks) + read / 2
        return pairs

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention and the scores of blocks: a third of what training would take."""
        options = self.options
        scores = sum(max(length - options.window, 0) ** 2 / 2 / options.block_size for length in lengths)
        return super().flops(model, lengths) / 3 + 2 * model.kv_heads * model.head_width * scores

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Nothing: it is not trained."""
        return TokenBytes(gathered=0)


def _too_many_representatives(options: InfLLMOptions) -> str:
    return f"representatives: given {options.representatives}; allowed: at most block_size {options.block_size}"
