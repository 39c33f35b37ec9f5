"""Attention as torch custom operators: one forward, one backward, for every engine and every kind.

The operators are given tensors and two handles (handles.py), find the attention and the engine by these, and control
continues in the attention's functions on one device, or in parallel/context/engine.py across ranks. An attention is
given tensors whose last dimension is contiguous, on the current device, and computes in their dtypes without autocast;
its results come back contiguous.

torch.compile keeps operators whole, and activation checkpointing can keep their results: a recomputed forward pass then
uses the saved selection, as near-ties could fall differently, and repeats no communication (`SAVED_OPERATORS`).

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width, C selected blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from moba_train.attention.handles import by_handle
from moba_train.attention.kernels.common.merge import sink_gradient, with_sink
from moba_train.attention.layout import Layout, argument_layout, paired, whole_layout
from moba_train.attention.observer import observed
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection
from moba_train.torch_private import current_dispatch_mode

_CALL = (
    "Tensor cu_seqlens, Tensor? cu_seqlens_cpu, SymInt max_seqlen, SymInt total, SymInt[]? q_ranges, "
    "str attention, str engine"
)
"""A layout (`layout_arguments`) and two handles. With `q_ranges`, attention of these queries to all keys on this device
alone; without, attention of the whole sequence, across ranks if the engine has several."""


class AcrossRanks(ABC):
    """Facet of an engine: it runs attention over all ranks that share a sequence. `layout` is the whole sequence's."""

    @abstractmethod
    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor, Selection]:
        """(out, lse, selection); the selection is kept for the backward pass."""

    @abstractmethod
    def backward(
        self, state: BackwardState, selection: Selection, attention: LocalAttention, layout: Layout
    ) -> Gradients:
        """Gradients (dq, dk, dv)."""

    @abstractmethod
    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, attention: LocalAttention, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of the selection, contents undefined: for torch.compile's tracing."""


def _attend(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor | None, sink: Tensor | None, *call: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out, lse, selection)."""
    *layout, q_ranges, attention_handle, engine_handle = call
    engine = by_handle(engine_handle)
    local: Any = observed(by_handle(attention_handle), engine.observers)
    whole = whole_layout(*layout)
    q, k, v = _rows_side_by_side(q, k, v)
    with on_the_device_of(q):
        if q_ranges is None and isinstance(engine, AcrossRanks):
            # Continues in parallel/context/engine.py.
            out, lse, selection = engine.forward(q, k, v, local, whole)
            return *with_sink(out.contiguous(), lse.contiguous(), sink), list(selection)
        part = whole if q_ranges is None else argument_layout(*call[:5])
        if selected is None:
            selection = local.select(q, local.summarize(k, whole), part)
        else:
            selection = local.given_selection(selected.clone(), q, k, part)  # a result must be no argument
        # Continues in the attention: attention/block_sparse.py, attention/full/full_kind.py.
        out, lse = local.attend(q, k, v, part, selection)
        return *with_sink(out.contiguous(), lse.contiguous(), sink), list(selection)


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: list[Tensor], *call: Any
) -> tuple[Tensor, ...]:
    """(dq, dk, dv)."""
    *layout, q_ranges, attention_handle, engine_handle = call
    engine = by_handle(engine_handle)
    local = observed(by_handle(attention_handle), engine.observers)
    state = BackwardState(dout, *_rows_side_by_side(q, k, v), out, lse)
    part = whole_layout(*layout) if q_ranges is None else argument_layout(*call[:5])
    with on_the_device_of(q):
        if q_ranges is None and isinstance(engine, AcrossRanks):
            # Continues in parallel/context/engine.py.
            gradients = engine.backward(state, tuple(selection), local, part)
        else:
            gradients = local.attend_backward(state, part, tuple(selection))
        return tuple(x.contiguous() for x in gradients)


def on_the_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Inside, x's device is the current one, on which Triton launches, and autocast is off, which would round the
    float32 products of the references."""
    device = torch.cuda.device_of(x)
    if not torch.is_autocast_enabled(x.device.type):
        return device
    both = ExitStack()
    both.enter_context(device)
    both.enter_context(torch.autocast(x.device.type, enabled=False))
    return both


