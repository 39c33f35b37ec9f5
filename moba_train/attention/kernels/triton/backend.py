"""The Triton backend: attention to selected blocks, forward and backward, in bounded memory.

Partial results exist for a work range at a time: some key/value heads or, where one head's are too many, a range of its
queries (at 1M tokens, 4096/12, all of them would be 92 GB). The limit is twice the size of q, or a key/value head's
up to 512 MiB.

Queries and keys may be parts of the sequence. Lists name the rows of the given queries, by the block that they
selected, whether its keys are given or not; keys that are not given are skipped.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.kernels.common.call import BlockCall, heads_side_by_side
from moba_train.attention.kernels.common.geometry import KeySpans, block_bound
from moba_train.attention.kernels.common.launch import replayed
from moba_train.attention.kernels.common.lists import BlockLists, block_tables, empty_inverse, invert
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, Selection

NAME = "triton"


@replayed
def block_lists(selected_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Selection:
    """(slots, starts): the lists of the rows that selected each block (lists.py), for both passes."""
    return invert(selected_HTC, kv_heads, block_tables(layout, block_size).blocks)


def empty_block_lists(selected_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Selection:
    """Uninitialised tensors of the shapes and dtypes of `block_lists`'s, for tracing."""
    return empty_inverse(selected_HTC, kv_heads, block_bound(layout, block_size))


@replayed
def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    layout: Layout,
    selection: Selection,
    *,
    block_size: int,
    scale: float,
    spans: KeySpans | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] over the diagonal blocks and the selected ones, as far as their keys are given.

    `spans`: keys that queries attend to instead of their diagonal blocks; no selected block lies in a query's span.
    """
    selected_HTC, *lists = selection
    call = BlockCall.from_tensors(q_THD, k_SKD, v_SKD, layout, selected_HTC, block_size, scale, spans)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    lse_HT = torch.empty(call.heads, call.tokens, dtype=torch.float32, device=q_THD.device)
    if call.tokens:
        _kernels(call.forward_pass).attend(call, _lists(call, lists), out_THD, lse_HT)
    return out_THD, lse_HT


@replayed
def attend_backward(
    state: BackwardState,
    layout: Layout,
    selection: Selection,
    *,
    block_size: int,
    scale: float,
    spans: KeySpans | None = None,
) -> Gradients:
    """(dq, dk, dv) of `attend`; the state's `out` and `lse` may come from more keys than its `k`."""
    selected_HTC, *lists = selection
    call = BlockCall.from_tensors(state.q, state.k, state.v, layout, selected_HTC, block_size, scale, spans)
    if call.tokens == 0:
        # A shard may have no query and still hold keys, whose gradients are zeros.
        return torch.empty_like(state.q), torch.zeros_like(state.k), torch.zeros_like(state.v)
    # Contiguous, as `prepare` reads rows end to end, and aligned: autograd may hand over a gradient at an address that
    # is no multiple of 16, which bulk copies refuse.
    dout_THD = heads_side_by_side(state.dout.contiguous())
    stats_TH2 = call.stats(dout_THD, state.out, state.lse)
    gradients: Gradients = _kernels(call.backward_pass).attend_backward(call, _lists(call, lists), dout_THD, stats_TH2)
    return gradients


@cache
def _kernels(file: str) -> Any:
    """The module of a row of the table, imported at the first use: those in hopper/ need a release of Gluon.

    It has `attend(call, lists, out, lse)`, which writes out [T, H, D] and lse [H, T], or `attend_backward(call, lists,
    dout, stats)`, which returns dq, dk and dv.
    """
    return import_module(f"..{file.removesuffix('.py').replace('/', '.')}", __package__)


def _lists(call: BlockCall, tensors: list[Tensor]) -> BlockLists:
    slots, starts = tensors
    return BlockLists.from_tensors(slots, starts, call.selected_HTC, call.kv_heads, call.tables.blocks)
