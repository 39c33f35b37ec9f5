"""The kernels behind full attention, fastest first: varlen kernels and two that are for full attention alone.

calls.py cuts any layout into calls of them.
"""

from typing import ClassVar

import torch
from torch import Tensor

from moba_train.attention.kernels.common.reference import Mask, masked_attend, masked_attend_backward
from moba_train.attention.kernels.varlen import Cpu, FlashAttention4, PackagedFlash2, Segments, TorchFlash, VarlenKernel
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients
from moba_train.torch_private import cudnn_attention, cudnn_attention_backward

_HALF = (torch.float16, torch.bfloat16)


class Cudnn(VarlenKernel):
    """cuDNN's fused attention on one document, or on equally long ones as a batch.

    It is built for every new shape (tens of milliseconds), which does not pay for packed documents of any length.
    Its backward pass is not reproducible, so torch's deterministic algorithms exclude it.
    """

    name: ClassVar[str] = "cuDNN"
    bottom_right: ClassVar[bool] = False
    widths: ClassVar[tuple[int, ...]] = (64, 128)
    """Widths of heads that it takes."""

    @classmethod
    def takes(cls, q: Tensor, layout: Layout) -> bool:
        documents = layout.cu_seqlens.numel() - 1
        equal = documents == 1 or (layout.is_whole and layout.total == layout.max_seqlen * documents)
        usable = q.is_cuda and q.dtype in _HALF and not torch.are_deterministic_algorithms_enabled()
        return usable and equal and q.shape[-1] in cls.widths

    @staticmethod
    def pays(layout: Layout) -> bool:
        ranges = (layout.q_ranges or ()) + (layout.k_ranges or ())  # decoding asks for another shape with every token
        # A plan takes 136 ms to build and is built for every new shape; on ragged offsets cuDNN gave wrong gradients at
        # 8K and faulted at 32K, so it is only asked for equal lengths (benchmarks/LOG.md, "Full attention").
        return min([layout.max_seqlen, *(stop - start for start, stop in ranges)]) >= 1024

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        batch = _documents_first(q, segments.max_q), *(_documents_first(x, segments.max_k) for x in (k, v))
        out, lse, *_ = cudnn_attention(*batch, None, True, 0.0, segments.causal, False, scale=scale)
        lse_BHL = lse.view(-1, q.shape[1], segments.max_q)
        return out.transpose(1, 2).reshape(q.shape), lse_BHL.transpose(0, 1).flatten(1)

    @staticmethod
    def backward(state: BackwardState, segments: Segments, scale: float, deterministic: bool) -> Gradients:
        max_q, max_k = segments.max_q, segments.max_k
        dout, q, out = (_documents_first(x, max_q) for x in (state.dout, state.q, state.out))
        k, v = (_documents_first(x, max_k) for x in (state.k, state.v))
        # A copy: cuDNN wants [documents, H, length, 1] contiguous, other kernels [H, T].
        lse = state.lse.unflatten(1, (-1, max_q)).transpose(0, 1).unsqueeze(-1).contiguous()
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # unused without dropout
        dq, dk, dv = cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, seed, None, None, None, max_q, max_k, 0.0, segments.causal, scale=scale
        )
        pairs = ((dq, state.q), (dk, state.k), (dv, state.v))
        return tuple(grad.transpose(1, 2).reshape(x.shape) for grad, x in pairs)


def _documents_first(x_THD: Tensor, length: int) -> Tensor:
    """[T, H, D] -> [documents, H, length, D], a view."""
    return x_THD.unflatten(0, (-1, length)).transpose(1, 2)


class Reference(VarlenKernel):
    """Plain PyTorch: any device and dtype."""

    name: ClassVar[str] = "plain PyTorch"

    @classmethod
    def takes(cls, q: Tensor, layout: Layout) -> bool:
        return True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        # Then half of the scores is never computed.
        square = segments.causal and q.shape[0] == k.shape[0]
        return masked_attend(q, k, v, _document_mask(segments), scale, prefix=square)

    @staticmethod
    def backward(state: BackwardState, segments: Segments, scale: float, deterministic: bool) -> Gradients:
        square = segments.causal and state.q.shape[0] == state.k.shape[0]
        return masked_attend_backward(state, _document_mask(segments), scale, prefix=square)


def _document_mask(segments: Segments) -> Mask:
    """The mask of `segments`: bool [1, rows, keys]."""

    def mask(rows: slice, keys: slice) -> Tensor:
        q_document, q_left = _places(segments.cu_q, rows)
        k_document, k_left = _places(segments.cu_k, keys)
        same = q_document[:, None] == k_document[None]
        return (same & (q_left[:, None] <= k_left[None]) if segments.causal else same).unsqueeze(0)

    return mask


def _places(edges: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """(document of each row, rows left to the document's end)."""
    row = torch.arange(rows.start, rows.stop, device=edges.device)
    document = torch.searchsorted(edges[1:].long(), row, right=True)
    return document, edges[1:].long()[document] - row


# Both passes in ms at 8K, 32K and 64K: flash-attn-4 3.18, 56.6, 208; cuDNN 3.60, 55.3, 219; FlashAttention-2 6.51,
# 93.8, 372; FlexAttention 5.45, 75.9, 306, which is not among them (benchmarks/results/full-attention-h200.json).
BACKENDS: dict[str, type[VarlenKernel]] = {
    "flash4": FlashAttention4,
    "cudnn": Cudnn,
    "flash": TorchFlash,
    "flash2": PackagedFlash2,
    "sdpa": Cpu,
    "reference": Reference,
}
"""Backends in the order in which `auto` tries them."""
