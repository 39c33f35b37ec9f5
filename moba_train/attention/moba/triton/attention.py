"""MoBA attention for a given choice, forward and backward, in bounded memory.

Partial results exist for a segment at a time: some key/value heads or, where one head's are too many, a range of its
queries (at 1M tokens, 4096/12, all of them would be 92 GB). The limit is twice the size of q.

Queries and keys may be parts of the sequence. Lists name the rows of the queries that are here, by the block they
chose, whether its keys are here or not; what is not here is passed over.
"""

import torch
from torch import Tensor

from moba_train.attention.moba.blocks import block_bound
from moba_train.attention.moba.triton.call import Call, heads_side_by_side
from moba_train.attention.moba.triton.lists import Lists, empty_inverse, invert
from moba_train.attention.moba.triton.long_blocks import LongBlocks
from moba_train.attention.moba.triton.pool import pool_keys
from moba_train.attention.moba.triton.select import select_blocks
from moba_train.attention.moba.triton.short_blocks import ShortBlocks
from moba_train.attention.moba.triton.tables import block_tables
from moba_train.attention.protocol import Layout


def summarize(k_SKD: Tensor, layout: Layout, block_size: int) -> Tensor:
    """Mean key of every block, [blocks, K, D]; zeros for those of which nothing is here."""
    return pool_keys(heads_side_by_side(k_SKD.detach()), block_tables(layout, block_size))


def choose(
    q_THD: Tensor,
    pooled_NKD: Tensor,
    layout: Layout,
    *,
    block_size: int,
    topk: int,
    select: str,
    always: tuple[str, ...],
) -> Tensor:
    """The chosen history blocks of the layout's queries, int32 [H, T, C] as `selection.select_blocks`."""
    tables = block_tables(layout, block_size)
    tensors = (heads_side_by_side(q_THD.detach()), pooled_NKD.contiguous(), tables.own_T, tables.first_T)
    return select_blocks(*tensors, topk=topk, select=select, always=always)


def invert_choice(chosen_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> tuple[Tensor, Tensor]:
    """(entries, starts): the lists of the rows that chose each block (lists.py), for both passes."""
    return invert(chosen_HTC, kv_heads, block_tables(layout, block_size).blocks)


def empty_lists(chosen_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Uninitialised tensors of the shapes and dtypes of `invert_choice`'s, for tracing."""
    return empty_inverse(chosen_HTC, kv_heads, block_bound(layout, block_size))


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    layout: Layout,
    chosen_HTC: Tensor,
    entries: Tensor,
    starts: Tensor,
    *,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] over the own blocks and the chosen ones, as far as their keys are here."""
    call = Call.of(q_THD, k_SKD, v_SKD, layout, chosen_HTC, block_size, scale)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_HT = torch.empty(call.heads, call.tokens, dtype=torch.float32, device=q_THD.device)
    if call.tokens:
        lists = Lists.of(entries, starts, chosen_HTC, call.kv_heads, call.tables.blocks)
        way = ShortBlocks if call.shapes.short_forward else LongBlocks
        way(call, lists).attend(out_THD, lse_HT)
    return out_THD, lse_HT


def attend_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
    chosen_HTC: Tensor,
    entries: Tensor,
    starts: Tensor,
    *,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attend`; `out` and `lse` may come from more keys than are here."""
    call = Call.of(q_THD, k_SKD, v_SKD, layout, chosen_HTC, block_size, scale)
    if call.tokens == 0:
        return torch.empty_like(q_THD), torch.zeros_like(k_SKD), torch.zeros_like(v_SKD)
    dout_THD = dout_THD.contiguous()
    stats_TH2 = call.stats(dout_THD, out_THD, lse_HT)
    lists = Lists.of(entries, starts, chosen_HTC, call.kv_heads, call.tables.blocks)
    short = ShortBlocks(call, lists)
    way = short if short.pays_backward() else LongBlocks(call, lists)
    return way.attend_backward(dout_THD, stats_TH2)
