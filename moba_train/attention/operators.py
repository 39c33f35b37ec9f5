"""Attention as torch custom operators: one forward, one backward, whatever runs them.

Whatever the caller's strides, autocast and current device: an attention is given tensors whose last dimension is
contiguous, on the current device, and computes in the dtypes it is given; its results come back contiguous.

torch.compile keeps operators whole, and activation checkpointing can keep their results: a recomputed forward pass then
reuses the saved choice of blocks instead of choosing anew, and repeats no communication (see `SAVED_OPERATORS` and
parallel/fsdp.py).

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from moba_train.attention.clock import on_the_clock
from moba_train.attention.named import Registry
from moba_train.attention.protocol import ATTENTIONS, Layout, LocalAttention, Plan


class OperatorEngine(ABC):
    """Runs a LocalAttention through the operators: on one device (local.py) or on many (parallel/context)."""

    name: str = ""
    """Stands for this object in the arguments of the operators."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        engine = super().__new__(cls)
        engine.name = ENGINES.add(engine, *arguments, options)
        return engine

    def __call__(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Attention of the given queries, differentiable in q, k and v.

        q [T, H, D], k and v [S, K, D] of one floating dtype, K dividing H. Returns out [T, H, D] and lse [H, T]
        (natural log, no gradient), contiguous. No gradient flows through `summarize` and `plan`; second derivatives
        are a NotImplementedError.
        """
        # Flash kernels refuse other strides of the last dimension.
        q_THD, k_SKD, v_SKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_SKD, v_SKD))
        where = (layout.cu_seqlens, layout.cu_seqlens_cpu, layout.max_seqlen, layout.total)
        out_THD, lse_HT, _ = _attention(q_THD, k_SKD, v_SKD, *where, attention.name, self.name)
        return out_THD, lse_HT

    @abstractmethod
    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor, Plan]:
        """(out, lse, plan); the plan is kept for the backward pass."""

    @abstractmethod
    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        plan: Plan,
        attention: LocalAttention,
        layout: Layout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (dq, dk, dv)."""

    @abstractmethod
    def empty_plan(self, q_THD: Tensor, k_SKD: Tensor, attention: LocalAttention, layout: Layout) -> Plan:
        """Tensors of the shapes and dtypes of the plan, contents undefined: for torch.compile's tracing."""


ENGINES: Registry[OperatorEngine] = Registry()

_last_layout: tuple[Layout, int] | None = None


def _layout(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int) -> Layout:
    """The layout of these tensors; the last one again while they are the same and unchanged, with its cache.

    The layers of a model pass the same tensors, so what an attention derives from a layout is derived once a step.
    """
    global _last_layout
    if cu_seqlens.is_inference():  # has no version to tell an edit by
        return Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    if _last_layout is not None:
        last, version = _last_layout
        same = last.cu_seqlens is cu_seqlens and version == cu_seqlens._version
        same = same and last.cu_seqlens_cpu is cu_seqlens_cpu
        if same and (last.max_seqlen, last.total) == (max_seqlen, total):
            return last
    layout = Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    _last_layout = layout, cu_seqlens._version
    return layout


@contextmanager
def _as_the_tensors_are(q: Tensor) -> Iterator[None]:
    """Triton launches on the current device, and autocast would round the float32 products of the references."""
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        yield


@torch.library.custom_op("moba_train::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    attention: str,
    engine: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    with _as_the_tensors_are(q):
        layout = _layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
        out, lse, plan = ENGINES[engine].forward(q, k, v, on_the_clock(ATTENTIONS[attention]), layout)
        return out.contiguous(), lse.contiguous(), list(plan)


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    attention: str,
    engine: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    layout = Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    plan = ENGINES[engine].empty_plan(q, k, ATTENTIONS[attention], layout)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype), list(plan)


@torch.library.custom_op("moba_train::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: list[Tensor],
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    attention: str,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with _as_the_tensors_are(q):
        layout = _layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
        timed = on_the_clock(ATTENTIONS[attention])
        dq, dk, dv = ENGINES[engine].backward(dout, q, k, v, out, lse, tuple(plan), timed, layout)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, cu_seqlens, cu_seqlens_cpu, *rest = inputs
    out, lse, plan = output
    ctx.mark_non_differentiable(lse, *plan)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, cu_seqlens_cpu, *plan)
    ctx.rest = rest
    # Alive until the backward pass, whatever the model has been given since.
    ctx.attention, ctx.engine = ATTENTIONS[rest[-2]], ENGINES[rest[-1]]


def _gradients(ctx: Any, dout: Tensor, *_others: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_seqlens, cu_seqlens_cpu, *plan = ctx.saved_tensors
    where = (cu_seqlens, cu_seqlens_cpu, *ctx.rest)
    grads = _attention_backward(dout.contiguous(), q, k, v, out, lse, list(plan), *where)
    return (*grads, *[None] * len(where))


def _no_second_derivative(ctx: Any, *_grads: Any) -> None:
    raise NotImplementedError("attention: gradients have no second derivative (create_graph=True was given)")


_attention.register_autograd(_gradients, setup_context=_remember)
_attention_backward.register_autograd(_no_second_derivative)

SAVED_OPERATORS = (torch.ops.moba_train.attention.default,)
"""Operators whose results activation checkpointing should keep: attention, with the choice of blocks."""
