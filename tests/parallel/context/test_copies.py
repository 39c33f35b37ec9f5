"""Copies in large words hold the same bits as torch's own, whatever the strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moba_train.parallel.context.layout import contiguous, copy_into

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits: NaNs of all kinds, infinities and subnormal numbers among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert torch.equal(*(torch.stack([x.flatten()]).view(torch.uint8) for x in (a, b)))


@given(st.data())
def test_a_view_of_any_strides_is_copied_bit_by_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    rows, heads, width = (data.draw(st.integers(1, most)) for most in (5, 6, 40))
    x = any_bits(dtype, rows, heads, width)
    skipped, first = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(0, width - 1))
    view = x[:, skipped:, first:]
    if data.draw(st.booleans()):
        view = view.transpose(*data.draw(st.sampled_from([(0, 1), (1, 2), (0, 2)])))
    copied = contiguous(view)
    assert copied.is_contiguous()
    assert_same_bits(copied, view)

    target = torch.zeros_like(x)[:, skipped:, first:].reshape(view.shape)
    copy_into(target, view)
    assert_same_bits(target, view)
    padded = torch.zeros(*view.shape[:-1], view.shape[-1] + data.draw(st.sampled_from([0, 1, 16])), dtype=dtype)
    copy_into(padded[..., : view.shape[-1]], view)
    assert_same_bits(padded[..., : view.shape[-1]], view)
    assert not padded[..., view.shape[-1] :].any()


def test_other_dtypes_are_converted_as_torch_does() -> None:
    x, target = torch.randn(3, 16), torch.zeros(3, 16, dtype=torch.bfloat16)
    copy_into(target, x)
    assert torch.equal(target, x.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_tensors_are_not_copied(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 8, dtype=dtype)
    assert contiguous(x) is x
