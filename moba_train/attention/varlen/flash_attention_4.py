"""The package flash-attn-4: kernels for Hopper and Blackwell, compiled at the first call (about 15 s each)."""

from typing import ClassVar

import torch
from torch import Tensor

from moba_train.attention.protocol import BackwardState, Gradients
from moba_train.attention.varlen.protocol import Segments, lacks, refuses_other_than_16_bit

_WIDEST_HEAD = {9: 128, 10: 128, 11: 128}
"""The largest head dim, by the major number of the compute capability."""


class FlashAttention4:
    """Written against 4.0.0b18 on compute capability 9.0.

    The package shares its name space with FlashAttention-2 and exists as pre-releases only, so what counts is which
    functions and parameters are there, not the version.
    """

    name: ClassVar[str] = "flash-attn-4"
    most_segments: ClassVar[int] = 2**31 - 1

    @staticmethod
    def refuses(q_NHD: Tensor) -> str:
        """Why this kernel cannot work on tensors like `q`; empty when it can."""
        if reason := refuses_other_than_16_bit(q_NHD, 256):
            return reason
        major, minor = torch.cuda.get_device_capability(q_NHD.device)
        if q_NHD.shape[-1] > _WIDEST_HEAD.get(major, 0):
            return f"head dim {q_NHD.shape[-1]} on compute capability {major}.{minor}"
        return lacks(
            "flash_attn.cute.interface",
            "_flash_attn_fwd",
            "_flash_attn_bwd",
            parameters=("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "softmax_scale"),
        )

    @staticmethod
    def dq_buffers(segments: int, device: torch.device) -> int:
        """Copies of dq in float32 that the deterministic backward pass holds."""
        return 1

    @staticmethod
    def forward(q_NHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """out [N, H, D] and lse [H, N]; the library itself marks rows without keys with (0, -inf)."""
        assert segments.window is None
        from flash_attn.cute.interface import _flash_attn_fwd

        tensors = (x.contiguous() for x in (q_NHD, k_SKD, v_SKD))
        out, lse, *_ = _flash_attn_fwd(*tensors, **segments.named(), softmax_scale=scale, return_lse=True)
        return out, lse

    @staticmethod
    def backward(state: BackwardState, segments: Segments, scale: float, deterministic: bool) -> Gradients:
        """(dq, dk, dv) in the dtypes of q, k and v."""
        from flash_attn.cute.interface import _flash_attn_bwd

        # The order of its sums is open only where a row meets several key tiles (dq) or a key several heads (dk, dv).
        # Fixing it takes a counter for every pair of a segment and a query tile of the longest one: gigabytes for many
        # short blocks, none of which needs it.
        dout, q, k, v, out, lse = state
        key_tile = 128 if q.shape[-1] <= 128 else 64
        open_order = segments.max_k > key_tile or q.shape[1] != k.shape[1]
        dq, dk, dv = _flash_attn_bwd(
            *(x.contiguous() for x in (q, k, v, out, dout, lse)),
            **segments.named(),
            softmax_scale=scale,
            deterministic=deterministic and open_order,
        )
        return dq, dk, dv
