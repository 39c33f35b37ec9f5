"""The rows of the tokens before each token of a document: what short convolutions need, in plain PyTorch.

Rows are those of a layout's queries, in ascending ranges of tokens. The rows before each range, its *head*, are given.

Shape suffixes: n rows, r ranges, c rows before (`count`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.protocol import Layout


def shifted(x: Tensor, count: int) -> list[Tensor]:
    """The rows 1, 2, ... `count` before each row of `x` [count + n, ...] but the first `count`: views, [n, ...]."""
    rows = len(x) - count
    return [x[count - distance : count - distance + rows] for distance in range(1, count + 1)]


def previous_rows(x_nx: Tensor, heads_rcx: Tensor, layout: Layout) -> Tensor:
    """Rows of the tokens 1, 2, ... c before each query, [c, n, ...]; zeros where its document has no such token."""
    count = heads_rcx.shape[1]
    out_cnx = x_nx.new_empty((count, *x_nx.shape))
    for head_cx, rows in zip(heads_rcx, _rows_of_ranges(layout), strict=True):
        torch.stack(shifted(torch.cat([head_cx, x_nx[rows]]), count), out=out_cnx[:, rows])
    return out_cnx.masked_fill_(_outside(layout, count, x_nx.dim()), 0)


def previous_rows_backward(grad_cnx: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(gradient of `x` [n, ...], of `heads` [r, c, ...]) of `previous_rows`, summed in float32 or float64."""
    count, tokens, *rest = grad_cnx.shape
    wide = accumulation_dtype(grad_cnx.dtype)
    grad_cnx = grad_cnx.masked_fill(_outside(layout, count, grad_cnx.dim() - 1), 0)
    ranges = list(_rows_of_ranges(layout))
    x_nx = grad_cnx.new_zeros((tokens, *rest), dtype=wide)
    heads_rcx = grad_cnx.new_zeros((len(ranges), count, *rest), dtype=wide)
    for index, rows in enumerate(ranges):
        both_x = x_nx.new_zeros((count + rows.stop - rows.start, *rest))
        for target_x, grad_x in zip(shifted(both_x, count), grad_cnx[:, rows], strict=True):
            target_x += grad_x
        heads_rcx[index], x_nx[rows] = both_x[:count], both_x[count:]
    return x_nx, heads_rcx


def _rows_of_ranges(layout: Layout) -> Iterator[slice]:
    """The rows of each range of the layout's queries."""
    first = 0
    for start, stop in ((0, layout.total),) if layout.q_ranges is None else layout.q_ranges:
        yield slice(first, first + stop - start)
        first += stop - start


def _outside(layout: Layout, count: int, dimensions: int) -> Tensor:
    """bool [c, n, 1, ...]: where a query's document has no token so far before it."""

    def make() -> Tensor:
        distance_c1 = torch.arange(1, count + 1, device=layout.cu_seqlens.device).unsqueeze(1)
        return layout.positions(layout.q_tokens, layout.q_documents) < distance_c1

    outside_cn = layout.cached(("no previous token", count), make)
    return outside_cn.view(*outside_cn.shape, *(1,) * (dimensions - 1))
