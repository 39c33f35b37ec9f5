"""Run a LocalAttention on one device: the engine that context parallelism replaces by its own.

The steps are torch custom operators, so that torch.compile keeps them whole and activation checkpointing can keep their
results: a recomputed forward pass then reuses the saved choice of blocks instead of choosing anew (see
`SAVED_OPERATORS` and parallel/fsdp.py).
"""

from typing import Any

import torch
from torch import Tensor

from moba_train.attention.protocol import ATTENTIONS, Layout, LocalAttention


def run_local(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Attention of all given queries to all given keys, differentiable in q, k and v.

    q [T, H, D], k and v [S, K, D] of one floating dtype, K dividing H. Returns out [T, H, D] and lse [H, T] (natural
    log, no gradient). No gradient flows through `summarize` and `plan`.
    """
    assert layout.is_whole, "parts of a sequence need context parallelism's engine"
    where = (layout.cu_seqlens, layout.max_seqlen, layout.total, attention.name)
    plan = _plan(q_THD.detach(), k_SKD.detach(), *where)
    return _attend(q_THD, k_SKD, v_SKD, plan, *where)


_last_layout: tuple[Layout, int] | None = None


def _layout(cu_seqlens: Tensor, max_seqlen: int, total: int) -> Layout:
    """The layout of these tensors; the last one again while they are the same and unchanged, with its cache.

    The layers of a model pass the same tensors, so what an attention derives from a layout is derived once a step.
    """
    global _last_layout
    if cu_seqlens.is_inference():  # has no version to tell an edit by
        return Layout(cu_seqlens, max_seqlen, total)
    if _last_layout is not None:
        last, version = _last_layout
        same = last.cu_seqlens is cu_seqlens and version == cu_seqlens._version
        if same and (last.max_seqlen, last.total) == (max_seqlen, total):
            return last
    layout = Layout(cu_seqlens, max_seqlen, total)
    _last_layout = layout, cu_seqlens._version
    return layout


@torch.library.custom_op("moba_train::plan", mutates_args=())
def _plan(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    total: int,
    attention: str,
) -> list[Tensor]:
    layout, kind = _layout(cu_seqlens, max_seqlen, total), ATTENTIONS[attention]
    return list(kind.plan(q, kind.summarize(k, layout), layout))


@_plan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    total: int,
    attention: str,
) -> list[Tensor]:
    layout = Layout(cu_seqlens, max_seqlen, total)
    return list(ATTENTIONS[attention].empty_plan(q, k, layout))


@torch.library.custom_op("moba_train::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    cu_seqlens: Tensor,
    max_seqlen: int,
    total: int,
    attention: str,
) -> tuple[Tensor, Tensor]:
    layout = _layout(cu_seqlens, max_seqlen, total)
    return ATTENTIONS[attention].attend(q, k, v, layout, tuple(plan))


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], *where: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


@torch.library.custom_op("moba_train::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: list[Tensor],
    cu_seqlens: Tensor,
    max_seqlen: int,
    total: int,
    attention: str,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _layout(cu_seqlens, max_seqlen, total)
    return ATTENTIONS[attention].attend_backward(dout, q, k, v, out, lse, layout, tuple(plan))


@_attend_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, plan, cu_seqlens, *rest = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, *plan)
    ctx.rest = rest
    ctx.attention = ATTENTIONS[rest[-1]]  # alive until the backward pass, whatever the model has been given since


def _gradients(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_seqlens, *plan = ctx.saved_tensors
    grads = _attend_backward(dout.contiguous(), q, k, v, out, lse, list(plan), cu_seqlens, *ctx.rest)
    return (*grads, [None] * len(plan), *[None] * 4)


_attend.register_autograd(_gradients, setup_context=_remember)

SAVED_OPERATORS = (torch.ops.moba_train.plan.default, torch.ops.moba_train.attend.default)
"""Operators whose results activation checkpointing should keep: the choice of blocks, and attention itself."""
