"""Run a LocalAttention on one device: the engine that context parallelism replaces by its own."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moba_train.attention.protocol import Layout, LocalAttention


class _RunLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        plan = attention.plan(q_THD, attention.summarize(k_SKD, layout), layout)
        out_THD, lse_HT = attention.attend(q_THD, k_SKD, v_SKD, layout, plan)
        ctx.save_for_backward(q_THD, k_SKD, v_SKD, out_THD, lse_HT, *plan)
        ctx.attention, ctx.layout = attention, layout
        ctx.mark_non_differentiable(lse_HT)
        return out_THD, lse_HT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_SKD, v_SKD, out_THD, lse_HT, *plan = ctx.saved_tensors
        dq, dk, dv = ctx.attention.attend_backward(
            dout_THD.contiguous(), q_THD, k_SKD, v_SKD, out_THD, lse_HT, ctx.layout, tuple(plan)
        )
        return dq, dk, dv, None, None


@torch.compiler.disable
def run_local(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Attention of all given queries to all given keys, differentiable in q, k and v.

    q [T, H, D], k and v [S, K, D] of one floating dtype, K dividing H. Returns out [T, H, D] and lse [H, T] (natural
    log, no gradient). No gradient flows through `summarize` and `plan`.
    """
    return _RunLocal.apply(q_THD, k_SKD, v_SKD, attention, layout)
