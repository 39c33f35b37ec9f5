"""Attention to selected blocks in Gluon, the lower level of Triton, in which warps can have roles: for compute
capability 9.0 and the releases of Triton that ../table.py names. Imported only when the table names a file here.

Producer warps copy or gather tiles to shared memory; consumer warpgroups multiply them with wgmma. A stage of shared
memory has two barriers: `full`, on which consumers wait until it is filled, and `empty`, on which the producer waits
until its readers are done. The producer's n-th filling of a stage, counted from 0, waits for n phases of `empty`; the
consumer that reads it waits for n + 1 phases of `full`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moba_train.attention.kernels.common.call import BlockCall, token_stride

_KINDS: dict[torch.dtype, Any] = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}

# Renamed in Triton 3.7 and 3.8.
thread_barrier: Any = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
gather_to_shared: Any = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)
copy_to_shared: Any = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


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
