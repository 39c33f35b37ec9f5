"""Attention to single blocks for gathered queries (dispatch/blocks_by_unit.py), against a mask in float64."""

import pytest
import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_ids
from moba_train.attention.kernels.common.reference import masked_attend, masked_attend_backward
from moba_train.attention.layout import Layout, TokenRange, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import BackwardState
from moba_train.mechanisms.dispatch.blocks_by_unit import BlocksByUnit, UnitQueries
from tests.attention.helpers import triple

LENGTHS = [75, 0, 1, 53]
GIVEN = (TokenRange(16, 48), TokenRange(64, 76), TokenRange(92, 129))
"""Complete blocks of 16 tokens, short ones among them."""
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16
QUERIES, SELECTED = 200, 3

on_any_device = pytest.mark.parametrize(
    ("device", "dtype", "bar"),
    [
        pytest.param("cpu", torch.float64, 1e-12, id="cpu"),
        pytest.param("cuda", torch.bfloat16, 2e-2, id="cuda", marks=pytest.mark.gpu),
    ],
)


def units(device: str) -> tuple[BlocksByUnit, Layout, Tensor]:
    """The attention, the layout of the given keys, and the block of each of them."""
    attention = MobaAttention(MobaAttention.Options(block_size=BLOCK, topk=SELECTED + 1), HEAD_DIM)
    layout = packed_layout(LENGTHS, device).part(GIVEN, GIVEN)
    return BlocksByUnit(attention, SELECTED), layout, block_ids(layout.k_tokens, layout.k_documents, layout, BLOCK)


def random(*shape: int, device: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device, dtype)


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], bar: float) -> None:
    for number, (ours, right) in enumerate(zip(got, want, strict=True)):
        error = (ours.double() - right).norm() / right.norm()
        assert error <= bar, f"tensor {number}: relative error {error:.1e}"


@on_any_device
def test_gathered_queries_attend_to_their_blocks(device: str, dtype: torch.dtype, bar: float) -> None:
    attention, layout, block_U = units(device)
    q, dout = (random(QUERIES, HEAD_DIM, device=device, dtype=dtype, seed=i) for i in (0, 1))
    k, v = (random(block_U.numel(), HEAD_DIM, device=device, dtype=dtype, seed=i) for i in (2, 3))
    given = block_U.unique()
    drawn = torch.rand(QUERIES, given.numel(), generator=torch.Generator().manual_seed(4)).argsort(1)[:, :SELECTED]
    units_FC = given[drawn.to(device)].sort(1).values.int()
    units_FC[:50, 1:] = -1
    units_FC[50:90, 2] = -1
    attended_FU = (units_FC[:, :, None] == block_U).any(1)

    exact = triple(x.double().unsqueeze(1) for x in (q, k, v))
    scale = attention.attention.scale
    out, lse = masked_attend(*exact, lambda rows, keys: attended_FU[None, rows, keys], scale, prefix=False)
    state = BackwardState(dout.double().unsqueeze(1), *exact, out, lse)
    grads = masked_attend_backward(state, lambda rows, keys: attended_FU[None, rows, keys], scale, prefix=False)

    queries = UnitQueries(q, units_FC, None)
    got_out, got_lse = attention.attend(queries, k, v, layout)
    assert got_out.dtype == dtype
    assert_close((got_out, got_lse), (out.squeeze(1), lse.squeeze(0)), bar)
    got = attention.attend_backward(queries, (dout, got_out, got_lse), k, v, layout)
    assert got[1].dtype == got[2].dtype == torch.promote_types(dtype, torch.float32)
    assert_close(got, tuple(x.squeeze(1) for x in grads), bar)
    again = attention.attend_backward(queries, (dout, got_out, got_lse), k, v, layout)
    assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


@on_any_device
def test_complete_blocks_attend_to_themselves_causally(device: str, dtype: torch.dtype, bar: float) -> None:
    attention, layout, block_U = units(device)
    tokens = block_U.numel()
    q, dout = (random(tokens, HEADS, HEAD_DIM, device=device, dtype=dtype, seed=i) for i in (0, 1))
    k, v = (random(tokens, KV_HEADS, HEAD_DIM, device=device, dtype=dtype, seed=i) for i in (2, 3))
    row_U = torch.arange(tokens, device=device)
    seen_UU = (block_U[:, None] == block_U) & (row_U[:, None] >= row_U)

    exact = triple(x.double() for x in (q, k, v))
    scale = attention.attention.scale
    out, lse = masked_attend(*exact, lambda rows, keys: seen_UU[None, rows, keys], scale, prefix=False)
    state = BackwardState(dout.double(), *exact, out, lse)
    grads = masked_attend_backward(state, lambda rows, keys: seen_UU[None, rows, keys], scale, prefix=False)

    got = attention.attend_own(q, k, v, layout)
    assert_close(got, (out, lse), bar)
    assert_close(attention.attend_own_backward(BackwardState(dout, q, k, v, *got), layout), grads, bar)


def test_nothing_given_and_no_query_are_no_error() -> None:
    attention, layout, _ = units("cpu")
    nothing = layout.part((), ())
    empty = torch.empty(0, HEADS, HEAD_DIM), torch.empty(0, KV_HEADS, HEAD_DIM), torch.empty(0, KV_HEADS, HEAD_DIM)
    out, lse = attention.attend_own(*empty, nothing)
    assert (out.shape, lse.shape) == ((0, HEADS, HEAD_DIM), (HEADS, 0))
    grads = attention.attend_own_backward(BackwardState(out, *empty, out, lse), nothing)
    assert [x.shape for x in grads] == [x.shape for x in empty]
    queries = UnitQueries(torch.empty(0, HEAD_DIM), torch.empty(0, SELECTED, dtype=torch.int32), None)
    key = torch.empty(0, HEAD_DIM)
    out, lse = attention.attend(queries, key, key, nothing)
    assert (out.shape, lse.shape) == ((0, HEAD_DIM), (0,))
