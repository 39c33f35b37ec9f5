"""MoBA as a LocalAttention: the gate summarizes keys and selects blocks, `BlockAttention` attends to them."""

import math
from typing import Annotated, Literal, Protocol, cast

from pydantic import BeforeValidator, Field
from torch import Tensor

from moba_train.attention.block_sparse import DenseOrSparse
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.by_unit import BlocksByUnit
from moba_train.attention.kernels.common.geometry import block_bound
from moba_train.attention.kernels.common.selection import Choice, key_share, selection_statistics
from moba_train.attention.kernels.table import call_problem
from moba_train.attention.moba import gate
from moba_train.attention.protocol import Layout, Selection
from moba_train.attention.statistics import Statistics
from moba_train.config.base import Length, Section


class Selector(Protocol):
    """The functions that gate.py and gate_kernels.py both provide."""

    def pool_keys(self, k_SKD: Tensor, layout: Layout, block_size: int) -> Tensor:
        """Mean of the given keys in each block, [blocks, K, D]."""
        ...

    def select_blocks(
        self,
        q_THD: Tensor,
        pooled_NKD: Tensor,
        layout: Layout,
        *,
        block_size: int,
        history_blocks: int,
        select: str,
        always: tuple[str, ...],
    ) -> Tensor:
        """The selected history blocks, int32 [H, T, history_blocks]."""
        ...


def pick_selector(wanted: str, x: Tensor, layout: Layout, *, block_size: int, history_blocks: int) -> Selector:
    """The selector for tensors like `x` ([tokens, heads, D]): kernels where they can run and are not refused by the
    backend `wanted`, else plain PyTorch. `composed` has none of its own and takes the kernels."""
    if wanted == "reference" or (wanted != "triton" and not x.is_cuda):
        return cast(Selector, gate)
    return cast(Selector, gate) if call_problem(x, layout, block_size, history_blocks) else _triton()


def _triton() -> Selector:
    """The kernels, imported at the first use."""
    from moba_train.attention.moba import gate_kernels

    return cast(Selector, gate_kernels)


def _current_name(backend: object) -> object:
    """`composed` was called `flash` in recipes and checkpoints before 2026-11-22; both load."""
    return "composed" if backend == "flash" else backend


class MobaAttention(DenseOrSparse):
    """Mixture of Block Attention: each query and head attends to its own block and to its top-k blocks of history."""

    class Options(Section):
        """Options of `kind: moba`."""

        block_size: Length = Field(512, description="tokens per block; blocks start anew with each document")
        topk: int = Field(3, ge=1, description="blocks each query attends to, its own included; 1: own block only")
        select: Literal["head", "group"] = Field(
            "head", description="select per query head, or once for all query heads that share a key/value head"
        )
        always: tuple[Literal["current", "previous", "first"], ...] = Field(
            ("current",), description="blocks that are selected regardless of their gate; they count towards topk"
        )
        backend: Annotated[Literal["auto", "triton", "composed", "reference"], BeforeValidator(_current_name)] = Field(
            "auto",
            description="triton: kernels for CUDA and 16-bit dtypes; composed: varlen flash attention over gathered "
            "queries, then a merge; reference: plain PyTorch, any device; auto: dense attention where no document is "
            "longer than block_size x topk, else triton where it can run, else composed where it can run",
        )

        key_conv: Literal[0, 3, 5] = Field(
            0,
            description="tokens of a causal convolution over the keys of a document, one for each channel, with "
            "parameters of its own: k + silu(convolution of k), before the rotary embedding; 0: none",
        )

    blocks: BlockAttention
    work_grows = False  # every query attends to topk blocks; the gate, which does grow, is small

    def __init__(
        self, options: Section, head_dim: int, softmax_scale: float | None = None, *, section: str = "attention.moba"
    ) -> None:
        """`section`: YAML path of the options, for messages."""
        assert isinstance(options, MobaAttention.Options)
        forced = {"current", *options.always}
        if len(forced) > options.topk:
            raise ValueError(f"always: {options.always} forces {len(forced)} blocks, topk is {options.topk}")
        self.options = options
        self.backend = options.backend
        self.alignment = options.block_size
        self.couples_heads = options.select == "group"
        self.scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        if not 0 < self.scale < math.inf:  # flash kernels find a row's maximum before they scale it
            raise ValueError(f"softmax_scale: {softmax_scale} given, a positive, finite number needed")
        self.dense = FullAttention(FullAttention.Options(), head_dim, self.scale)
        self.blocks = BlockAttention(options.block_size, self.scale, options.backend, f"{section}.backend")

    @property
    def by_unit(self) -> BlocksByUnit:
        """This attention, one block at a time."""
        return BlocksByUnit(self, self.options.topk - 1)

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor:
        """The mean key of every block, [blocks, K, D]; zeros for blocks without given keys."""
        return self._selector(k_SKD, layout).pool_keys(k_SKD, layout, self.options.block_size)

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """The selected history blocks, int32 [H, T, C] (`gate.select_blocks`), and what the backend makes of them.

        Nothing where every block is selected.
        """
        selected_HTC = self.select_blocks(q_THD, summaries, layout)
        if selected_HTC is None:
            return ()
        assert summaries is not None
        return self.blocks.selection(selected_HTC, q_THD, layout, kv_heads=summaries.shape[1])

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """`selection_statistics` of the selected blocks."""
        if not selection or self.is_dense(layout):
            return key_share(None, layout)
        options = self.options
        first, previous = (int(name in options.always) for name in ("first", "previous"))
        choice = Choice(options.block_size, options.topk, first, local=1 + previous)
        return selection_statistics(selection[0], layout, choice)

    def select_blocks(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Tensor | None:
        """int32 [H, T, C]: the selected history blocks (`gate.select_blocks`); None where every block is selected."""
        if self.is_dense(layout):
            return None
        assert summaries is not None
        return self._selector(q_THD, layout).select_blocks(
            q_THD,
            summaries,
            layout,
            block_size=self.options.block_size,
            history_blocks=self._count(layout),
            select=self.options.select,
            always=self.options.always,
        )

    def selected_blocks(self, selection: Selection) -> Tensor | None:
        """int32 [H, T, C]; None where every block is selected."""
        return selection[0] if selection else None

    def block_scores(self, q_THD: Tensor, summaries: Tensor) -> Tensor:
        """The gates (`gate.gate_scores`), scaled."""
        return gate.gate_scores(q_THD, summaries, self.options.select) * self.scale

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined."""
        if self.is_dense(layout):
            return ()
        return self.blocks.empty_selection(self._count(layout), q_THD, layout, kv_heads=k_SKD.shape[1])

    @property
    def dense_tokens(self) -> int:
        """Tokens of topk blocks."""
        return self.options.topk * self.options.block_size

    def _count(self, layout: Layout) -> int:
        """C: history blocks of a query, at most; the own block is one of `topk`."""
        return min(self.options.topk - 1, block_bound(layout, self.options.block_size))

    def _selector(self, x: Tensor, layout: Layout) -> Selector:
        return pick_selector(
            self.options.backend, x, layout, block_size=self.options.block_size, history_blocks=self._count(layout)
        )
