"""InfLLM-V2 as a LocalAttention: mean keys score blocks, `SharedBlocks` attends to the best and to local ones.

Shape suffixes: T queries, t a chunk of them, S keys, U units, N blocks, H query heads, K key/value heads, D head width,
C selected blocks.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.blocks.attention import BlockAttention
from moba_train.attention.blocks.choose import QueryBlocks, choose_blocks, query_blocks
from moba_train.attention.blocks.dense_or_sparse import DenseOrSparse
from moba_train.attention.blocks.geometry import block_bound
from moba_train.attention.blocks.shared import SharedBlocks
from moba_train.attention.blocks.spans import LocalBlocks
from moba_train.attention.blocks.statistics import Choice, key_share, selection_statistics
from moba_train.attention.full import FullAttention
from moba_train.attention.infllm_v2.scores import BlockScores, WindowSizes, window_means
from moba_train.attention.moba.attention import pick_selector
from moba_train.attention.protocol import Layout, Selection
from moba_train.attention.statistics import Statistics
from moba_train.config.base import Section
from moba_train.config.quantities import Length


class InfLLMV2Attention(DenseOrSparse):
    """Each query attends to the first blocks of its document, to the local ones and to those with the highest scores;
    queries near the start of a document attend to everything."""

    class Options(Section):
        """Options of `kind: infllm_v2`."""

        block_size: Length = Field(64, description="tokens per block; blocks start anew with each document")
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
        backend: Literal["auto", "triton", "composed", "reference"] = Field(
            "auto",
            description="triton: kernels for CUDA and 16-bit dtypes; composed: varlen flash attention over gathered "
            "queries, then a merge; reference: plain PyTorch, any device; auto: dense attention where no document is "
            "long enough to leave a block out, else triton where it can run, else composed where it can run",
        )

        @property
        def sizes(self) -> WindowSizes:
            """The sizes that scores depend on."""
            return WindowSizes(self.window, self.stride, self.block_size)

        @property
        def dense_tokens(self) -> int:
            """Length of the longest document that is attended to completely."""
            return max(self.dense_len, self.topk * self.block_size)

        def contradictions(self) -> list[str]:
            """What is wrong with these options together, each text beginning with the option."""
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
    couples_heads = True
    work_grows = False  # every query attends to topk blocks; the scores, which do grow, are small

    def __init__(self, options: Section, head_dim: int) -> None:
        assert isinstance(options, InfLLMV2Attention.Options)
        if problems := options.contradictions():
            raise ValueError("; ".join(problems))
        self.options = options
        self.backend = options.backend
        self.alignment = options.stride
        self.scale = head_dim**-0.5
        self.dense = FullAttention(FullAttention.Options(), head_dim)
        self.blocks = SharedBlocks(
            BlockAttention(options.block_size, self.scale, options.backend, "attention.infllm_v2.backend"),
            LocalBlocks(options.block_size, options.local_blocks, options.dense_len),
        )
        self.scores = BlockScores(options.sizes, self.scale)

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that `selected_blocks` counts."""
        return self.options.block_size

    @property
    def dense_tokens(self) -> int:
        """Tokens of topk blocks, or `dense_len` if that is more."""
        return self.options.dense_tokens

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor:
        """The mean key of every unit of `stride` tokens, [U, K, D]; zeros for units without given keys."""
        stride = self.options.stride
        pool = pick_selector(self.options.backend, k_SKD, layout, block_size=stride, count=0).pool_keys
        return pool(k_SKD, layout, stride)

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """The history blocks that each group of query heads selects besides the local ones, int32 [K, T, C], as
        `SharedBlocks` keeps them; nothing where every block is selected."""
        if self.is_dense(layout):
            return ()
        assert summaries is not None
        local_T2 = self.blocks.local.history(layout).long()
        first_T = query_blocks(layout, self.options.block_size).first_t
        selected_KTC = q_THD.new_full((summaries.shape[1], len(q_THD), self._count(layout)), -1, dtype=torch.int32)
        windows_UKD = window_means(summaries.detach(), self.options.sizes)
        kernels = self.options.backend != "reference"
        for rows, blocks, scores_KtN in self.scores.chunks(q_THD.detach(), windows_UKD, layout, kernels=kernels):
            # What lies before the first local block; nothing, where that is the document's first.
            candidates = QueryBlocks(local_T2[rows, 0] - blocks.start, first_T[rows] - blocks.start)
            chosen_KtC = choose_blocks(scores_KtN, candidates, self._count(layout), first=self.options.first_blocks)
            selected_KTC[:, rows, : chosen_KtC.shape[-1]] = torch.where(chosen_KtC < 0, -1, chosen_KtC + blocks.start)
        return self.blocks.selection(selected_KTC, q_THD, layout)

    def selected_blocks(self, selection: Selection) -> Tensor | None:
        """int32 [H, T, C], local blocks included, equal for the query heads of a group; None where every block is
        selected."""
        return self.blocks.selected_blocks(selection) if selection else None

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """`selection_statistics` of the blocks of each key/value head, local ones included."""
        if not selection:
            return key_share(None, layout)
        options = self.options
        sizes = options.block_size, options.topk, options.first_blocks, options.local_blocks, options.dense_len
        return selection_statistics(self.blocks.selected_by_kv_head(selection), layout, Choice(*sizes))

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined."""
        if self.is_dense(layout):
            return ()
        return self.blocks.empty_selection(self._count(layout), q_THD, layout, kv_heads=k_SKD.shape[1])

    def _count(self, layout: Layout) -> int:
        """C: selected blocks of a query besides the local ones, at most; from sizes alone, which tracing knows."""
        options = self.options
        return min(options.topk - options.local_blocks, block_bound(layout, options.block_size))
