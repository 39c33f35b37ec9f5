"""Attention as torch custom operators: one forward, one backward, for every engine and every kind.

An engine hands over tensors and two handles (`protocol.OperatorHandles`). The operators find the attention and the
engine by these handles, and control continues in the engine's `forward` or `backward`: in local.py on one device, in
parallel/context/engine.py under context parallelism. An attention is given tensors whose last dimension is contiguous,
on the current device, and computes in their dtypes without autocast; its results come back contiguous.

torch.compile keeps operators whole, and activation checkpointing can keep their results: a recomputed forward pass then
reuses the saved selection instead of selecting anew, and repeats no communication (`SAVED_OPERATORS`,
parallel/fsdp.py).

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from moba_train.attention.call import AttentionCall
from moba_train.attention.observer import AttentionObserver
from moba_train.attention.protocol import (
    ATTENTIONS,
    BackwardState,
    Gradients,
    Layout,
    LocalAttention,
    OperatorHandles,
    Selection,
)

Observer = TypeVar("Observer", bound=AttentionObserver)


class OperatorEngine(ABC):
    """Runs a LocalAttention through the operators: on one device (local.py) or on many (parallel/context)."""

    handle: str = ""
    """Names this object in the arguments of the operators."""
    observers: tuple[AttentionObserver, ...] = ()
    """Who observes the calls of this engine now."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        engine = super().__new__(cls)
        engine.handle = ENGINES.add(engine, *arguments, options)
        return engine

    def __call__(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Attention of the given queries, differentiable in q, k and v.

        q [T, H, D], k and v [S, K, D] of one floating dtype, K dividing H; `layout`: of the whole packed sequence.
        Returns out [T, H, D] and lse [H, T] (natural log, no gradient), contiguous. No gradient flows through
        `summarize` and `select`; second derivatives are a NotImplementedError.
        """
        assert layout.is_whole, "the layout of the whole packed sequence is needed, not that of a part"
        # Flash kernels refuse other strides of the last dimension.
        q_THD, k_SKD, v_SKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_SKD, v_SKD))
        where = (layout.cu_seqlens, layout.cu_seqlens_cpu, layout.max_seqlen, layout.total)
        # Continues in `_attention` below, and from there in this engine's `forward`.
        out_THD, lse_HT, _ = _attention(q_THD, k_SKD, v_SKD, *where, attention.handle, self.handle)
        return out_THD, lse_HT

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[Observer]:
        """Inside, `observer` sees all attention that this engine runs, on any thread of this process."""
        self.observers = (*self.observers, observer)
        try:
            yield observer
        finally:
            self.observers = tuple(other for other in self.observers if other is not observer)

    def call(self, attention: LocalAttention, layout: Layout) -> AttentionCall:
        """A call of `attention` for `forward` and `backward`, seen by this engine's observers."""
        return AttentionCall(attention, layout, self.observers)

    @abstractmethod
    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """(out, lse, selection); the selection is kept for the backward pass. `call` has the whole layout."""

    @abstractmethod
    def backward(self, state: BackwardState, selection: Selection, call: AttentionCall) -> Gradients:
        """Gradients (dq, dk, dv)."""

    @abstractmethod
    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, call: AttentionCall) -> Selection:
        """Tensors of the shapes and dtypes of the selection, contents undefined: for torch.compile's tracing."""


ENGINES: OperatorHandles[OperatorEngine] = OperatorHandles()

_last_layout: tuple[Layout, int] | None = None


def _layout(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int) -> Layout:
    """The layout of these tensors; the previous one again, with its cache, while they are unchanged.

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
def _on_the_tensors_device(q: Tensor) -> Iterator[None]:
    """Inside, q's device is the current one, on which Triton launches, and autocast is off, which would round the
    float32 products of the references."""
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
    with _on_the_tensors_device(q):
        layout = _layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
        running = ENGINES[engine]  # continues in its `forward`: attention/local.py or parallel/context/engine.py
        out, lse, selection = running.forward(q, k, v, running.call(ATTENTIONS[attention], layout))
        return out.contiguous(), lse.contiguous(), list(selection)


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
    # Shapes alone, for torch.compile's tracing: continues in the engine's `empty_selection`, in the same two files.
    selection = ENGINES[engine].empty_selection(q, k, AttentionCall(ATTENTIONS[attention], layout))
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype), list(selection)


@torch.library.custom_op("moba_train::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: list[Tensor],
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    attention: str,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with _on_the_tensors_device(q):
        layout = _layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
        running = ENGINES[engine]  # continues in its `backward`: attention/local.py or parallel/context/engine.py
        call = running.call(ATTENTIONS[attention], layout)
        dq, dk, dv = running.backward(BackwardState(dout, q, k, v, out, lse), tuple(selection), call)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, cu_seqlens, cu_seqlens_cpu, *rest = inputs
    out, lse, selection = output
    ctx.mark_non_differentiable(lse, *selection)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, cu_seqlens_cpu, *selection)
    ctx.rest = rest
    # Kept alive until the backward pass, which finds them by handle; the model may have been given others by then.
    ctx.kept_alive = ATTENTIONS[rest[-2]], ENGINES[rest[-1]]


def _gradients(ctx: Any, dout: Tensor, *_others: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_seqlens, cu_seqlens_cpu, *selection = ctx.saved_tensors
    where = (cu_seqlens, cu_seqlens_cpu, *ctx.rest)  # ends with the handles, by which the operator below goes on
    grads = _attention_backward(dout.contiguous(), q, k, v, out, lse, list(selection), *where)
    return (*grads, *[None] * len(where))


def _no_second_derivative(ctx: Any, *_grads: Any) -> None:
    raise NotImplementedError("attention: gradients have no second derivative (create_graph=True was given)")


_attention.register_autograd(_gradients, setup_context=_save_for_backward)
_attention_backward.register_autograd(_no_second_derivative)

SAVED_OPERATORS = (torch.ops.moba_train.attention.default,)
"""Operators whose results activation checkpointing should keep: attention, with its selection."""
