"""The interface of kernels for attention inside segments, and what such kernels have in common.

A segment is a range of query rows and the range of key rows that they see. Every kernel hands out the log-sum-exp and
takes an `out` and `lse` from outside in the backward pass, so that partial results can be merged (common/merge.py).

Shape suffixes: N query rows, S key rows, H query heads, K key/value heads (K divides H; never repeated), D head width.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moba_train.attention.kernels.table import varlen_problem
from moba_train.attention.layout import Layout
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
    """One implementation; never instantiated. Its row in the table has the same `name`."""

    name: ClassVar[str]
    most_segments: ClassVar[int] = 2**31 - 1
    """The most segments that one call may have."""
    bottom_right: ClassVar[bool] = True
    """True if a causal segment may have more keys than queries; else they are as many in every segment."""

    @classmethod
    def refuses(cls, q_NHD: Tensor) -> str:
        """The reason why the kernel cannot work on tensors like this one (table.py); empty if it can."""
        return varlen_problem(cls.name, q_NHD.device, q_NHD.dtype, q_NHD.shape[-1])

    @classmethod
    def takes(cls, q_NHD: Tensor, layout: Layout) -> bool:
        """True if the kernel computes full attention of these queries."""
        return not cls.refuses(q_NHD)

    @staticmethod
    def pays(layout: Layout) -> bool:
        """True if it is fast enough for full attention of this layout, given that it can do it."""
        return True

    @staticmethod
    def dq_buffers(segments: int, device: torch.device) -> int:
        """Copies of dq in float32 that its deterministic backward pass holds, for one head and this many segments."""
        return 1

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
