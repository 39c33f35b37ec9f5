"""Attention to short blocks of a group, in Triton's interpreter."""

import pytest
import torch

from moba_train.attention.kernels.common.geometry import query_blocks
from moba_train.attention.layout import Layout, TokenRange
from moba_train.attention.protocol import BackwardState
from moba_train.mechanisms.gates.short_blocks import ShortBlocks
from tests.attention.kernel_checks import error, layout_of
from tests.attention.quick_interpreter import quicken

quicken()


def some_blocks(layout: Layout, kv_heads: int, block_size: int, count: int) -> torch.Tensor:
    """Some of each query's history, another number for each query, int32 [K, n, C]."""
    generator = torch.Generator().manual_seed(1)
    own_n, first_n = query_blocks(layout, block_size)
    selected = torch.full((kv_heads, len(own_n), count), -1, dtype=torch.int32)
    for of_group in selected:
        for row, own, first in zip(of_group, own_n.tolist(), first_n.tolist(), strict=True):
            most = int(torch.randint(0, count + 1, (1,), generator=generator))
            chosen = torch.randperm(own - first, generator=generator)[:most].sort().values + first
            row[: len(chosen)] = chosen.int()
    return selected


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "width", "block_size", "count", "dtype", "ranges"),
    [
        ([30, 0, 1, 25], 6, 2, 64, 1, 20, torch.float32, None),
        ([90, 20], 3, 1, 32, 5, 9, torch.float32, ((10, 30), (60, 95))),
        ([80], 2, 2, 64, 16, 5, torch.float16, None),
        ([100], 1, 1, 16, 80, 1, torch.float32, None),
        ([33], 20, 1, 16, 4, 0, torch.float32, None),
    ],
)
def test_kernels_attend_as_plain_pytorch(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    width: int,
    block_size: int,
    count: int,
    dtype: torch.dtype,
    ranges: tuple[tuple[int, int], ...] | None,
) -> None:
    layout = layout_of(lengths, "cpu")
    if ranges:
        layout = layout.part(tuple(TokenRange(*given) for given in ranges), None)
    generator = torch.Generator().manual_seed(0)
    queries = len(layout.q_tokens)
    shapes = (queries, heads), (layout.total, kv_heads), (layout.total, kv_heads), (queries, heads)
    q, k, v, dout = (torch.randn(*shape, width, generator=generator).to(dtype) for shape in shapes)
    selection = (some_blocks(layout, kv_heads, block_size, count),)
    ours, plain = (ShortBlocks(block_size, count, width, name, "backend") for name in ("triton", "reference"))
    results = []
    for attention in (ours, plain):
        out, lse = attention.attend(q, k, v, layout, selection)
        grads = attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)
        results.append([out, lse, *grads])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert error(a, b.double()) < (2e-6 if dtype == torch.float32 else 2e-3), name
