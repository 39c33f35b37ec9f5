"""FlashAttention-2: as it ships inside torch, and as the package flash-attn, with equal kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from moba_train.attention.protocol import BackwardState, Gradients
from moba_train.attention.varlen.protocol import Segments, lacks, refuses_other_than_16_bit

_aten = torch.ops.aten

_MOST_SEGMENTS = 2**16 - 1
"""The second dimension of a launch."""


class TorchFlash:
    """torch's own, through the operators behind its scaled_dot_product_attention."""

    name: ClassVar[str] = "torch's FlashAttention-2"
    most_segments: ClassVar[int] = _MOST_SEGMENTS

    @staticmethod
    def refuses(q_NHD: Tensor) -> str:
        """Why this kernel cannot work on tensors like `q`; empty when it can."""
        if reason := _refuses(q_NHD):
            return reason
        return "" if torch.backends.cuda.is_flash_attention_available() else "this build of torch has none"

    @staticmethod
    def dq_buffers(segments: int, device: torch.device) -> int:
        """Copies of dq in float32 that the deterministic backward pass holds."""
        return _dq_buffers(segments, device)

    @staticmethod
    def forward(q_NHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """out [N, H, D] and lse [H, N]; (0, -inf) for rows without keys."""
        segments = _for_forward(segments)
        out, lse, *_ = _aten._flash_attention_forward(
            q_NHD,
            k_SKD,
            v_SKD,
            segments.cu_q,
            segments.cu_k,
            segments.max_q,
            segments.max_k,
            0.0,
            segments.causal,
            False,
            scale=scale,
            **_window(segments),
        )
        return out, _unseen_as_minus_infinity(lse)

    @staticmethod
    def backward(state: BackwardState, segments: Segments, scale: float, deterministic: bool) -> Gradients:
        """(dq, dk, dv) in the dtypes of q, k and v."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=state.q.device)
        with _deterministic_algorithms(deterministic):
            dq, dk, dv = _aten._flash_attention_backward(
                *state._replace(lse=state.lse.contiguous()),
                segments.cu_q,
                segments.cu_k,
                segments.max_q,
                segments.max_k,
                0.0,
                segments.causal,
                no_dropout,
                no_dropout[:1],
                scale=scale,
                **_window(segments),
            )
        return dq, dk, dv


class PackagedFlash2:
    """The package flash-attn from 2.7 on, for builds of torch that come without FlashAttention-2."""

    name: ClassVar[str] = "flash-attn 2"
    most_segments: ClassVar[int] = _MOST_SEGMENTS

    @staticmethod
    def refuses(q_NHD: Tensor) -> str:
        """Why this kernel cannot work on tensors like `q`; empty when it can."""
        # The names with _wrapped came with 2.7, and with them the parameters used below.
        names = "_wrapped_flash_attn_varlen_forward", "_wrapped_flash_attn_varlen_backward"
        return _refuses(q_NHD) or lacks("flash_attn.flash_attn_interface", *names)

    @staticmethod
    def dq_buffers(segments: int, device: torch.device) -> int:
        """Copies of dq in float32 that the deterministic backward pass holds."""
        return _dq_buffers(segments, device)

    @staticmethod
    def forward(q_NHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """out [N, H, D] and lse [H, N]; (0, -inf) for rows without keys."""
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_forward

        out, lse, *_ = _wrapped_flash_attn_varlen_forward(
            q_NHD,
            k_SKD,
            v_SKD,
            **_for_forward(segments).named(),
            **_window(segments),
            dropout_p=0.0,
            softmax_scale=scale,
        )
        return out, _unseen_as_minus_infinity(lse)

    @staticmethod
    def backward(state: BackwardState, segments: Segments, scale: float, deterministic: bool) -> Gradients:
        """(dq, dk, dv) in the dtypes of q, k and v."""
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_backward

        grads = torch.empty_like(state.q), torch.empty_like(state.k), torch.empty_like(state.v)
        _wrapped_flash_attn_varlen_backward(
            *(x.contiguous() for x in state),
            *grads,
            **segments.named(),
            dropout_p=0.0,
            softmax_scale=scale,
            **_window(segments),
            softcap=0.0,
            alibi_slopes=None,
            deterministic=deterministic,
        )
        return grads


def _refuses(q_NHD: Tensor) -> str:
    if reason := refuses_other_than_16_bit(q_NHD, 256):
        return reason
    major, minor = torch.cuda.get_device_capability(q_NHD.device)
    return "" if major >= 8 else f"compute capability {major}.{minor}, 8.0 or newer needed"


def _dq_buffers(segments: int, device: torch.device) -> int:
    """The kernel's programs, as many as fill the GPU, share out a segment's key tiles; each adds to its own buffer."""
    programs: int = torch.cuda.get_device_properties(device).multi_processor_count
    return -(-programs // segments)


def _for_forward(segments: Segments) -> Segments:
    """`segments` with `max_q` at least 2: the kernel takes a bound of 1 for exactly one query in every segment."""
    return replace(segments, max_q=max(2, segments.max_q))


def _window(segments: Segments) -> dict[str, int]:
    """The keys that a query sees before and behind the last one, -1 for all; behind it none in causal segments."""
    if segments.window is None:
        return {"window_size_left": -1, "window_size_right": -1}
    return {"window_size_left": segments.window - 1, "window_size_right": 0}


def _unseen_as_minus_infinity(lse_HN: Tensor) -> Tensor:
    """`lse` with -inf for rows without keys, which the kernel marks with +inf (their out is 0)."""
    return lse_HN.masked_fill_(lse_HN == torch.inf, -torch.inf)


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Inside, torch's own switch is on, which is all that its kernel looks at; left alone if not `wanted`.

    Not through `torch.use_deterministic_algorithms`, which changes the compiler's settings too.
    """
    if not wanted:
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # the gradients would be filled with NaN first
    try:
        yield
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(fill)
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
