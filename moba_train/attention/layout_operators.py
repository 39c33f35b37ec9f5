"""A layout in the arguments of torch operators, which take tensors, numbers and text only."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor

from moba_train.attention.layout import Layout, TokenRange, TokenRanges
from moba_train.torch_private import tensor_version

LayoutArguments = tuple[Tensor, Tensor | None, int, int, list[int]]
"""cu_seqlens, cu_seqlens_cpu, max_seqlen, total, and the token ranges of the queries: start, stop, start, stop, ..."""

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


def layout_arguments(layout: Layout) -> LayoutArguments:
    """A shard's layout as arguments of an operator."""
    numbers = [token for token_range in layout.query_ranges for token in token_range]
    return layout.cu_seqlens, layout.cu_seqlens_cpu, layout.max_seqlen, layout.total, numbers


def argument_layout(
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int, q_ranges: Sequence[int]
) -> Layout:
    """The inverse of `layout_arguments`: one object, with its cache, for all layers of a step."""
    layout = whole_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
    ranges = paired(q_ranges)
    return layout if ranges == (TokenRange(0, total),) else layout.part(ranges, None)


def paired(q_ranges: Sequence[int]) -> TokenRanges:
    """Ranges from start, stop, start, stop, ..."""
    return tuple(TokenRange(*pair) for pair in zip(q_ranges[::2], q_ranges[1::2], strict=True))


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
