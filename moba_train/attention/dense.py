"""The kernels behind dense causal attention, fastest first.

Each takes packed documents, grouped-query heads and an external `out` and `lse` in the backward pass, so that partial
results can be merged. Shapes and dtypes are those of `LocalAttention`.
"""

from typing import Protocol

import torch
from torch import Tensor

from moba_train.attention.masked import Mask, masked_attend, masked_attend_backward
from moba_train.attention.protocol import Layout
from moba_train.attention.varlen import Cpu, Gradients, Segments, TorchFlash

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class DenseBackend(Protocol):
    """One implementation; never instantiated."""

    @staticmethod
    def can(q: Tensor, layout: Layout) -> bool:
        """Whether it computes this call."""
        ...

    @staticmethod
    def pays(layout: Layout) -> bool:
        """Whether it is the faster choice for this call, given that it can do it."""
        ...

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ...

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float
    ) -> Gradients:
        """(dq, dk, dv)."""
        ...


class Cudnn:
    """cuDNN's fused attention on equally long documents, as a batch.

    It is built anew for every new shape (tens of milliseconds), which packed documents of any length would not pay.
    """

    @staticmethod
    def can(q: Tensor, layout: Layout) -> bool:
        equal = layout.total == layout.max_seqlen * (layout.cu_seqlens.numel() - 1)
        return q.is_cuda and q.dtype in _HALF and layout.is_whole and equal and q.shape[-1] in (64, 128)

    @staticmethod
    def pays(layout: Layout) -> bool:
        return layout.max_seqlen >= 1024

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
        batch = [_documents_first(x, layout) for x in (q, k, v)]
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(*batch, None, True, 0.0, True, False, scale=scale)
        lse_BHL = lse.view(-1, q.shape[1], layout.max_seqlen)
        return out.transpose(1, 2).reshape(q.shape), lse_BHL.transpose(0, 1).flatten(1)

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float
    ) -> Gradients:
        dout, q_, k_, v_, out = (_documents_first(x, layout) for x in (dout, q, k, v, out))
        lse = lse.unflatten(1, (-1, layout.max_seqlen)).transpose(0, 1).unsqueeze(-1).contiguous()
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout, which there is none of
        longest = layout.max_seqlen
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q_, k_, v_, out, lse, seed, seed, None, None, None, longest, longest, 0.0, True, scale=scale
        )
        return tuple(d.transpose(1, 2).reshape(x.shape) for d, x in ((dq, q), (dk, k), (dv, v)))


def _documents_first(x_THD: Tensor, layout: Layout) -> Tensor:
    """[T, H, D] -> [documents, H, length, D], a view."""
    return x_THD.unflatten(0, (-1, layout.max_seqlen)).transpose(1, 2)


class Flash:
    """FlashAttention-2 as it ships inside torch: documents of any lengths, key/value heads never repeated."""

    @staticmethod
    def can(q: Tensor, layout: Layout) -> bool:
        return layout.is_whole and not TorchFlash.refuses(q)

    @staticmethod
    def pays(layout: Layout) -> bool:
        return True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
        return TorchFlash.forward(q, k, v, _documents(layout), scale)

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float
    ) -> Gradients:
        return TorchFlash.backward(dout, q, k, v, out, lse, _documents(layout), scale, deterministic=False)


class Sdpa:
    """torch's fused CPU kernel, document by document."""

    @staticmethod
    def can(q: Tensor, layout: Layout) -> bool:
        return layout.is_whole and not Cpu.refuses(q)

    @staticmethod
    def pays(layout: Layout) -> bool:
        return True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
        return Cpu.forward(q, k, v, _documents(layout), scale)

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float
    ) -> Gradients:
        return Cpu.backward(dout, q, k, v, out, lse, _documents(layout), scale, deterministic=False)


def _documents(layout: Layout) -> Segments:
    """Every document as a causal segment."""
    return Segments(layout.cu_seqlens, layout.cu_seqlens, layout.max_seqlen, layout.max_seqlen, causal=True)


class Reference:
    """Plain PyTorch: any device, dtype and subset of queries and keys."""

    @staticmethod
    def can(q: Tensor, layout: Layout) -> bool:
        return True

    @staticmethod
    def pays(layout: Layout) -> bool:
        return True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
        return masked_attend(q, k, v, causal_mask(layout), scale, prefix=layout.is_whole)

    @staticmethod
    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float
    ) -> Gradients:
        mask = causal_mask(layout)
        return masked_attend_backward(dout, q, k, v, out, lse, mask, scale, prefix=layout.is_whole)


def causal_mask(layout: Layout) -> Mask:
    """The mask of dense causal attention inside each document: bool [1, rows, keys]."""
    q_tokens, k_tokens, q_documents, k_documents = (
        layout.q_tokens,
        layout.k_tokens,
        layout.q_documents,
        layout.k_documents,
    )

    def mask(rows: slice, keys: slice) -> Tensor:
        causal = k_tokens[None, keys] <= q_tokens[rows, None]
        return (causal & (k_documents[None, keys] == q_documents[rows, None])).unsqueeze(0)

    return mask


BACKENDS: dict[str, type[DenseBackend]] = {"cudnn": Cudnn, "flash": Flash, "sdpa": Sdpa, "reference": Reference}
"""In the order `auto` tries them."""
