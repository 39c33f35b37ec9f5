"""Attention as torch custom operators: one forward, one backward, for every engine and every kind.

An engine hands over tensors and two handles (`protocol.OperatorHandles`). The operators find the attention and the
engine by these handles, and control continues in the engine's `forward` or `backward`: in local.py on one device, in
parallel/context/engine.py under context parallelism. An attention is given tensors whose last dimension is contiguous,
on the current device, and computes in their dtypes without autocast; its results come back contiguous.

torch.compile keeps operators whole, and activation checkpointing can keep their results: a recomputed forward pass then
reuses the saved selection instead of selecting anew, and repeats no communication (`SAVED_OPERATORS`,
parallel/fsdp.py). Where nothing of the kind is at work, the functions behind the operators are called at once.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from moba_train.attention.call import AttentionCall
from moba_train.attention.observer import AttentionObserver
from moba_train.attention.previous import previous_rows, previous_rows_backward
from moba_train.attention.protocol import (
    ATTENTIONS,
    BackwardState,
    Gradients,
    Layout,
    LocalAttention,
    OperatorHandles,
    Selection,
    TokenRange,
    constructed,
)
from moba_train.attention.shard import Shard
from moba_train.torch_private import current_dispatch_mode, tensor_version

Observer = TypeVar("Observer", bound=AttentionObserver)


class OperatorEngine(ABC):
    """Runs a LocalAttention through the operators: on one device (local.py) or on many (parallel/context)."""

    handle: str = ""
    """Names this object in the arguments of the operators."""
    _settings: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
    observers: tuple[AttentionObserver, ...] = ()
    """Who observes the calls of this engine now."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        engine = super().__new__(cls)
        engine.handle = ENGINES.add(engine, *arguments, options)
        engine._settings = arguments, options
        return engine

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is constructed anew: it needs a handle of its own."""
        return constructed, (type(self), *self._settings)

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
        # Continues in `_attend` below, and from there in this engine's `forward`.
        return _differentiable(q_THD, k_SKD, v_SKD, None, *where, None, attention.handle, self.handle)

    def attend_part(
        self,
        q_nHD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        attention: LocalAttention,
        layout: Layout,
        selected_HnC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of the layout's queries, at least one, to all keys of the sequence, on this device alone.

        Differentiable and observed as `__call__`; `selected_HnC`: see `Shard.attend`.
        """
        q_nHD, k_TKD, v_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_nHD, k_TKD, v_TKD))
        where = layout_arguments(layout)
        return _differentiable(q_nHD, k_TKD, v_TKD, selected_HnC, *where, attention.handle, self.handle)

    @abstractmethod
    def shard(self, layout: Layout) -> Shard:
        """What this engine gives a layer of a packed sequence; `layout`: of the whole sequence."""

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` of all ranks that share a sequence, one after the other, [R * L, ...]; without gradient."""
        return x

    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """The sum over the ranks of what they have for this rank, [L, ...], from [R * L, ...]; without gradient."""
        return x_RLx

    def previous(self, x_nx: Tensor, layout: Layout, count: int) -> Tensor:
        """Rows of the tokens 1, 2, ... `count` before each of this rank's in its document, [count, n, ...], zeros where
        there are none; without gradient. `layout`: of the whole sequence."""
        return previous_rows(x_nx, x_nx.new_zeros((1, count, *x_nx.shape[1:])), layout)

    def previous_backward(self, grad_cnx: Tensor, layout: Layout) -> Tensor:
        """The gradient [n, ...] of `previous`."""
        return previous_rows_backward(grad_cnx, layout)[0]

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


def whole_layout(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int) -> Layout:
    """The layout of these tensors; the previous one again, with its cache, while they are unchanged.

    The layers of a model pass the same tensors, so what an attention derives from a layout is derived once a step.
    """
    global _last_layout
    if cu_seqlens.is_inference():  # has no version to tell an edit by
        return Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    if _last_layout is not None:
        last, version = _last_layout
        same = last.cu_seqlens is cu_seqlens and version == tensor_version(cu_seqlens)
        same = same and last.cu_seqlens_cpu is cu_seqlens_cpu
        if same and (last.max_seqlen, last.total) == (max_seqlen, total):
            return last
    layout = Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    _last_layout = layout, tensor_version(cu_seqlens)
    return layout


def _on_the_tensors_device(q: Tensor) -> AbstractContextManager[object]:
    """Inside, q's device is the current one, on which Triton launches, and autocast is off, which would round the
    float32 products of the references."""
    device = torch.cuda.device_of(q)
    if not torch.is_autocast_enabled(q.device.type):
        return device
    both = ExitStack()
    both.enter_context(device)
    both.enter_context(torch.autocast(q.device.type, enabled=False))
    return both


LayoutArguments = tuple[Tensor, Tensor | None, int, int, list[int]]
"""A layout in the arguments of a torch operator: cu_seqlens, cu_seqlens_cpu, max_seqlen, total, and the token ranges of
its queries as start, stop, start, stop, ..."""


def layout_arguments(layout: Layout) -> LayoutArguments:
    """A shard's layout as arguments of an operator, for kinds with operators of their own."""
    ranges = ((0, layout.total),) if layout.q_ranges is None else layout.q_ranges
    numbers = [token for token_range in ranges for token in token_range]
    return layout.cu_seqlens, layout.cu_seqlens_cpu, layout.max_seqlen, layout.total, numbers


def argument_layout(
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int, q_ranges: Sequence[int]
) -> Layout:
    """The inverse of `layout_arguments`: one object, with its cache, for all layers of a step."""
    return _part(whole_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total), q_ranges)


def _traced_layout(
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int, q_ranges: Sequence[int]
) -> Layout:
    """A layout for sizes alone, while torch.compile traces; its tensors have no contents and must not be kept."""
    return Layout(cu_seqlens, max_seqlen, total)


def with_layout(function: Callable[..., Any], *, traced: bool = False) -> Callable[..., Any]:
    """An operator's implementation from a `function` of a tensor first, and with a parameter `layout: Layout`.

    The operator has the `layout_arguments` in its place: torch takes tensors and numbers only. It runs on the tensor's
    device, without autocast. `traced`: for its fake implementation, which is given the sizes of a layout, without the
    ranges of its queries.
    """
    make_layout = _traced_layout if traced else argument_layout
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    at = list(signature.parameters).index("layout")
    flat = list(inspect.signature(make_layout).parameters.values())

    def flattened(*arguments: Any) -> Any:
        behind = at + len(flat)
        layout = make_layout(*arguments[at:behind])
        with nullcontext() if traced else _on_the_tensors_device(arguments[0]):
            return function(*arguments[:at], layout, *arguments[behind:])

    flattened.__doc__ = function.__doc__
    flattened.__signature__ = signature.replace(  # type: ignore[attr-defined]  # as inspect.signature looks it up
        parameters=[*parameters[:at], *flat, *parameters[at + 1 :]]
    )
    return flattened


@torch.library.custom_op("moba_train::query_positions", mutates_args=())
@with_layout
def query_positions(layout: Layout, queries: int) -> Tensor:
    """int64 [queries]: position of each of the layout's queries in its document, for code that torch.compile traces:
    there, what a layout keeps would make a recomputed layer another one than the first time."""
    return layout.positions(layout.q_tokens, layout.q_documents)


@query_positions.register_fake
@partial(with_layout, traced=True)
def _(layout: Layout, queries: int) -> Tensor:
    return layout.cu_seqlens.new_empty((queries,), dtype=torch.int64)


def _part(layout: Layout, q_ranges: Sequence[int]) -> Layout:
    """The layout of the queries in these ranges, given as start, stop, start, stop, ..., and of all keys."""
    ranges = tuple(TokenRange(*pair) for pair in zip(q_ranges[::2], q_ranges[1::2], strict=True))
    return layout if ranges == (TokenRange(0, layout.total),) else layout.part(ranges, None)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor | None,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    q_ranges: Sequence[int] | None,
    attention: str,
    engine: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The engine's attention to the sequence; with `q_ranges`, that of these queries to all keys, on this device."""
    with _on_the_tensors_device(q):
        layout = whole_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
        running = ENGINES[engine]  # continues in its `forward`: attention/local.py or parallel/context/engine.py
        call = running.call(ATTENTIONS[attention], layout)
        if q_ranges is None:
            out, lse, selection = running.forward(q, k, v, call)
        else:
            call = replace(call, layout=_part(layout, q_ranges))
            if selected is None:
                selection = call.select(q, replace(call, layout=layout).summarize(k))
            else:
                # An operator's result must not be its argument.
                selection = call.given_selection(selected.clone(), q, k)
            out, lse = call.attend(q, k, v, selection)
        for observer in call.observers:
            observer.attended(lse)
        return out.contiguous(), lse.contiguous(), list(selection)


_attention = torch.library.custom_op("moba_train::attention", mutates_args=())(_attend)


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor | None,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    q_ranges: Sequence[int] | None,
    attention: str,
    engine: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    layout = Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    call = AttentionCall(ATTENTIONS[attention], layout)
    # Shapes alone, for torch.compile's tracing: continues in the engine's `empty_selection`, in the same two files.
    if q_ranges is None:
        selection = ENGINES[engine].empty_selection(q, k, call)
    else:
        # Not `_part`: sizes may be symbols, which no cache takes as keys.
        ranges = tuple(TokenRange(*pair) for pair in zip(q_ranges[::2], q_ranges[1::2], strict=True))
        part = replace(layout, q_ranges=ranges, _cache={})
        if selected is None:
            selection = call.attention.empty_selection(q, k, part)
        else:
            selection = call.attention.empty_given_selection(selected, q, k, part)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype), list(selection)


def _attend_backward(
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
    q_ranges: Sequence[int] | None,
    attention: str,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with _on_the_tensors_device(q):
        layout = whole_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
        running = ENGINES[engine]  # continues in its `backward`: attention/local.py or parallel/context/engine.py
        call = running.call(ATTENTIONS[attention], layout)
        state = BackwardState(dout, q, k, v, out, lse)
        if q_ranges is None:
            dq, dk, dv = running.backward(state, tuple(selection), call)
        else:
            dq, dk, dv = replace(call, layout=_part(layout, q_ranges)).attend_backward(state, tuple(selection))
        return dq.contiguous(), dk.contiguous(), dv.contiguous()


_attention_backward = torch.library.custom_op("moba_train::attention_backward", mutates_args=())(_attend_backward)


@_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, _selected, cu_seqlens, cu_seqlens_cpu, *rest = inputs
    out, lse, selection = output
    # Kept alive until the backward pass, which finds them by handle; the model may have been given others by then.
    ctx.kept_alive = ATTENTIONS[rest[-2]], ENGINES[rest[-1]]
    ctx.mark_non_differentiable(lse, *selection)
    ctx.set_materialize_grads(False)  # zeros as large as the selection and its lists
    # Results that do not merge are computed anew.
    ctx.save_for_backward(
        q, k, v, out if ctx.kept_alive[0].merges else None, lse, cu_seqlens, cu_seqlens_cpu, *selection
    )
    ctx.rest = rest


def _gradients(ctx: Any, dout: Tensor | None, *_others: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, cu_seqlens, cu_seqlens_cpu, *selection = ctx.saved_tensors
    where = (cu_seqlens, cu_seqlens_cpu, *ctx.rest)  # ends with the handles, by which the operator below goes on
    # Without a gradient, too, as the other ranks of a sequence may have one.
    dout = torch.zeros_like(q) if dout is None else dout.contiguous()
    out = dout if out is None else out  # which is then ignored: `LocalAttention.merges`
    run = _attention_backward if _is_watched(dout, q, k, v) else _attend_backward
    return (*run(dout, q, k, v, out, lse, list(selection), *where), None, *[None] * len(where))


def no_second_derivative(ctx: Any, *_grads: Any) -> None:
    """A backward pass that refuses to be differentiated."""
    raise NotImplementedError("attention: gradients have no second derivative (create_graph=True was given)")


_attention.register_autograd(_gradients, setup_context=_save_for_backward)
_attention_backward.register_autograd(no_second_derivative)


def _is_watched(*tensors: Tensor) -> bool:
    """Whether these tensors need torch's operators: something sees every operator that runs (a tracer, activation
    checkpointing that keeps results, a second derivative), or is a subclass of Tensor.

    Else the functions behind them run at once: looking an operator up takes the host as long as our Python around it
    (benchmarks/LOG.md).
    """
    seen = torch.is_grad_enabled() or current_dispatch_mode() is not None
    return seen or any(type(x) is not Tensor for x in tensors)


class _Attention(torch.autograd.Function):
    """The operator and its derivative as `register_autograd` has them, for calls that torch.compile does not trace.

    torch's own function around an operator flattens its lists in Python, forward and backward, which takes the host
    0.2 ms (benchmarks/LOG.md). The operator's third result, the selection, is kept but not returned.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        run = _attention if _is_watched(*arguments[:3]) else _attend
        out, lse, selection = run(*arguments)
        _save_for_backward(ctx, arguments, (out, lse, selection))
        return out, lse

    backward = staticmethod(_gradients)


def _differentiable(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of `_attention`, differentiable."""
    if torch.compiler.is_compiling():
        return _attention(*arguments)[:2]
    return cast(tuple[Tensor, Tensor], _Attention.apply(*arguments))


SAVED_OPERATORS = (torch.ops.moba_train.attention.default,)
"""Operators whose results activation checkpointing should keep: attention, with its selection."""
