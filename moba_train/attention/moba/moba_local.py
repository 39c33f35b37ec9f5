"""MoBA as a LocalAttention: the gate summarizes keys and selects blocks, `BlockAttention` attends to them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol, cast

from pydantic import Field
from torch import Tensor

from moba_train.attention.block_sparse import BlockOptions, DenseOrSparse, listed_blocks
from moba_train.attention.facets import Gate, Gated, SelectedBlocks
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common.selection import Choice, key_share, selection_statistics
from moba_train.attention.kernels.table import call_problem
from moba_train.attention.layout import Layout
from moba_train.attention.moba import gate
from moba_train.attention.protocol import AttentionFacts, Selection
from moba_train.attention.statistics import Statistics
from moba_train.config.base import Length


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
        local: int = 1,
    ) -> Tensor:
        """The selected history blocks, int32 [H, T, history_blocks]."""
        ...


def pick_selector(wanted: str, x: Tensor, layout: Layout, *, block_size: int, history_blocks: int) -> Selector:
    """The selector for tensors like `x` ([tokens, heads, D]): kernels where they can run and are not refused by the
    backend `wanted`, else plain PyTorch. `composed` has none of its own and takes the kernels."""
    # `triton` is also asked for on a CPU, under Triton's interpreter, for tests.
    plain = wanted == "reference" or (wanted != "triton" and not x.is_cuda)
    if plain or call_problem(x, layout, block_size, history_blocks):
        return cast(Selector, gate)
    from moba_train.attention.moba import gate_kernels  # Triton is imported where it runs

    return cast(Selector, gate_kernels)


class MobaAttention(DenseOrSparse, Gated):
    """Mixture of Block Attention: each query and head attends to its own block and to its top-k blocks of history."""

    class Options(BlockOptions):
        """Options of `kind: moba`."""

        block_size: Length = Field(512, description="tokens per block; blocks start again with each document")
        topk: int = Field(3, ge=1, description="blocks each query attends to, its own included; 1: own block only")
        select: Literal["head", "group"] = Field(
            "head", description="select per query head, or once for all query heads that share a key/value head"
        )
        always: tuple[Literal["current", "previous", "first"], ...] = Field(
            ("current",), description="blocks that are selected regardless of their gate; they count towards topk"
        )
        key_conv: Literal[0, 3, 5] = Field(
            0,
            description="tokens of a causal convolution over the keys of a document, one for each channel, with "
            "trained weights: k + silu(convolution of k), before the rotary embedding; 0: none",
        )

    blocks: BlockAttention
    local_blocks: int = 1
    """Number of blocks, up to its own, that each query attends to in any case: the gate selects among those before."""

    def __init__(
        self, options: Options, head_dim: int, softmax_scale: float | None = None, *, section: str = "attention.moba"
    ) -> None:
        """`section`: YAML path of the options, for messages."""
        forced = {"current", *options.always}
        if len(forced) > options.topk:
            raise ValueError(f"always: {options.always} forces {len(forced)} blocks, topk is {options.topk}")
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        if not 0 < scale < math.inf:  # flash kernels find a row's maximum before they scale it
            raise ValueError(f"softmax_scale: {softmax_scale} given, a positive, finite number needed")
        self.options = options
        self.backend = options.backend
        self.block_size = options.block_size
        # With at most topk blocks in a document every block is selected: MoBA is dense attention there, whose kernels
        # win in all ten cases measured (benchmarks/results/crossover-h200.json).
        self.full_up_to = options.topk * options.block_size
        # Every query attends to topk blocks: the gate's work, which does grow with the position, is small.
        couples_heads = options.select == "group"
        self.facts = AttentionFacts(alignment=options.block_size, couples_heads=couples_heads, work_grows=False)
        self.scale = scale
        self.full = FullAttention(FullAttention.Options(), head_dim, scale)
        self.blocks = BlockAttention(options.block_size, scale, options.backend, f"{section}.backend")

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor:
        """The mean key of every block, [blocks, K, D]; zeros for blocks without given keys."""
        return self._selector(k_SKD, layout).pool_keys(k_SKD, layout, self.block_size)

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """The selected history blocks, int32 [H, T, C] (`gate.select_blocks`), and what the backend makes of them.

        Nothing if every block is selected.
        """
        if self.is_full(layout):
            return ()
        assert summaries is not None
        selected_HTC = self._selection_rule(q_THD, layout)(q_THD, summaries, layout)
        return self.blocks.selection(selected_HTC, q_THD, layout, kv_heads=summaries.shape[1])

    def select_blocks(self, q_THD: Tensor, summaries: Tensor, layout: Layout) -> Tensor:
        """int32 [H, T, C]: the selected history blocks (`gate.select_blocks`)."""
        return self._selection_rule(q_THD, layout)(q_THD, summaries, layout)

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined."""
        if self.is_full(layout):
            return ()
        return self.blocks.empty_selection(self._listed(layout), q_THD, layout, kv_heads=k_SKD.shape[1])

    def gate(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Gate | None:
        """The selected blocks, and the gates (`gate.gate_scores`), scaled."""
        if self.is_full(layout):
            return None
        assert summaries is not None
        selected = SelectedBlocks(self.select_blocks(q_THD, summaries, layout), self.block_size)
        return Gate(selected, gate.gate_scores(q_THD, summaries, self.options.select) * self.scale)

    def selected_by(self, rows_n: Tensor, selection: Selection, layout: Layout) -> SelectedBlocks | None:
        """The blocks of these queries; None if every block is selected."""
        return SelectedBlocks(selection[0][:, rows_n], self.block_size) if selection else None

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """`selection_statistics` of the selected blocks."""
        if not selection or self.is_full(layout):
            return key_share(None, layout)
        options = self.options
        first, previous = (int(name in options.always) for name in ("first", "previous"))
        choice = Choice(options.block_size, options.topk, first, local=1 + previous)
        return selection_statistics(selection[0], layout, choice)

    def _listed(self, layout: Layout) -> int:
        return listed_blocks(self.options.history_blocks, layout, self.block_size)

    def _selection_rule(self, q_THD: Tensor, layout: Layout) -> Callable[..., Tensor]:
        """The selector's `select_blocks` with this attention's sizes and rules."""
        return partial(
            self._selector(q_THD, layout).select_blocks,
            block_size=self.block_size,
            history_blocks=self._listed(layout),
            select=self.options.select,
            always=self.options.always,
            local=self.local_blocks,
        )

    def _selector(self, x: Tensor, layout: Layout) -> Selector:
        return pick_selector(self.backend, x, layout, block_size=self.block_size, history_blocks=self._listed(layout))
