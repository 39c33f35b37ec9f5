"""torch's fused CPU kernel, called segment by segment: attention inside segments without a GPU, in every dtype."""

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from moba_train.attention.protocol import BackwardState, Gradients
from moba_train.attention.varlen.protocol import Segments

_aten = torch.ops.aten


class Cpu:
    """Key/value heads are repeated for the queries that share them, for one segment at a time."""

    name: ClassVar[str] = "torch's CPU kernel"
    most_segments: ClassVar[int] = 2**31 - 1

    @staticmethod
    def refuses(q_NHD: Tensor) -> str:
        """Why this kernel cannot work on tensors like `q`; empty when it can."""
        return "" if q_NHD.device.type == "cpu" else f"tensors are on {q_NHD.device.type}, not on the CPU"

    @staticmethod
    def dq_buffers(segments: int, device: torch.device) -> int:
        """Copies of dq in float32 that the deterministic backward pass holds."""
        return 1

    @staticmethod
    def forward(q_NHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """out [N, H, D] and lse [H, N]; (0, -inf) for rows without keys."""
        assert segments.window is None
        heads = q_NHD.shape[1]
        out_NHD = torch.zeros(q_NHD.shape, dtype=q_NHD.dtype)
        lse_HN = torch.full((heads, q_NHD.shape[0]), -torch.inf, dtype=torch.promote_types(torch.float32, q_NHD.dtype))
        for rows, keys in _rows_and_keys(segments):
            inputs = (_heads_first(x, heads) for x in (q_NHD[rows], k_SKD[keys], v_SKD[keys]))
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, **_masked(rows, keys, segments.causal, q_NHD), scale=scale
            )
            out_NHD[rows], lse_HN[:, rows] = out[0].transpose(0, 1), lse.reshape(heads, -1)
        return out_NHD, lse_HN

    @staticmethod
    def backward(state: BackwardState, segments: Segments, scale: float, deterministic: bool) -> Gradients:
        """(dq, dk, dv) in the dtypes of q, k and v; always deterministic."""
        heads, kv_heads = state.q.shape[1], state.k.shape[1]
        dq_NHD, dk_SKD, dv_SKD = (torch.zeros(x.shape, dtype=x.dtype) for x in (state.q, state.k, state.v))
        for rows, keys in _rows_and_keys(segments):
            *inputs, lse_HN = state.with_queries(rows).with_keys(state.k[keys], state.v[keys])
            dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
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
