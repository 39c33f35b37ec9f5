"""torch operators of functions that take a layout, for kinds that compute by themselves."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.layout import Layout, argument_layout
from moba_train.attention.operators import on_the_device_of


def with_layout(function: Callable[..., Any], *, traced: bool = False) -> Callable[..., Any]:
    """An operator's implementation from a `function` of a tensor first, and with a parameter `layout: Layout`.

    The operator has `layout_arguments` in its place: torch takes tensors, numbers and text only. It runs on the
    tensor's device, without autocast. `traced`: for its fake implementation, which is given the sizes of a layout,
    without the ranges of its queries.
    """
    make_layout = _traced_layout if traced else argument_layout
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    at = list(signature.parameters).index("layout")
    flat = list(inspect.signature(make_layout).parameters.values())

    def flattened(*arguments: Any) -> Any:
        behind = at + len(flat)
        layout = make_layout(*arguments[at:behind])
        # Triton launches on the current device, which in a thread of autograd may be another than the tensors'.
        with nullcontext() if traced else on_the_device_of(arguments[0]):
            return function(*arguments[:at], layout, *arguments[behind:])

    flattened.__doc__ = function.__doc__
    flattened.__signature__ = signature.replace(  # type: ignore[attr-defined]  # as inspect.signature looks it up
        parameters=[*parameters[:at], *flat, *parameters[at + 1 :]]
    )
    return flattened


def _traced_layout(
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int, q_ranges: Sequence[int]
) -> Layout:
    """A layout for sizes alone, while torch.compile traces; its tensors have no contents and must not be kept."""
    return Layout(cu_seqlens, max_seqlen, total)


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
