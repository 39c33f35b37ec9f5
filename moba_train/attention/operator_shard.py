"""The shard that an engine of operators gives a layer (shard.py), and what of it communicates, as torch operators.

As in operators.py, an operator finds the engine by its handle and continues there: on one device there is nothing to
send, under context parallelism parallel/context/engine.py does.

Shape suffixes as in shard.py; c rows before a token.
"""

from typing import Any

import torch
from torch import Tensor

from moba_train.attention.operators import ENGINES, OperatorEngine, no_second_derivative, whole_layout
from moba_train.attention.protocol import Layout, LocalAttention, TokenRange, TokenRanges


class OperatorShard:
    """The shard of one device: the whole packed sequence. Context parallelism overrides what communicates
    (parallel/context/engine.py). A `Shard`."""

    attends_to_all = False
    observer = None
    ranks = 1
    rank = 0
    generates = False

    def __init__(self, engine: OperatorEngine, layout: Layout) -> None:
        """`layout`: of the whole packed sequence."""
        self._engine = engine
        self._whole = layout

    @property
    def layout(self) -> Layout:
        """The layout of the whole sequence."""
        return self._whole

    @property
    def ranges_by_rank(self) -> tuple[TokenRanges, ...]:
        """The whole sequence."""
        return ((TokenRange(0, self.layout.total),),)

    def own(self, x_Lx: Tensor) -> Tensor:
        """All rows."""
        return x_Lx

    def padded(self, x_nx: Tensor) -> Tensor:
        """All rows."""
        return x_nx

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows themselves: they are all there are."""
        return x_nx

    def previous(self, name: str, x_nx: Tensor, count: int) -> list[Tensor]:
        """Rows of the tokens 1, 2, ... `count` before each, by an operator."""
        layout = self._whole
        where = (layout.cu_seqlens, layout.cu_seqlens_cpu, layout.max_seqlen, layout.total)
        # Continues in `_previous` below, and from there in the engine's `previous`.
        return list(_previous(x_nx, *where, count, self._engine.handle).unbind())

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` [R, ...] of the one rank there is."""
        return x.unsqueeze(0)

    def states(self, name: str) -> Tensor | None:
        """None: every sequence is complete."""
        return None

    def keep_states(self, name: str, states_Bx: Tensor) -> None:
        """Refused: no tokens are being generated."""
        raise RuntimeError(f"state {name!r} is to be kept, but no tokens are being generated")

    def attend(
        self, q_nHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, selected_HnC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out [n, H, D], lse [H, n]) by the operators, on this device alone."""
        if not len(q_nHD):  # a rank without tokens; its gradients must reach the others all the same
            return q_nHD + (k_TKD[:0].sum() + v_TKD[:0].sum()), q_nHD.new_empty((q_nHD.shape[1], 0))
        return self._engine.attend_part(q_nHD, k_TKD, v_TKD, attention, self.layout, selected_HnC)


@torch.library.custom_op("moba_train::all_ranks", mutates_args=())
def all_ranks(x: Tensor, ranks: int, engine: str) -> Tensor:
    """`x` [L, ...] of all ranks of an engine, [R * L, ...]; its derivative is `_sum_shards`, and the reverse."""
    return ENGINES[engine].all_ranks(x.contiguous()).clone()


@torch.library.custom_op("moba_train::sum_shards", mutates_args=())
def _sum_shards(x: Tensor, ranks: int, engine: str) -> Tensor:
    return ENGINES[engine].sum_shards(x.contiguous()).clone()


@all_ranks.register_fake
def _(x: Tensor, ranks: int, engine: str) -> Tensor:
    return x.new_empty((ranks * x.shape[0], *x.shape[1:]))


@_sum_shards.register_fake
def _(x: Tensor, ranks: int, engine: str) -> Tensor:
    return x.new_empty((x.shape[0] // ranks, *x.shape[1:]))


def _keep_engine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.ranks, ctx.engine = inputs
    ctx.kept_alive = ENGINES[ctx.engine]


def _sum_of_all(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _sum_shards(grad, ctx.ranks, ctx.engine), None, None


def _all_of_the_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return all_ranks(grad, ctx.ranks, ctx.engine), None, None


all_ranks.register_autograd(_sum_of_all, setup_context=_keep_engine)
_sum_shards.register_autograd(_all_of_the_sum, setup_context=_keep_engine)


@torch.library.custom_op("moba_train::previous", mutates_args=())
def _previous(
    x: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int,
    total: int,
    count: int,
    engine: str,
) -> Tensor:
    """The engine's `previous`; whole in torch.compile, which would trace what is kept with the layout."""
    return ENGINES[engine].previous(x, whole_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total), count)


@torch.library.custom_op("moba_train::previous_backward", mutates_args=())
def _previous_backward(
    grad: Tensor, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int, engine: str
) -> Tensor:
    layout = whole_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
    return ENGINES[engine].previous_backward(grad, layout).to(grad.dtype)


@_previous.register_fake
def _(x: Tensor, cu_seqlens: Tensor, cu_cpu: Tensor | None, max_seqlen: int, total: int, count: int, _: str) -> Tensor:
    return x.new_empty((count, *x.shape))


@_previous_backward.register_fake
def _(grad: Tensor, *_where: Any) -> Tensor:
    return grad.new_empty(grad.shape[1:])


def _keep_where(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cu_seqlens, cu_seqlens_cpu, *ctx.rest, _, ctx.engine = inputs
    ctx.save_for_backward(cu_seqlens, cu_seqlens_cpu)
    ctx.kept_alive = ENGINES[ctx.engine]


def _gradient_of_previous(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (_previous_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rest, ctx.engine), *[None] * 6)


_previous.register_autograd(_gradient_of_previous, setup_context=_keep_where)
_previous_backward.register_autograd(no_second_derivative)
