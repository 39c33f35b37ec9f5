"""Dense causal attention over packed documents.

Backends: `flash` is the FlashAttention-2 kernel that ships inside torch (variable lengths, GQA without repeating keys;
CUDA, 16-bit dtypes); `sdpa` runs torch's fused CPU kernel document by document; `reference` takes any device, dtype and
subset of keys. `auto` takes the fastest that can do the call.
"""

from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.masked import Mask, masked_attend, masked_attend_backward
from moba_train.attention.protocol import Layout, LocalAttention, Plan
from moba_train.config.base import Section

_aten = torch.ops.aten


class FullAttention(LocalAttention):
    """Every query attends to all earlier tokens of its document and to itself."""

    class Options(Section):
        """Options of `kind: full`."""

        backend: Literal["auto", "flash", "sdpa", "reference"] = Field(
            "auto", description="flash: FlashAttention-2 on CUDA; sdpa: fused CPU kernel; reference: plain PyTorch"
        )

    alignment = 1

    def __init__(self, options: Section, head_dim: int) -> None:
        assert isinstance(options, FullAttention.Options)
        self.options = options
        self.scale = head_dim**-0.5

    def summarize(self, k_SKD: Tensor, layout: Layout) -> None:
        """Dense attention needs to know nothing beforehand."""
        return None

    def plan(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Plan:
        """Nothing to choose."""
        return ()

    def empty_plan(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Plan:
        """Nothing."""
        return ()

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, plan: Plan) -> tuple[Tensor, Tensor]:
        """See `LocalAttention.attend`."""
        match self._backend(q_THD, layout):
            case "flash":
                return _flash_forward(q_THD, k_SKD, v_SKD, layout, self.scale)
            case "sdpa":
                return _sdpa_forward(q_THD, k_SKD, v_SKD, layout, self.scale)
        mask = causal_mask(layout)
        return masked_attend(q_THD, k_SKD, v_SKD, mask, self.scale, prefix=layout.is_whole)

    def attend_backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        layout: Layout,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LocalAttention.attend_backward`."""
        tensors = (dout_THD, q_THD, k_SKD, v_SKD, out_THD, lse_HT)
        match self._backend(q_THD, layout):
            case "flash":
                return _flash_backward(*tensors, layout, self.scale)
            case "sdpa":
                return _sdpa_backward(*tensors, layout, self.scale)
        return masked_attend_backward(*tensors, causal_mask(layout), self.scale, prefix=layout.is_whole)

    def _backend(self, q_THD: Tensor, layout: Layout) -> str:
        """The backend for this call. Raises ValueError when the options demand one that cannot do it."""
        half = q_THD.dtype in (torch.float16, torch.bfloat16)
        able = {
            "flash": q_THD.is_cuda and half and layout.is_whole and q_THD.shape[-1] % 8 == 0 and q_THD.shape[-1] <= 256,
            "sdpa": q_THD.device.type == "cpu" and layout.is_whole,
            "reference": True,
        }
        wanted = self.options.backend
        if wanted == "auto":
            return next(name for name, can in able.items() if can)
        if not able[wanted]:
            raise ValueError(
                f"attention.full.backend: {wanted!r} cannot run head dim {q_THD.shape[-1]}, {q_THD.dtype} on "
                f"{q_THD.device.type}, {'all' if layout.is_whole else 'a part'} of the sequence; usable here: auto, "
                f"{', '.join(name for name, can in able.items() if can)}"
            )
        return wanted


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


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    cu, longest = layout.cu_seqlens, layout.max_seqlen
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale)
    return out, lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    cu, longest = layout.cu_seqlens, layout.max_seqlen
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _aten._flash_attention_backward(
        dout, q, k, v, out, lse, cu, cu, longest, longest, 0.0, True, no_dropout, no_dropout[:1], scale=scale
    )


def _documents(layout: Layout) -> list[slice]:
    """Row slices of the documents that are not empty (reads `cu_seqlens` on the host)."""
    edges = layout.cu_seqlens.tolist()
    return [slice(start, stop) for start, stop in pairwise(edges) if stop > start]


def _heads_first(x_THD: Tensor, heads: int) -> Tensor:
    """[T, K, D] -> [1, H, T, D], key/value heads repeated for the queries that share them."""
    return x_THD.repeat_interleave(heads // x_THD.shape[1], dim=1).transpose(0, 1).unsqueeze(0)


def _sdpa_forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    out, lse = torch.empty_like(q), torch.empty(heads, q.shape[0], dtype=torch.float32)
    lse = lse.to(torch.promote_types(torch.float32, q.dtype))
    for rows in _documents(layout):
        doc_out, doc_lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(x[rows], heads) for x in (q, k, v)), 0.0, True, scale=scale
        )
        out[rows], lse[:, rows] = doc_out[0].transpose(0, 1), doc_lse.reshape(heads, -1)
    return out, lse


def _sdpa_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = q.shape[1], k.shape[1]
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows in _documents(layout):
        doc_grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(x[rows], heads) for x in (dout, q, k, v, out)),
            lse[:, rows].unsqueeze(0).contiguous(),
            0.0,
            True,
            scale=scale,
        )
        for grad, doc_grad, x in zip(grads, doc_grads, (q, k, v), strict=True):
            # Each key/value head gathers the gradients of the query heads that share it.
            shared = doc_grad[0].transpose(0, 1).unflatten(1, (x.shape[1], heads // x.shape[1]))
            grad[rows] = shared.sum(2) if x.shape[1] == kv_heads != heads else shared.squeeze(2)
    return grads
