"""The kernels for attention inside segments.

`Cpu`             torch's fused CPU kernel, called segment by segment: without a GPU, in every dtype
`TorchFlash`      FlashAttention-2 as it ships inside torch
`PackagedFlash2`  FlashAttention-2 as the package flash-attn, with equal kernels
`FlashAttention4` the package flash-attn-4: for Hopper and Blackwell, compiled at the first call (about 15 s each)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from moba_train.attention.kernels.varlen.protocol import Segments, VarlenKernel
from moba_train.attention.protocol import BackwardState, Gradients
from moba_train.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    deterministic_fill,
    flash_attention_backward,
    flash_attention_forward,
    set_deterministic_algorithms,
    set_deterministic_fill,
)


class Cpu(VarlenKernel):
    """Key/value heads are repeated for the queries that share them, for one segment at a time."""

    name: ClassVar[str] = "torch's CPU kernel"
    bottom_right: ClassVar[bool] = False

    @staticmethod
    def forward(q_NHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """out [N, H, D] and lse [H, N]; (0, -inf) for rows without keys."""
        # A window goes to FlashAttention-2 or to the reference (mechanisms/window.py).
        assert segments.window is None
        heads = q_NHD.shape[1]
        out_NHD = torch.zeros(q_NHD.shape, dtype=q_NHD.dtype)
        lse_HN = torch.full((heads, q_NHD.shape[0]), -torch.inf, dtype=torch.promote_types(torch.float32, q_NHD.dtype))
        for rows, keys in _rows_and_keys(segments):
            inputs = (_heads_first(x, heads) for x in (q_NHD[rows], k_SKD[keys], v_SKD[keys]))
            out, lse = cpu_flash_attention(*inputs, 0.0, **_masked(rows, keys, segments.causal, q_NHD), scale=scale)
            out_NHD[rows], lse_HN[:, rows] = out[0].transpose(0, 1), lse.reshape(heads, -1)
        return out_NHD, lse_HN

    @staticmethod
    def backward(state: BackwardState, segments: Segments, scale: float, deterministic: bool) -> Gradients:
        """(dq, dk, dv) in the dtypes of q, k and v; always deterministic."""
        heads, kv_heads = state.q.shape[1], state.k.shape[1]
        dq_NHD, dk_SKD, dv_SKD = (torch.zeros(x.shape, dtype=x.dtype) for x in (state.q, state.k, state.v))
        for rows, keys in _rows_and_keys(segments):
            *inputs, lse_HN = state.part(rows=rows)._replace(k=state.k[keys], v=state.v[keys])
            dq, dk, dv = cpu_flash_attention_backward(
                *(_heads_first(x, heads) for x in inputs),
                lse_HN.unsqueeze(0),
                0.0,
                **_masked(rows, keys, segments.causal, state.q),
                scale=scale,
            )
            dq_NHD[rows] = dq[0].transpose(0, 1)
            for grad_SKD, repeated in ((dk_SKD, dk), (dv_SKD, dv)):
                # A key/value head gathers the gradients of the query heads that share it.
                grad_SKD[keys] = repeated[0].unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
        return dq_NHD, dk_SKD, dv_SKD


def _rows_and_keys(segments: Segments) -> list[tuple[slice, slice]]:
    """(query rows, key rows) of the segments that have both."""
    edges = zip(pairwise(segments.cu_q.tolist()), pairwise(segments.cu_k.tolist()), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in edges if rows[0] < rows[1] and keys[0] < keys[1]]


def _masked(rows: slice, keys: slice, causal: bool, like: Tensor) -> dict[str, Any]:
    """The mask arguments: torch's own causal mask begins at the first key, even with more keys than queries."""
    queries = rows.stop - rows.start
    seen = keys.stop - keys.start
    if not causal or queries == seen:
        return {"is_causal": causal}
    later = torch.full((queries, seen), -torch.inf, dtype=like.dtype).triu_(seen - queries + 1)
    return {"is_causal": False, "attn_mask": later}


def _heads_first(x_NKD: Tensor, heads: int) -> Tensor:
    """[N, K, D] -> [1, H, N, D], key/value heads repeated for the queries that share them."""
    return x_NKD.repeat_interleave(heads // x_NKD.shape[1], dim=1).transpose(0, 1).unsqueeze(0)


# CUDA allows 65,535 blocks of threads in the second dimension of a grid.
_MOST_SEGMENTS = 2**16 - 1
"""The second dimension of a launch."""


def _dq_buffers(segments: int, device: torch.device) -> int:
    """The kernel's programs, as many as fill the GPU, share out a segment's key tiles; each adds to its own buffer."""
    programs: int = torch.cuda.get_device_properties(device).multi_processor_count
    return -(-programs // segments)


class TorchFlash(VarlenKernel):
    """torch's own, through the operators behind its scaled_dot_product_attention."""

    name: ClassVar[str] = "torch's FlashAttention-2"
    most_segments: ClassVar[int] = _MOST_SEGMENTS
    dq_buffers = staticmethod(_dq_buffers)

    @staticmethod
    def forward(q_NHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """out [N, H, D] and lse [H, N]; (0, -inf) for rows without keys."""
        segments = _for_forward(segments)
        out, lse, *_ = flash_attention_forward(
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
        # The operator wants the random state of its dropout, which is 0 here.
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=state.q.device)
        with _deterministic_algorithms(deterministic):
            dq, dk, dv = flash_attention_backward(
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


class PackagedFlash2(VarlenKernel):
    """The package flash-attn from 2.7 on, for builds of torch that come without FlashAttention-2."""

    name: ClassVar[str] = "flash-attn 2"
    most_segments: ClassVar[int] = _MOST_SEGMENTS
    dq_buffers = staticmethod(_dq_buffers)

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
    fill = deterministic_fill()
    set_deterministic_algorithms(True, warn_only=False)
    set_deterministic_fill(False)  # the gradients would be filled with NaN first
    try:
        yield
    finally:
        set_deterministic_fill(fill)
        set_deterministic_algorithms(enabled, warn_only=warn_only)


class FlashAttention4(VarlenKernel):
    """Written against 4.0.0b18 on compute capability 9.0."""

    name: ClassVar[str] = "flash-attn-4"

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
