"""The interface of kernels for attention inside segments, and what such kernels have in common.

A segment is a range of query rows and the range of key rows that they see. Every kernel hands out the log-sum-exp and
takes an `out` and `lse` from outside in the backward pass, so that partial results can be merged (attention/merge.py).

Shape suffixes: N query rows, S key rows, H query heads, K key/value heads (K divides H; never repeated), D head width.
"""

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moba_train.attention.protocol import BackwardState, Gradients


@dataclass(frozen=True)
class Segments:
    """The segments of one call: rows `cu_q[i]` to `cu_q[i + 1]` of the queries see rows `cu_k[i]` to `cu_k[i + 1]` of
    the keys. Either range may be empty.
    """

    cu_q: Tensor
    """int32 [segments + 1], ascending. Rows that belong to no segment come back undefined."""
    cu_k: Tensor
    """int32 [segments + 1], ascending, covering all keys."""
    max_q: int
    """An upper bound of a segment's queries, known on the host; exact if there is only one segment."""
    max_k: int
    """An upper bound of a segment's keys, known on the host; exact if there is only one segment."""
    causal: bool
    """The last query of a segment sees all of its keys, the one before all but the last, and so on; otherwise all see
    all. No segment has fewer keys than queries."""
    window: int | None = None
    """A query of causal segments sees at most this many keys, the last ones. FlashAttention-2 alone can do it."""

    def named(self) -> dict[str, Any]:
        """Keyword arguments as the flash-attn packages name them."""
        return {
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": self.cu_k,
            "max_seqlen_q": self.max_q,
            "max_seqlen_k": self.max_k,
            "causal": self.causal,
        }


class VarlenKernel(Protocol):
    """One implementation; never instantiated."""

    name: ClassVar[str]
    most_segments: ClassVar[int]
    """The most segments that one call may have."""

    @staticmethod
    def refuses(q_NHD: Tensor) -> str:
        """Why the kernel cannot work on tensors like this one; empty when it can. Reads no contents."""
        ...

    @staticmethod
    def dq_buffers(segments: int, device: torch.device) -> int:
        """How many times its deterministic backward pass holds dq in float32, for one head and this many segments."""
        ...

    @staticmethod
    def forward(q_NHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """out [N, H, D] in q's dtype and lse [H, N], natural log, float32 (float64 for float64).

        A row of a segment without keys gives (0, -inf), whatever the library below marks it with.
        """
        ...

    @staticmethod
    def backward(state: BackwardState, segments: Segments, scale: float, deterministic: bool) -> Gradients:
        """(dq, dk, dv) in the dtypes of q, k and v; the state's `out` and `lse` may come from more keys than its `k`.

        State: dout, q, out [N, H, D], k, v [S, K, D], lse [H, N]. Keys of a segment without queries get zeros.
        `deterministic`: equal inputs give equal bits; without it, the library or torch's own switch decides.
        """
        ...


def refuses_other_than_16_bit(q_NHD: Tensor, widest: int) -> str:
    """Why a flash kernel refuses the device, dtype or head dim (a multiple of 8 up to `widest`) of q; empty if not."""
    if not q_NHD.is_cuda:
        return f"tensors are on {q_NHD.device.type}, not on CUDA"
    if q_NHD.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {q_NHD.dtype}, bfloat16 or float16 needed"
    if q_NHD.shape[-1] % 8 or q_NHD.shape[-1] > widest:
        return f"head dim {q_NHD.shape[-1]}, a multiple of 8 up to {widest} needed"
    return ""


@cache
def lacks(module: str, *functions: str, parameters: tuple[str, ...] = ()) -> str:
    """Which of these functions, each with these parameters, an optional package lacks; empty when it has all."""
    try:
        for name in functions:
            function = getattr(importlib.import_module(module), name)
            if missing := set(parameters) - inspect.signature(function).parameters.keys():
                return f"{module}.{name} has no parameter {', '.join(sorted(missing))}"
    except Exception as error:  # a broken build raises anything
        return f"{type(error).__name__}: {error}"
    return ""
