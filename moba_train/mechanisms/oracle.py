"""The kind `oracle`: attention to the blocks that full attention itself would give the most probability.

No selector can know them, as they are found by computing all scores. They say what a budget of keys costs when the
selection is ideal: what a gate loses beyond that is the gate's own error (tools/oracle.py). With `block_size: 1` the
budget is one of tokens.

Scores exist for a chunk of queries and the blocks before them, so memory does not grow with the sequence's square.

Shape suffixes: L rows given to the layer, n queries of this rank, t a chunk of them, T tokens of the sequence, N
blocks, b blocks of a chunk, B tokens of a block, s = b * B keys of a chunk, K key/value heads, G query heads of a
group, D head width.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.full import FullAttention
from moba_train.attention.full.full_kind import full_pairs
from moba_train.attention.kernels.common.geometry import QueryBlocks
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.kind import AttentionKind, KindCosts, LayerInput, MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import Layout
from moba_train.attention.moba.moba_kind import attended_pairs
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection
from moba_train.attention.shard import attends_to_all, own_rows, padded
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates.grid import BlockGrid, block_grid, causal_chunks

_CHUNKS_AS_ONE = {"cuda": 8}
"""Chunks of `causal_chunks` that are taken at once: 512 MiB of scores in float32 on a GPU."""


class Attended(NamedTuple):
    """Queries of a chunk and one group of heads, with their probabilities over the selected keys."""

    kv_head: int
    heads: slice
    """Query heads of the group."""
    queries: slice
    blocks: slice
    p_Gts: Tensor
    """Sums to 1 over the keys; 0 for keys that are not selected, or not there."""
    lse_Gt: Tensor
    """Natural log-sum-exp of the scaled scores of the selected keys."""


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

    def __init__(self, options: Section, head_dim: int) -> None:
        assert isinstance(options, IdealAttention.Options)
        self.options = options
        self.scale = head_dim**-0.5

    def summarize(self, k_SKD: Tensor, layout: Layout) -> None:
        """Nothing: the selection looks at each key."""
        return None

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """Nothing: `attend` selects, as it has the keys."""
        return ()

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Nothing, as `select`."""
        return ()

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [n, H, D], lse [H, n]) over the own and the best blocks."""
        grid = block_grid(layout, self.options.block_size)
        out_nHD = torch.zeros_like(q_THD)
        dtype = accumulation_dtype(q_THD.dtype)
        lse_Hn = torch.empty(q_THD.shape[1], q_THD.shape[0], dtype=dtype, device=q_THD.device)
        for part in self._attended(q_THD, k_SKD, layout, grid):
            out_GtD = part.p_Gts @ _keys(v_SKD, part, grid)
            out_nHD[part.queries, part.heads] = out_GtD.transpose(0, 1).to(q_THD.dtype)
            lse_Hn[part.heads, part.queries] = part.lse_Gt
        return out_nHD, lse_Hn

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`. Selects again, which gives the same blocks, and passes no gradient."""
        grid = block_grid(layout, self.options.block_size)
        dtype = accumulation_dtype(state.q.dtype)
        blocks_shape = (*grid.tokens_NB.shape, *state.k.shape[1:])
        dq_nHD = torch.zeros_like(state.q)
        dk_NBKD, dv_NBKD = (torch.zeros(blocks_shape, dtype=dtype, device=state.k.device) for _ in range(2))
        for part in self._attended(state.q, state.k, layout, grid):
            q_GtD, out_GtD, dout_GtD = (
                x[part.queries, part.heads].to(dtype).transpose(0, 1) for x in (state.q, state.out, state.dout)
            )
            delta_Gt1 = (dout_GtD * out_GtD).sum(-1, keepdim=True)
            ds_Gts = (dout_GtD @ _keys(state.v, part, grid).T).sub_(delta_Gt1).mul_(part.p_Gts).mul_(self.scale)
            dq_GtD = ds_Gts @ _keys(state.k, part, grid)
            dq_nHD[part.queries, part.heads] = dq_GtD.transpose(0, 1).to(state.q.dtype)
            place = part.blocks, slice(None), part.kv_head
            shape = (-1, grid.tokens_NB.shape[1], state.k.shape[2])
            dk_NBKD[place] += (ds_Gts.flatten(0, 1).T @ q_GtD.flatten(0, 1)).view(shape)
            dv_NBKD[place] += (part.p_Gts.flatten(0, 1).T @ dout_GtD.flatten(0, 1)).view(shape)
        tokens = grid.tokens_NB[grid.present_NB]
        dk_SKD = torch.zeros_like(state.k)
        dv_SKD = torch.zeros_like(state.v)
        dk_SKD[tokens] = dk_NBKD[grid.present_NB].to(state.k.dtype)
        dv_SKD[tokens] = dv_NBKD[grid.present_NB].to(state.v.dtype)
        return dq_nHD, dk_SKD, dv_SKD

    def _attended(self, q_nHD: Tensor, k_TKD: Tensor, layout: Layout, grid: BlockGrid) -> Iterator[Attended]:
        """All queries and heads, a chunk of queries of one group at a time."""
        options = self.options
        dtype = accumulation_dtype(q_nHD.dtype)
        group = q_nHD.shape[1] // k_TKD.shape[1]
        forced = {"first": int("first" in options.always), "local": 2 if "previous" in options.always else 1}
        scores_per_block = -(-group * options.block_size // _CHUNKS_AS_ONE.get(q_nHD.device.type, 1))
        for kv_head in range(k_TKD.shape[1]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            k_NBD = k_TKD[:, kv_head][grid.tokens_NB].to(dtype)
            chunks = causal_chunks(grid.own_on_host, grid.first_on_host, scores_per_block, q_nHD.device)
            for queries, blocks in chunks:
                q_GtD = q_nHD[queries, heads].to(dtype).transpose(0, 1)
                seen_ts = grid.visible(queries, blocks).flatten(1)
                p_Gts = (q_GtD @ k_NBD[blocks].flatten(0, 1).T).mul_(self.scale).masked_fill_(~seen_ts, -torch.inf)
                lse_Gt = p_Gts.logsumexp(-1)
                p_Gts = p_Gts.sub_(lse_Gt.unsqueeze(-1)).exp_()
                mass_Gtb = p_Gts.unflatten(2, (-1, options.block_size)).sum(-1)
                wanted = mass_Gtb if options.select == "head" else mass_Gtb.sum(0, keepdim=True)
                own = QueryBlocks(grid.own_n[queries] - blocks.start, grid.first_n[queries] - blocks.start)
                chosen = choose_blocks(wanted, own, options.topk - 1, **forced).long()
                # Empty slots stand for the own block, which is always attended to.
                own_Wt1 = own.own_t[:, None].expand(len(chosen), -1, 1)
                chosen = torch.cat([torch.where(chosen < 0, own_Wt1, chosen), own_Wt1], -1)
                attended = torch.zeros_like(wanted, dtype=torch.bool).scatter_(2, chosen, True)
                # Not 0: the best blocks are among them; unless forced ones take their places, with next to nothing.
                kept_Gt = (mass_Gtb * attended).sum(-1).clamp_(min=torch.finfo(dtype).tiny)
                p_Gts.unflatten(2, (-1, options.block_size)).mul_((attended / kept_Gt.unsqueeze(-1)).unsqueeze(-1))
                yield Attended(kv_head, heads, queries, blocks, p_Gts, lse_Gt + kept_Gt.log())


def _keys(x_TKD: Tensor, part: Attended, grid: BlockGrid) -> Tensor:
    """Rows [s, D] of keys or values of a chunk's blocks, in its group's dtype."""
    return x_TKD[:, part.kv_head][grid.tokens_NB[part.blocks].flatten()].to(part.p_Gts.dtype)


class OracleKind(AttentionKind):
    """Attention to the blocks with the most probability of full attention; to measure with, not to save time."""

    name = "oracle"
    Options = IdealAttention.Options

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.ideal = IdealAttention(options, head_dim)
        self.full = FullAttention(FullAttention.Options(), head_dim)
        self.attentions = ()

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """More forced blocks than are attended to, and a block longer than the sequence."""
        assert isinstance(options, IdealAttention.Options)
        forced = {"current", *options.always}
        if len(forced) > options.topk:
            yield f"topk: given {options.topk} {context.layers}; allowed: at least the {len(forced)} blocks of always"
        if options.block_size > context.seq_len:
            yield (
                f"block_size: given {options.block_size} {context.layers}, which does not fit in a sequence of "
                f"{context.seq_len} tokens; allowed: at most seq_len"
            )

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, None]:
        """Attention of this rank's tokens to the keys of all tokens."""
        shard = layer.engine.shard(layer.layout)
        q_nHD = own_rows(layer.rotate(layer.q_THd), shard)
        k_TKD = shard.gather("k", own_rows(layer.rotate(layer.k_TKd), shard))
        v_TKD = shard.gather("v", own_rows(layer.v_TKd, shard))
        out_nHD, _ = shard.attend(q_nHD, k_TKD, v_TKD, self.full if attends_to_all(shard) else self.ideal)
        return padded(out_nHD, len(layer.x_TD)), None

    def costs(self, model: ModelConfig) -> "OracleCosts":
        """Costs of full attention's scores and of attention to the selected blocks."""
        return OracleCosts(self, model)


class OracleCosts(KindCosts):
    """Costs of a layer whose selection is ideal."""

    kind: OracleKind

    def pairs(self, lengths: Sequence[int]) -> float:
        """Own blocks up to the query, and at most topk - 1 complete blocks before."""
        options = self.kind.ideal.options
        return sum(attended_pairs(length, options.block_size, options.topk) for length in lengths)

    def flops(self, lengths: Sequence[int]) -> float:
        """Attention, and the scores of all keys, in both passes: 2 H d a pair each."""
        return super().flops(lengths) + 4.0 * self.model.heads * self.model.head_width * full_pairs(lengths)

    def token_bytes(self, batch: MicroBatch) -> TokenBytes:
        """Keys and values are gathered; gradients of them are summed in float32."""
        width = self.model.kv_heads * self.model.head_width
        return TokenBytes(gathered=2 * batch.width * width, workspace=2 * 4 * width)