def _rows_side_by_side(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with a contiguous last dimension, as flash kernels need them."""
    if q.stride(2) == k.stride(2) == v.stride(2) == 1:
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


_operator = torch.library.custom_op(
    "moba_train::attention",
    _attend,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? selected, Tensor? sink, {_CALL}) -> (Tensor, Tensor, Tensor[])",
)
_backward_operator = torch.library.custom_op(
    "moba_train::attention_backward",
    _attend_backward,
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] selection, "
    f"{_CALL}) -> (Tensor, Tensor, Tensor)",
)


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    _selected, _sink, cu_seqlens, cu_seqlens_cpu, max_seqlen, total, q_ranges, *handles = call
    layout = Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    local, engine = map(by_handle, handles)
    # Shapes alone, for torch.compile's tracing.
    if q_ranges is None and isinstance(engine, AcrossRanks):
        selection = engine.empty_selection(q, k, local, layout)
    else:  # not `Layout.part`: sizes may be symbols, which no cache takes as keys
        part = layout if q_ranges is None else replace(layout, q_ranges=paired(q_ranges))
        selection = local.empty_selection(q, k, part)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse, list(selection)


@_backward_operator.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, _selected, sink, cu_seqlens, cu_seqlens_cpu, *ctx.rest = inputs
    out, lse, selection = output
    # Kept alive until the backward pass, which finds them by handle; the model may have been given others by then.
    ctx.kept_alive = [by_handle(handle) for handle in ctx.rest[-2:]]
    ctx.mark_non_differentiable(lse, *selection)
    ctx.set_materialize_grads(False)  # zeros as large as the selection and its lists
    kept = out if ctx.kept_alive[0].facts.merges else None  # results that do not merge are computed again
    ctx.save_for_backward(q, k, v, kept, lse, sink, cu_seqlens, cu_seqlens_cpu, *selection)


def _gradients(ctx: Any, dout: Tensor | None, *_others: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, sink, cu_seqlens, cu_seqlens_cpu, *selection = ctx.saved_tensors
    call = (cu_seqlens, cu_seqlens_cpu, *ctx.rest)
    # A rank without a gradient also goes on, as the other ranks of its sequence may have one.
    dout = torch.zeros_like(q) if dout is None else dout.contiguous()
    out = dout if out is None else out  # which is then ignored: `AttentionFacts.merges`
    run = _backward_operator if _is_watched(dout, q, k, v) else _attend_backward
    others = None, sink_gradient(dout, out, lse, sink), *[None] * len(call)
    return *run(dout, q, k, v, out, lse, selection, *call), *others


def no_second_derivative(ctx: Any, *_grads: Any) -> None:
    """A backward pass that refuses to be differentiated."""
    raise NotImplementedError("attention: gradients have no second derivative (create_graph=True was given)")


_operator.register_autograd(_gradients, setup_context=_save_for_backward)
_backward_operator.register_autograd(no_second_derivative)


def _is_watched(*tensors: Tensor) -> bool:
    """True if something sees every operator that runs (a tracer, activation checkpointing that keeps results, a second
    derivative), or a tensor is of a subclass. Else the functions behind the operators run at once: looking an operator
    up takes the host as long as our Python around it (benchmarks/LOG.md)."""
    seen = torch.is_grad_enabled() or current_dispatch_mode() is not None
    return seen or any(type(x) is not Tensor for x in tensors)


class _Attention(torch.autograd.Function):
    """The operator and its derivative as `register_autograd` has them, for calls that torch.compile does not trace:
    torch's own function around an operator flattens its lists in Python, forward and backward, which takes the host
    0.2 ms (benchmarks/LOG.md). The operator's third result, the selection, is kept but not returned."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        run = _operator if _is_watched(*arguments[:3]) else _attend
        out, lse, selection = run(*arguments)
        _save_for_backward(ctx, arguments, (out, lse, selection))
        return out, lse

    backward = staticmethod(_gradients)


def attention_operator() -> Callable[..., Any]:
    """The function to call: (q, k, v, selected, sink, *call) -> (out [T, H, D], lse [H, T], ...), with `_CALL`'s rest.
    `lse` alone is not differentiable. `selected`: int32 [H, T, C] if the attention takes it, `sink` [H], or None."""
    return _operator if torch.compiler.is_compiling() else cast(Callable[..., Any], _Attention.apply)


SAVED_OPERATORS = (torch.ops.moba_train.attention.default,)
"""Operators whose results activation checkpointing should keep: attention, with its selection."""
