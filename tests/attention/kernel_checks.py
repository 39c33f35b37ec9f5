"""What the Triton kernels are held to, in the interpreter and on a GPU: the reference, and the selection held fixed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.block_sparse import DenseOrSparse
from moba_train.attention.kernels.common.lists import BlockLists
from moba_train.attention.kernels.common.merge import merge
from moba_train.attention.kernels.common.reference import masked_attend, masked_attend_backward, selected_mask
from moba_train.attention.layout import Layout, TokenRanges, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import BackwardState, LocalAttention
from tests.attention.helpers import make_qkv


def build(kind: str, head_dim: int, **options: Any) -> MobaAttention:
    return MobaAttention(MobaAttention.Options(backend=kind, **options), head_dim)


def inputs(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
) -> list[Tensor]:
    """q, k, v, dout."""
    q, k, v = make_qkv(sum(lengths), heads, kv_heads, head_dim, device, dtype, seed)
    dout = make_qkv(sum(lengths), heads, kv_heads, head_dim, device, dtype, seed + 1)[0]
    return [x.detach() for x in (q, k, v, dout)]


def run(
    attention: LocalAttention, tensors: list[Tensor], layout: Layout, selection: Any = None
) -> tuple[list[Tensor], Any]:
    """[out, lse, dq, dk, dv] and the selection."""
    q, k, v, dout = tensors
    selection = selection or attention.select(q, attention.summarize(k, layout), layout)
    out, lse = attention.attend(q, k, v, layout, selection)
    state = BackwardState(dout, q, k, v, out, lse)
    return [out, lse, *attention.attend_backward(state, layout, selection)], selection


def run_in_parts(
    attention: DenseOrSparse,
    tensors: list[Tensor],
    layout: Layout,
    shards: list[TokenRanges],
    *,
    all_keys: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """[out, lse, dq, dk, dv] and the selected blocks as a ring computes them: each shard's queries meet each shard's
    keys; with `all_keys`, all keys at once."""
    q, k, v, dout = tensors
    summaries = attention.summarize(k, layout)
    rows = [Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, runs).q_tokens for runs in shards]
    wide = torch.promote_types(torch.float32, q.dtype)
    outs, lses, selections = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=wide, device=q.device), []
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    key_shards = list(zip(shards, rows, strict=True)) if not all_keys else [(None, slice(None))]
    for mine, at in zip(shards, rows, strict=True):
        here = Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, mine)
        selection = attention.select(q[at], summaries, here)
        selections.append(selection[0])
        parts = [
            (Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, mine, theirs), keys)
            for theirs, keys in key_shards
        ]
        out, lse = torch.zeros_like(q[at]), torch.full_like(lses[:, at], -torch.inf)
        for part, keys in parts:
            out, lse = merge(out, lse, *attention.attend(q[at], k[keys], v[keys], part, selection))
        outs[at], lses[:, at] = out, lse
        for part, keys in parts:
            grads = attention.attend_backward(
                BackwardState(dout[at], q[at], k[keys], v[keys], out, lse), part, selection
            )
            for total, where, grad in zip((dq, dk, dv), (at, keys, keys), grads, strict=True):
                total[where] += grad
    order = torch.cat(rows).argsort()
    return [outs, lses, dq, dk, dv], torch.cat(selections, 1)[:, order]


def exact(tensors: Sequence[Tensor], layout: Layout, selected: Tensor, block_size: int, scale: float) -> list[Tensor]:
    """[out, lse, dq, dk, dv] in float64 for these selected blocks."""
    q, k, v, dout = (x.double() for x in tensors)
    mask = selected_mask(selected, layout, block_size)
    out, lse = masked_attend(q, k, v, mask, scale, prefix=True)
    return [out, lse, *masked_attend_backward(BackwardState(dout, q, k, v, out, lse), mask, scale, prefix=True)]


def naive(tensors: Sequence[Tensor], layout: Layout, selected: Tensor, block_size: int, scale: float) -> list[Tensor]:
    """[out, dq, dk, dv] of attention as one would write it in the inputs' dtype, for its error."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    tokens, group = q.shape[0], q.shape[1] // k.shape[1]
    mask = selected_mask(selected, layout, block_size)(slice(0, tokens), slice(0, tokens))
    keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(~mask, -torch.inf)
    out = (scores.softmax(-1) @ values).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in norm; absolute where nothing is wanted."""
    return (
        ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item() if want.norm() > 0 else got.norm().item()
    )


def assert_results(got: Sequence[Tensor], want: Sequence[Tensor], limit: float = 2e-6) -> None:
    """[out, lse, dq, dk, dv], or the gradients alone, with errors below `limit`."""
    names = ("out", "lse", "dq", "dk", "dv")[-len(want) :]
    for name, a, b in zip(names, got, want, strict=True):
        assert error(a, b.double()) < limit, name


def list_bounds(lists: BlockLists) -> tuple[Tensor, Tensor]:
    """[lists] each: where every list begins and ends."""
    edges = lists.starts[:: lists.chunks]
    return edges[:-1], edges[1:]


def check_lists(selected: Tensor, slots: Tensor, starts: Tensor, kv_heads: int, blocks: int) -> None:
    """Every list holds, in ascending order, exactly the slots that selected its block."""
    from moba_train.attention.kernels.common.lists import BlockLists  # needs Triton

    group = selected.shape[0] // kv_heads
    begin, end = list_bounds(BlockLists.from_tensors(slots, starts, selected, kv_heads, blocks))
    for kv_head in range(kv_heads):
        flat = selected[kv_head * group : (kv_head + 1) * group].transpose(0, 1).flatten()
        for block in range(blocks):
            which = kv_head * blocks + block
            want = (flat == block).nonzero().flatten().to(torch.int32)
            assert torch.equal(slots[begin[which] : end[which]], want), (kv_head, block)


PACKED = [200, 0, 1, 70, 0, 129, 64, 0]


def layout_of(lengths: list[int], device: torch.device | str) -> Layout:
    return packed_layout(lengths, device)
