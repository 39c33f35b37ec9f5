"""Descriptors of tensors for the bulk copies of kernels in Gluon, which fix the layout in shared memory."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moba_train.attention.kernels.common.call import BlockCall, token_stride

_KINDS: dict[torch.dtype, Any] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


def descriptor(x: Tensor, many: int) -> TensorDescriptor:
    """[rows], [rows, D] or [tokens, heads, D] for bulk copies of `many` rows, of one head."""
    if x.dim() == 1:
        return TensorDescriptor(x, [x.shape[0]], [1], [many], _layout((many,), x.dtype))
    shape, block = [x.shape[0], x.shape[1:].numel()], [many, x.shape[-1]]
    return TensorDescriptor(x, shape, [token_stride(x), 1], block, _layout(tuple(block), x.dtype))


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a tile of shape `block` in shared memory, as bulk copies and the matrix units take it."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _KINDS[dtype])


def descriptors(call: BlockCall, keys: int) -> dict[str, TensorDescriptor]:
    """K and V for bulk copies of [keys, D]; what lies past the end reads as zero."""
    return {"k_desc": descriptor(call.k_SKD, keys), "v_desc": descriptor(call.v_SKD, keys)}
