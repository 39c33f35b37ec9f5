"""The kind `oracle`: attention to the blocks that full attention itself would give the most probability.

No selector can know them, as they are found by computing all scores. They say what a budget of keys costs when the
selection is ideal: what a gate loses beyond that is the gate's own error (tools/oracle.py). With `block_size: 1` the
budget is one of tokens.

Full attention gives the log-sum-exp of each query, with which the probability in each block is computed for a chunk of
queries at a time; attention to the best blocks is that of the kinds that select. On a GPU all three are kernels.

Shape suffixes: n queries of this rank, t a chunk of them, T or S tokens of the sequence, b blocks of a chunk, H query
heads, K key/value heads, W what selects (query heads or groups), D head width, C selected blocks.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.block_sparse import GivenBlocks, listed_blocks, too_long
from moba_train.attention.full import FullAttention
from moba_train.attention.full.full_kind import full_pairs
from moba_train.attention.kernels.common.geometry import QueryBlocks
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.kernels.table import TRITON
from moba_train.attention.kind import AttentionKind, LayerInput, MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import Layout
from moba_train.attention.moba.moba_kind import attended_pairs
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection
from moba_train.attention.shard import attends_to_all, own_rows, padded
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates.grid import Attended, block_grid
from moba_train.mechanisms.gates.pooled_scores import block_masses
from moba_train.mechanisms.gates.short_blocks import ShortBlocks


class IdealAttention(LocalAttention):
    """Each query attends to its own block, causally, and to the history blocks with the most probability of full
    attention. It is given the keys of all tokens."""

    class Options(Section):
        """Options of `kind: oracle`."""

        block_size: Length = Field(
            128, description="tokens per block; blocks start again with each document; 1: single tokens are selected"
        )
        topk: int = Field(32, ge=2, description="blocks each query attends to, its own included")
        select: Literal["head", "group"] = Field(
            "head", description="select per query head, or once, by their sum, for all that share a key/value head"
        )
        always: tuple[Literal["current", "previous", "first"], ...] = Field(
            ("current",), description="blocks that are selected whatever their probability; they count towards topk"
        )

    def __init__(self, options: Options, head_dim: int) -> None:
        self.options = options
        self.full = FullAttention(FullAttention.Options(), head_dim)
        # Kernels of short blocks take any sizes that those of MoBA do not.
        sizes = options.block_size, options.topk - 1
        kind = ShortBlocks if TRITON.size_problem(head_dim, *sizes) else GivenBlocks
        self.blocks = kind(*sizes, head_dim, "auto", "attention.oracle")

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [n, H, D], lse [H, n]) over the own and the best blocks."""
        k_SKD, v_SKD = (self._of_selecting(x, q_THD) for x in (k_SKD, v_SKD))
        return self.blocks.attend(q_THD, k_SKD, v_SKD, layout, self._chosen(q_THD, k_SKD, v_SKD, layout))

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`. Selects again, which gives the same blocks, and passes no gradient."""
        kv_heads = state.k.shape[1]
        k_SKD, v_SKD = (self._of_selecting(x, state.q) for x in (state.k, state.v))
        chosen = self._chosen(state.q, k_SKD, v_SKD, layout)
        dq, *dkv = self.blocks.attend_backward(state._replace(k=k_SKD, v=v_SKD), layout, chosen)
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in dkv)
        return dq, dk, dv

    def _of_selecting(self, x_SKD: Tensor, q_nHD: Tensor) -> Tensor:
        """Keys or values, once for each that selects: a group of heads, or a head."""
        if self.options.select == "group":
            return x_SKD
        return x_SKD.repeat_interleave(q_nHD.shape[1] // x_SKD.shape[1], 1)

    def _chosen(self, q_nHD: Tensor, k_SWD: Tensor, v_SWD: Tensor, layout: Layout) -> Selection:
        """The history blocks with the most probability."""
        options = self.options
        _, lse_Hn = self.full.attend(q_nHD, k_SWD, v_SWD, layout, ())
        grid = block_grid(layout, options.block_size)
        forced = {"first": int("first" in options.always), "local": 2 if "previous" in options.always else 1}
        width = listed_blocks(self.blocks.history_blocks, layout, options.block_size)
        groups = k_SWD.shape[1]
        chosen_WnC = torch.full((groups, len(q_nHD), width), -1, dtype=torch.int32, device=q_nHD.device)
        attended = Attended(q_nHD, k_SWD, lse_Hn, None, layout, options.block_size, self.full.scale)
        for those, queries, blocks, mass_Wtb in block_masses(attended, reference=False):
            own = QueryBlocks(grid.own_n[queries], grid.first_n[queries])
            best_WtC = choose_blocks(mass_Wtb, own, self.blocks.history_blocks, **forced, start=blocks.start)
            chosen_WnC[those, queries, : best_WtC.shape[2]] = best_WtC
        if not isinstance(self.blocks, ShortBlocks):
            chosen_WnC = chosen_WnC.repeat_interleave(q_nHD.shape[1] // groups, 0)
        return self.blocks.given_selection(chosen_WnC, q_nHD, k_SWD, layout)


class OracleKind(AttentionKind):
    """Attention to the blocks with the most probability of full attention; to measure with, not to save time."""

    name = "oracle"
    Options = IdealAttention.Options

    def __init__(self, options: IdealAttention.Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.ideal = IdealAttention(options, head_dim)
        self.full = FullAttention(FullAttention.Options(), head_dim)

    @classmethod
    def problems(cls, options: IdealAttention.Options, context: StageContext) -> Iterator[str]:
        """More forced blocks than are attended to, and a block longer than the sequence."""
        forced = {"current", *options.always}
        if len(forced) > options.topk:
            yield f"topk: given {options.topk} {context.layers}; allowed: at least the {len(forced)} blocks of always"
        yield from too_long(context, options, "block_size")

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, None]:
        """Attention of this rank's tokens to the keys of all tokens."""
        shard = layer.engine.shard(layer.layout)
        q_nHD = own_rows(layer.rotate(layer.q_THd), shard)
        k_TKD = shard.gather("k", own_rows(layer.rotate(layer.k_TKd), shard))
        v_TKD = shard.gather("v", own_rows(layer.v_TKd, shard))
        out_nHD, _ = shard.attend(q_nHD, k_TKD, v_TKD, self.full if attends_to_all(shard) else self.ideal)
        return padded(out_nHD, len(layer.x_TD)), None

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Own blocks up to the query, and at most topk - 1 complete blocks before."""
        options = self.ideal.options
        return sum(attended_pairs(length, options.block_size, options.topk) for length in lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention, and the scores of all keys, in both passes: 2 H d a pair each."""
        return super().flops(model, lengths) + 4.0 * model.heads * model.head_width * full_pairs(lengths)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Keys and values are gathered, of the whole sequence, and then are there once for each that selects, as are
        their gradients; in a group these are summed in float32."""
        width = model.kv_heads * model.head_width
        by_head = 4 * batch.width * model.heads * model.head_width
        workspace = batch.cp * (by_head if self.ideal.options.select == "head" else 2 * 4 * width)
        return TokenBytes(gathered=2 * batch.width * width, workspace=workspace)
