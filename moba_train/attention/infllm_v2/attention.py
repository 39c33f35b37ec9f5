"""InfLLM-V2 as a LocalAttention: mean keys score blocks, `BlockAttention` attends to the selected ones.

Shape suffixes: T queries, t a chunk of them, S keys, U units, H query heads, K key/value heads, D head width,
C selected blocks.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.blocks.attention import BlockAttention
from moba_train.attention.blocks.choose import QueryBlocks, choose_blocks, query_blocks
from moba_train.attention.blocks.geometry import block_bound
from moba_train.attention.blocks.shared import SharedBlocks
from moba_train.attention.decoding import CachedKeys, kernel_decodes
from moba_train.attention.full import FullAttention
from moba_train.attention.infllm_v2.scores import WindowSizes, block_scores, reach, window_means
from moba_train.attention.masked import query_chunks
from moba_train.attention.moba.attention import pick_selector
from moba_train.attention.protocol import BackwardState, Gradients, Layout, LocalAttention, Selection
from moba_train.config.base import Section
from moba_train.config.quantities import Length


class InfLLMV2Attention(LocalAttention):
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

    couples_heads = True
    work_grows = False  # every query attends to topk blocks; the scores, which do grow, are small

    def __init__(self, options: Section, head_dim: int) -> None:
        assert isinstance(options, InfLLMV2Attention.Options)
        if problems := options.contradictions():
            raise ValueError("; ".join(problems))
        self.options = options
        self.alignment = options.stride
        self.scale = head_dim**-0.5
        self.dense = FullAttention(FullAttention.Options(), head_dim)
        self.blocks = SharedBlocks(
            BlockAttention(options.block_size, self.scale, options.backend, "attention.infllm_v2.backend")
        )

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that `selected_blocks` counts."""
        return self.options.block_size

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor:
        """The mean key of every unit of `stride` tokens, [U, K, D]; zeros for units without given keys."""
        stride = self.options.stride
        pool = pick_selector(self.options.backend, k_SKD, layout, block_size=stride, count=0).pool_keys
        return pool(k_SKD, layout, stride)

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """The history blocks that each group of query heads selects, int32 [K, T, C], as `SharedBlocks` keeps them;
        nothing where every block is selected."""
        if self._is_dense(layout):
            return ()
        assert summaries is not None
        queries, heads, _ = q_THD.shape
        q_THD, summaries = q_THD.detach(), summaries.detach()
        windows_UKD = window_means(summaries, self.options.sizes)
        selected_KTC = q_THD.new_empty((summaries.shape[1], queries, self._count(layout)), dtype=torch.int32)
        for rows in query_chunks(queries, heads * len(summaries), q_THD.device):
            selected_KTC[:, rows] = self._choose(q_THD[rows], windows_UKD, layout, rows)
        return self.blocks.selection(selected_KTC, q_THD)

    def _choose(self, q_tHD: Tensor, windows_UKD: Tensor, layout: Layout, rows: slice) -> Tensor:
        """int32 [K, t, C] of a chunk of the queries."""
        options = self.options
        within = reach(layout, rows, options.sizes)
        own_t, first_t = query_blocks(layout, options.block_size).rows(rows)
        count = self._count(layout)
        history_tC = first_t.unsqueeze(1) + torch.arange(count, device=q_tHD.device)
        history_tC = torch.where(history_tC < own_t.unsqueeze(1), history_tC, -1).int()
        if within.longest <= options.dense_tokens:
            return history_tC.expand(windows_UKD.shape[1], -1, -1)
        scores_KtN = block_scores(q_tHD, windows_UKD, layout, rows, within, options.sizes, self.scale)
        before = within.blocks.start
        chosen_KtC = choose_blocks(
            scores_KtN,
            QueryBlocks(own_t - before, first_t - before),
            options.topk - 1,
            first=options.first_blocks,
            local=options.local_blocks,
        )
        chosen_KtC = torch.where(chosen_KtC < 0, -1, chosen_KtC + before)
        missing = count - chosen_KtC.shape[-1]
        chosen_KtC = torch.nn.functional.pad(chosen_KtC, (0, missing), value=-1)
        positions_t = layout.positions(layout.q_tokens[rows], layout.q_documents[rows])
        return torch.where((positions_t < options.dense_len).unsqueeze(1), history_tC, chosen_KtC)

    def selected_blocks(self, selection: Selection) -> Tensor | None:
        """int32 [H, T, C], equal for the query heads of a group; None where every block is selected."""
        return self.blocks.selected_blocks(selection) if selection else None

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined."""
        if self._is_dense(layout):
            return ()
        return self.blocks.empty_selection(self._count(layout), q_THD, kv_heads=k_SKD.shape[1])

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the given keys of the own and the selected blocks."""
        attend = self.dense.attend if self._is_dense(layout) else self.blocks.attend
        return attend(q_THD, k_SKD, v_SKD, layout, selection)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        attend_backward = self.dense.attend_backward if self._is_dense(layout) else self.blocks.attend_backward
        return attend_backward(state, layout, selection)

    def decode(self, q_BHD: Tensor, cached: CachedKeys) -> tuple[Tensor, Tensor]:
        """(out [B, H, D], lse [H, B]) of the newest token of each sequence; with a kernel of its own on CUDA."""
        layout = cached.layout
        block_size = self.options.block_size
        if self._is_dense(layout):
            return self.dense.decode(q_BHD, cached)
        if self.options.backend not in ("auto", "triton") or not kernel_decodes(q_BHD, block_size):
            return super().decode(q_BHD, cached)
        from moba_train.attention.decoding.kernel import decode

        ids_KBC, _ = self.select(q_BHD, cached.summaries, layout)
        first_B1 = query_blocks(layout, block_size).first_t.unsqueeze(1)
        selected_KBC = torch.where(ids_KBC < 0, -1, ids_KBC - first_B1).int()
        return decode(q_BHD, cached, scale=self.scale, block_size=block_size, selected_HBC=selected_KBC)

    def _is_dense(self, layout: Layout) -> bool:
        """Whether no document is long enough for a query to leave a block out: then full attention is faster."""
        return self.options.backend == "auto" and layout.max_seqlen <= self.options.dense_tokens

    def _count(self, layout: Layout) -> int:
        """C: history blocks of a query, at most; the own block is one of `topk`.

        It follows from sizes alone, which tracing knows. A query at position dense_len - 1 attends to all blocks of the
        first dense_len tokens: 128 with the defaults, as many as the kernels hold.
        """
        options = self.options
        dense_blocks = -(-min(options.dense_len, layout.max_seqlen) // options.block_size)
        return min(max(options.topk, dense_blocks) - 1, block_bound(layout, options.block_size))
