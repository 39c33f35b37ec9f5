"""InfLLM-V2 as a LocalAttention and as the kind `infllm_v2`: mean keys score blocks, and `SharedBlocks` attends to the
best of them and to local ones.

All query heads of a key/value head select together. `BlockAttention` would keep ids for each query head, and the
kernels' lists in addition: with 64 blocks more bytes than q has. `SharedBlocks` keeps the ids of each key/value head
alone, and none of local blocks. Ids for all heads and lists exist for some heads at a time, and are made again in the
backward pass.

Shape suffixes: T queries, t a chunk of them, S keys, U units, N blocks, H query heads, K key/value heads, G = H / K,
D head width, C selected blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.block_sparse import BlockOptions, DenseOrSparse, listed_blocks, refused_triton, too_long
from moba_train.attention.facets import Gate, Gated, SelectedBlocks
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.block_attention import BlockAttention, HeadsSelection
from moba_train.attention.kernels.common.geometry import QueryBlocks, query_blocks
from moba_train.attention.kernels.common.selection import (
    SELECTION,
    Choice,
    choose_blocks,
    key_share,
    selection_statistics,
)
from moba_train.attention.kernels.table import triton_problem
from moba_train.attention.kind import AttentionKind, MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import Layout
from moba_train.attention.moba.moba_kind import attended_pairs
from moba_train.attention.moba.moba_local import pick_selector
from moba_train.attention.protocol import AttentionFacts, BackwardState, Gradients, Selection, head_parts
from moba_train.attention.statistics import SOFTMAX, Statistics
from moba_train.config.base import Length
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.infllm_v2.scores import BlockScores, window_means
from moba_train.mechanisms.local_blocks import LocalBlocks, with_local_blocks

_ENTRIES = 2**25
"""Selected blocks of all query heads that are attended to at once: 128 MiB of ids, and as much of lists."""


@dataclass(frozen=True)
class SharedBlocks:
    """`BlockAttention` for selections that the query heads of a key/value head share, and to local blocks.

    The Triton kernels attend to the local blocks as one span of keys; other backends are also given their ids.
    """

    blocks: BlockAttention
    local: LocalBlocks

    def selection(self, selected_KTC: Tensor, q_THD: Tensor, layout: Layout) -> Selection:
        """The selected blocks of the layout's queries, int32 [K, T, C], none of them local; their local history blocks,
        int32 [T, 2], and a tensor without elements whose first sizes are H and L, the most of these."""
        sizes = q_THD.shape[1], self.local.most(layout), 0
        # A copy, as an operator's result must be no alias of what the layout keeps; and two sizes that travel with the
        # selection as the shape of a tensor without elements.
        return selected_KTC, self.local.history(layout).clone(), selected_KTC.new_empty(sizes)

    def empty_selection(self, selected: int, q_THD: Tensor, layout: Layout, kv_heads: int) -> Selection:
        """Tensors of the shapes and dtypes of `selection`'s for C = `selected`, contents undefined."""
        tokens, heads, _ = q_THD.shape
        shapes = (kv_heads, tokens, selected), (tokens, 2), (heads, self.local.most(layout), 0)
        return tuple(q_THD.new_empty(shape, dtype=torch.int32) for shape in shapes)

    def selected_blocks(self, selection: Selection) -> Tensor:
        """All blocks that a query attends to except its own, local ones included: int32 [H, T, C]."""
        kv_heads = list(self.selected_by_kv_head(selection))
        return torch.stack(kv_heads).repeat_interleave(selection[2].shape[0] // len(kv_heads), dim=0)

    def selected_by_kv_head(self, selection: Selection) -> Iterator[Tensor]:
        """All blocks that a query attends to except its own, int32 [T, C], for one key/value head after the other."""
        selected_KTC, local_T2, sizes_HL0 = selection
        for selected_1TC in selected_KTC.split(1):
            yield with_local_blocks(selected_1TC, local_T2, sizes_HL0.shape[1]).squeeze(0)

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """out [T, H, D] and lse [H, T] over the own, the local and the selected blocks, as far as their keys are
        given."""
        parts = self._parts(q_THD, layout, selection)
        return self.blocks.attend_in_parts(q_THD, k_SKD, v_SKD, layout, parts)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        return self.blocks.attend_backward_in_parts(state, layout, self._parts(state.q, layout, selection))

    def _parts(self, q_THD: Tensor, layout: Layout, selection: Selection) -> Iterator[HeadsSelection]:
        """The selection as `BlockAttention` takes it, without spans where local blocks are among the selected."""
        selected_KTC, local_T2, sizes_HL0 = selection
        kv_heads, group = len(selected_KTC), len(sizes_HL0) // len(selected_KTC)
        # Ids are kept once for a group and repeated for each of its query heads here, so only for some heads at a time.
        for of, kv in head_parts(len(sizes_HL0), kv_heads, _ENTRIES // max(1, selected_KTC[0].numel() * group)):
            some_KTC, some_q = selected_KTC[kv], q_THD[:, of]
            spans = None
            if self.blocks.takes_spans(some_q, layout, some_KTC.shape[2]):
                spans = self.local.spans(layout)
            else:
                some_KTC = with_local_blocks(some_KTC, local_T2, sizes_HL0.shape[1])
            some_HTC = some_KTC.repeat_interleave(group, dim=0)
            part = self.blocks.selection(some_HTC, some_q, layout, kv_heads=len(some_KTC))
            yield HeadsSelection(of, kv, part, spans)


class InfLLMV2Attention(DenseOrSparse, Gated):
    """Each query attends to the first blocks of its document, to the local ones and to those with the highest scores;
    queries near the start of a document attend to everything."""

    class Options(BlockOptions):
        """Options of `kind: infllm_v2`."""

        block_size: Length = Field(64, description="tokens per block; blocks start again with each document")
        topk: int = Field(
            96, ge=1, description="blocks each query attends to: the first, the local and those with the highest scores"
        )
        first_blocks: int = Field(1, ge=0, description="blocks at a document's start that every query attends to")
        local_blocks: int = Field(
            32, ge=1, description="blocks up to a query's own that it attends to, its own included"
        )
        window: Length = Field(32, description="tokens of the windows whose mean keys score the blocks")
        stride: Length = Field(16, description="tokens from the start of one window to the start of the next")
        dense_len: Length = Field(
            8192,
            description="queries at the first dense_len positions of a document attend to all keys before; 1: none do",
        )

        @property
        def history_blocks(self) -> int:
            """Selected blocks of a query without the local ones, at most."""
            return self.topk - self.local_blocks

        @property
        def full_up_to(self) -> int:
            """Length in tokens of the longest document that is attended to completely."""
            return max(self.dense_len, self.topk * self.block_size)

        def contradictions(self) -> list[str]:
            """Contradictions among these options, each text beginning with the option."""
            found = []
            if self.topk < self.first_blocks + self.local_blocks:
                found.append(
                    f"topk: given {self.topk}, but first_blocks {self.first_blocks} and local_blocks "
                    f"{self.local_blocks} count towards it; allowed: >= {self.first_blocks + self.local_blocks}"
                )
            for name, size in (("window", self.window), ("block_size", self.block_size)):
                if size % self.stride:
                    found.append(f"{name}: given {size}; allowed: multiples of stride {self.stride}")
            if self.window > self.block_size:
                found.append(f"window: given {self.window}; allowed: at most block_size {self.block_size}")
            return found

    blocks: SharedBlocks

    def __init__(self, options: Options, head_dim: int) -> None:
        if problems := options.contradictions():
            raise ValueError("; ".join(problems))
        self.options = options
        self.backend = options.backend
        self.block_size = options.block_size
        self.full_up_to = options.full_up_to
        self.scale = head_dim**-0.5
        # Every query attends to topk blocks: the scores' work, which does grow with the position, is small.
        self.facts = AttentionFacts(alignment=options.stride, couples_heads=True, work_grows=False)
        self.full = FullAttention(FullAttention.Options(), head_dim)
        self.blocks = SharedBlocks(
            BlockAttention(options.block_size, self.scale, options.backend, "attention.infllm_v2.backend"),
            LocalBlocks(options.block_size, options.local_blocks, options.dense_len),
        )
        self.scores = BlockScores(options.window, options.stride, options.block_size, self.scale)

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor:
        """The mean key of every unit of `stride` tokens, [U, K, D]; zeros for units without given keys."""
        stride = self.options.stride
        pool = pick_selector(self.options.backend, k_SKD, layout, block_size=stride, history_blocks=0).pool_keys
        return pool(k_SKD, layout, stride)

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """The history blocks that each group of query heads selects in addition to the local ones, int32 [K, T, C], as
        `SharedBlocks` keeps them; () if every block is selected."""
        if self.is_full(layout):
            return ()
        assert summaries is not None
        local_T2 = self.blocks.local.history(layout).long()
        first_T = query_blocks(layout, self.options.block_size).first_t
        selected_KTC = q_THD.new_full((summaries.shape[1], len(q_THD), self._listed(layout)), -1, dtype=torch.int32)
        windows_UKD = window_means(summaries.detach(), self.options.window // self.options.stride)
        kernels = self.options.backend != "reference"
        for rows, blocks, scores_KtN in self.scores.chunks(q_THD.detach(), windows_UKD, layout, kernels=kernels):
            # What lies before the first local block; nothing, where that is the document's first.
            candidates = QueryBlocks(local_T2[rows, 0], first_T[rows])
            rule = {"first": self.options.first_blocks, "start": blocks.start}
            chosen_KtC = choose_blocks(scores_KtN, candidates, self._listed(layout), **rule)
            selected_KTC[:, rows, : chosen_KtC.shape[-1]] = chosen_KtC
        return self.blocks.selection(selected_KTC, q_THD, layout)

    def select_blocks(self, q_THD: Tensor, summaries: Tensor, layout: Layout) -> Tensor:
        """int32 [H, T, C], local blocks included, equal for the query heads of a group."""
        return self.blocks.selected_blocks(self.select(q_THD, summaries, layout))

    def gate(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Gate | None:
        """The selected blocks, local ones included. Blocks have no score that all queries share: a query's scores of
        windows are normalised over those that it sees."""
        if self.is_full(layout):
            return None
        assert summaries is not None
        return Gate(SelectedBlocks(self.select_blocks(q_THD, summaries, layout), self.block_size), None)

    def selected_by(self, rows_n: Tensor, selection: Selection, layout: Layout) -> SelectedBlocks | None:
        """The blocks of these queries, local ones included; None if every block is selected."""
        if not selection:
            return None
        return SelectedBlocks(self.blocks.selected_blocks(selection)[:, rows_n], self.block_size)

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """`selection_statistics` of the blocks of each key/value head, local ones included."""
        if not selection:
            return key_share(None, layout)
        options = self.options
        sizes = options.block_size, options.topk, options.first_blocks, options.local_blocks, options.dense_len
        return selection_statistics(self.blocks.selected_by_kv_head(selection), layout, Choice(*sizes))

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined."""
        if self.is_full(layout):
            return ()
        return self.blocks.empty_selection(self._listed(layout), q_THD, layout, kv_heads=k_SKD.shape[1])

    def _listed(self, layout: Layout) -> int:
        """C: selected blocks of a query without the local ones, at most."""
        return listed_blocks(self.options.history_blocks, layout, self.block_size)


class InfLLMV2Kind(AttentionKind):
    """Queries attend to the first, the local and the best blocks; near a document's start to everything."""

    name = "infllm_v2"
    statistics = SOFTMAX | SELECTION
    Options = InfLLMV2Attention.Options
    options: InfLLMV2Attention.Options

    def __init__(self, options: InfLLMV2Attention.Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.attentions = (InfLLMV2Attention(options, head_dim),)

    @classmethod
    def problems(cls, options: InfLLMV2Attention.Options, context: StageContext) -> Iterator[str]:
        """Sizes that do not fit together, a block longer than the sequence, and a backend that cannot run."""
        for problem in options.contradictions():
            yield f"{problem} ({context.layers})"
        yield from too_long(context, options, "block_size")
        reason = triton_problem(context.device, context.model.head_width, options.block_size, options.history_blocks)
        yield from refused_triton(context, options.backend, reason)

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """All keys before queries at the first dense_len positions; else topk blocks, as MoBA counts them."""
        options = self.options
        pairs = 0.0
        for length in lengths:
            dense = min(length, options.dense_len)
            sparse = (attended_pairs(tokens, options.block_size, options.topk) for tokens in (length, dense))
            pairs += dense**2 / 2 + next(sparse) - next(sparse)
        return pairs

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention to the selected blocks, and the scores: 2 H d for every window before a query, forward only, in
        documents that are long enough to leave blocks out (Zhao et al. 2025, arXiv:2509.24663)."""
        options = self.options
        windows = sum(length**2 / 2 / options.stride for length in lengths if length > options.full_up_to)
        return super().flops(model, lengths) + 2 * model.heads * model.head_width * windows

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Saved are the selected block ids of each key/value head and two numbers for the local ones, int32; none if
        every block is selected."""
        options = self.options
        selects = batch.seq_len > options.full_up_to
        saved = 4 * (model.kv_heads * options.history_blocks + 2) if selects else 0
        return super().token_bytes(model, batch)._replace(saved=saved)
