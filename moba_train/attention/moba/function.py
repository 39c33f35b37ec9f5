"""The public function: MoBA on plain tensors, without a model around it."""

from functools import cache
from itertools import pairwise
from operator import index
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.layout import Layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.config.explain import explain

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    topk: int,
    cu_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    select: Literal["head", "group"] = "head",
    always: tuple[Literal["current", "previous", "first"], ...] = ("current",),
    backend: Literal["auto", "triton", "composed", "reference"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal Mixture of Block Attention over packed documents (Lu et al. 2025, arXiv:2502.13189).

    Each query attends, per head, to its own block (causally) and to the `topk - 1` earlier blocks of its document with
    the largest `q . mean(keys of the block)`; one softmax runs over the union. With `topk` at least the number of
    blocks of every document this is full causal attention. `topk = 1` is the own block only, as in the paper
    (Moonshot's fast code turns it into full attention).

    Under torch.autocast q, k and v are cast, as by `scaled_dot_product_attention`. torch.compile breaks the graph at
    `cu_seqlens`, whose values are read. Not for the transforms of torch.func (grad, vmap, jvp).

    Args:
        q: [T, H, D], float16, bfloat16, float32 or float64, any device.
        k, v: [T, K, D], same dtype and device; K divides H and keys are never repeated in memory. Keys carry RoPE.
        block_size: tokens per block, >= 1. Blocks start at each document's start; the last one may be short.
        topk: blocks per query, the own block included, >= 1.
        cu_seqlens: int32 [docs + 1], document boundaries: first 0, last T, not decreasing. None: one document. For a
            batch [B, S, ...] flatten two dimensions and give `torch.arange(0, (B + 1) * S, S, dtype=torch.int32)`.
        softmax_scale: factor on the scores, positive; default D ** -0.5.
        return_lse: also return the natural log-sum-exp of the scaled scores, [H, T], float32 (float64 for float64
            input), without gradient.
        select: "head" selects per query head, "group" once for the H / K query heads that share a key/value head
            (by the sum of their gates).
        always: blocks selected regardless of their gate, counting towards `topk`: "current" (always so), "previous",
            "first".
        backend: "triton" is kernels for CUDA, float16 or bfloat16, D 64 or 128, block_size a multiple of 16 from 64 to
            16384, topk up to 128; "composed" is varlen flash attention over gathered queries: CUDA, float16 or
            bfloat16, D a multiple of 8 up to 256, any block_size and topk (on the CPU, any dtype: for tests);
            "reference" is plain PyTorch; "auto" takes dense attention where every block is selected, else "triton"
            where it can run (with flash-attn-4, "composed" for blocks of 2048 and more and T * H from 2 ** 21 on), else
            "composed" on CUDA, else "reference".

    Returns:
        out [T, H, D] in q's dtype, differentiable once in q, k and v (no gradient passes the gate); with `return_lse`,
        the pair (out, lse).

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    q, k, v = (_cast_by_autocast(x) for x in (q, k, v))
    _check(q, k, v)
    layout = _documents(q, cu_seqlens)
    options = {"block_size": block_size, "topk": topk, "select": select, "always": always, "backend": backend}
    head_dim = index(q.shape[-1])  # a number, also where torch.compile made the sizes symbolic
    attention = _attention(options, head_dim, softmax_scale)
    out, lse = LOCAL_ENGINE(q, k, v, attention, layout)
    return (out, lse) if return_lse else out


def _cast_by_autocast(x: Tensor) -> Tensor:
    """The tensor in autocast's dtype, if it is on for the device; float64 stays, as by torch's own operators."""
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES[:3] or x.device.type == "meta":
        return x
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@torch.compiler.assume_constant_result
def _attention(options: dict[str, Any], head_dim: int, softmax_scale: float | None) -> MobaAttention:
    """One object for equal settings: operators find it by its handle, and a new handle would be compiled again."""
    try:
        checked = MobaAttention.Options(**options)
    except ValidationError as error:
        raise ValueError("; ".join(explain(error, MobaAttention.Options))) from None
    return _cached(checked, head_dim, softmax_scale)


# Behind `assume_constant_result`, so that torch.compile traces neither the cache nor the constructor.
_cached = cache(MobaAttention)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that `moba_attention` cannot take."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: {type(x).__name__} given, a tensor needed")
        if x.dim() != 3:
            raise ValueError(f"{name}: shape {tuple(x.shape)} given, [tokens, heads, head dim] needed")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name}: dtype {x.dtype} given, one of {', '.join(map(str, _DTYPES))} needed")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: {x.dtype} on {x.device} given, q is {q.dtype} on {q.device}; all must agree")
        if x.shape[0] != q.shape[0] or x.shape[2] != q.shape[2]:
            raise ValueError(f"{name}: shape {tuple(x.shape)} does not fit q's {tuple(q.shape)} in tokens and head dim")
    if k.shape != v.shape:
        raise ValueError(f"v: shape {tuple(v.shape)} given, k has {tuple(k.shape)}; they must agree")
    if q.shape[1] == 0 or q.shape[2] == 0:
        raise ValueError(f"q: shape {tuple(q.shape)} given, at least one head and head dim 1 needed")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: {k.shape[1]} key/value heads do not divide q's {q.shape[1]} heads")


def _documents(q: Tensor, cu_seqlens: Tensor | None) -> Layout:
    """The layout of these document boundaries, which are read here."""
    tokens = q.shape[0]
    if cu_seqlens is None:
        return Layout(torch.tensor([0, tokens], dtype=torch.int32, device=q.device), tokens, tokens)
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens: {type(cu_seqlens).__name__} given, an int32 tensor needed")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens: {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} given, int32 [documents + 1] with at least one "
            "document needed"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens: on {cu_seqlens.device}, q is on {q.device}; they must agree")
    # Waits for the GPU: wrong boundaries from a caller would be read past the end by kernels.
    edges = cu_seqlens.tolist()
    if edges[0] != 0:
        raise ValueError(f"cu_seqlens: starts at {edges[0]}, must start at 0")
    if edges[-1] != tokens:
        raise ValueError(f"cu_seqlens: ends at {edges[-1]}, must end at the number of tokens, {tokens}")
    lengths = [stop - start for start, stop in pairwise(edges)]
    if min(lengths) < 0:
        first = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(
            f"cu_seqlens: {edges[first]} is followed by {edges[first + 1]}; document boundaries must not decrease"
        )
    # The backward pass reads the boundaries again; by then the caller may have refilled the buffer.
    return Layout(cu_seqlens.clone(), max(lengths), tokens)
