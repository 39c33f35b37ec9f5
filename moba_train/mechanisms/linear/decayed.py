"""Linear attention with a constant decay for each head, in plain PyTorch: chunk by chunk, forward and backward.

    S_t = lambda S_{t-1} + silu(k_t)^T v_t,   out_t = silu(q_t) S_t        (per query head; lambda <= 1)

Inside a chunk of tokens this is a masked product like attention without softmax; between chunks the state S is carried
(Qin et al. 2024, arXiv:2401.04658, section 3). Only powers of lambda with exponents >= 0 occur, so nothing overflows. A
state never passes from one segment to the next, wherever chunks and segments begin.

The gradients are sums of the same form: that of silu(q) is linear attention of (dout, v, silu(k)), and, from the last
token to the first, that of silu(k) is the one of (v, dout, silu(q)), and that of v the one of (silu(k), silu(q), dout).
So the backward pass needs q, k and v alone, before silu.

Shape suffixes: n rows, H query heads, K key/value heads, d head width; r rows of a group, m chunks of a group, c rows
of a chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_SIZE = 64
"""Rows of a chunk: a third of the products of 128 x 128 states, which are the larger part."""
CHUNKS_AT_ONCE = 64
"""Chunks of a group, computed together: on a GPU few launches, with 32 heads of 128 about 0.5 GB of float32."""


def decayed_attention(
    q_nHd: Tensor,
    k_nKd: Tensor,
    v_nKd: Tensor,
    log_decay_H: Tensor,
    segments_n: Tensor,
    chunk_size: int = CHUNK_SIZE,
    chunks_at_once: int = CHUNKS_AT_ONCE,
) -> Tensor:
    """Linear attention [n, H, d] of silu(q), silu(k) and v inside each segment, without scale; differentiable.

    Computed in float32, or float64 for float64 inputs, and returned in their dtype. K divides H.
    `log_decay_H`: log lambda of each query head, <= 0. `segments_n`: int64, never descending; rows with equal numbers
    share a state.
    """
    # Autocast would cut the products of states to 16 bits; a state sums over the whole document.
    with torch.autocast(q_nHd.device.type, enabled=False):
        return _decayed_attention(q_nHd, k_nKd, v_nKd, log_decay_H, segments_n, chunk_size, chunks_at_once)


@torch.library.custom_op("moba_train::decayed_attention", mutates_args=())
def _decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, segments: Tensor, chunk_size: int, chunks_at_once: int
) -> Tensor:
    return _Sums(log_decay, segments, chunk_size, chunks_at_once)(_silu(q), _silu(k), _Input(v))


@_decayed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("moba_train::decayed_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segments: Tensor,
    chunk_size: int,
    chunks_at_once: int,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = _Sums(log_decay, segments, chunk_size, chunks_at_once)
    # Nothing of the forward pass but its inputs is saved: see the top of this file.
    dq = sums(_Input(dout), _Input(v), _silu(k))
    dk = sums(_Input(v), _Input(dout), _silu(q), heads=k.shape[1], backwards=True)
    dv = sums(_silu(k), _silu(q), _Input(dout), heads=v.shape[1], backwards=True)
    return torch.ops.aten.silu_backward(dq, q), torch.ops.aten.silu_backward(dk, k), dv


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.chunk_size, ctx.chunks_at_once = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return (*_backward(dout, *ctx.saved_tensors, ctx.chunk_size, ctx.chunks_at_once), None, None, None, None)


_decayed_attention.register_autograd(_gradients, setup_context=_save_for_backward)


class _Input(NamedTuple):
    """A factor of the sums."""

    x_nHd: Tensor
    """Factor of each row, with query heads or key/value heads."""
    silu: bool = False
    """True if silu is still to be applied, to some rows at a time."""


def _silu(x_nHd: Tensor) -> _Input:
    return _Input(x_nHd, silu=True)


class _State(NamedTuple):
    """The state that one group of chunks hands to the next."""

    sums_Hdd: Tensor
    segment: Tensor
    """The segment that the state belongs to, int64 []."""


class _Sums:
    """Sums over earlier rows of one segment: out_i = sum_{j <= i} lambda^(i - j) (q_i . k_j) v_j."""

    def __init__(self, log_decay_H: Tensor, segments_n: Tensor, chunk_size: int, chunks_at_once: int) -> None:
        self.log_decay_H = log_decay_H
        self.segments_n = segments_n
        self.chunk_size = chunk_size
        self.rows = chunk_size * chunks_at_once

    def __call__(self, q: _Input, k: _Input, v: _Input, heads: int | None = None, backwards: bool = False) -> Tensor:
        """The sums of all rows; `backwards`: over later rows instead of earlier ones.

        `heads`: the heads of the result, query heads that share one are added; all query heads if None.
        """
        total = len(v.x_nHd)
        query_heads = len(self.log_decay_H)
        result_nHd = v.x_nHd.new_empty((total, heads or query_heads, v.x_nHd.shape[-1]))
        state: _State | None = None
        for first in range(0, total, self.rows):
            last = min(first + self.rows, total)
            place = slice(total - last, total - first) if backwards else slice(first, last)
            q_rHd, k_rHd, v_rHd = (self._rows(x, place, backwards) for x in (q, k, v))
            segments_r = self.segments_n[place].flip(0) if backwards else self.segments_n[place]
            out_rHd, state = self._group(q_rHd, k_rHd, v_rHd, segments_r, state)
            if heads is not None and heads != query_heads:
                # In float32, before the result is rounded to the dtype of the gradient.
                out_rHd = out_rHd.unflatten(1, (heads, -1)).sum(2)
            result_nHd[place] = out_rHd.flip(0) if backwards else out_rHd
        return result_nHd

    def _rows(self, factor: _Input, place: slice, backwards: bool) -> Tensor:
        """Some rows in the order of summation, for every query head, in float32 or float64."""
        x_rHd = factor.x_nHd[place]
        x_rHd = x_rHd.to(torch.promote_types(x_rHd.dtype, torch.float32))
        x_rHd = F.silu(x_rHd) if factor.silu else x_rHd
        x_rHd = x_rHd.flip(0) if backwards else x_rHd
        return x_rHd.repeat_interleave(len(self.log_decay_H) // x_rHd.shape[1], 1)

    def _group(
        self, q_rHd: Tensor, k_rHd: Tensor, v_rHd: Tensor, segments_r: Tensor, state: _State | None
    ) -> tuple[Tensor, _State]:
        """The sums of a group's rows, and the state behind them."""
        rows = q_rHd.shape[0]
        q_Hmcd, k_Hmcd, v_Hmcd = (self._chunks(x) for x in (q_rHd, k_rHd, v_rHd))
        count, size = q_Hmcd.shape[1:3]
        # The rows that fill up the last chunk are zeros of the last segment.
        last = torch.arange(count * size, device=segments_r.device).clamp(max=rows - 1)
        segments_mc = segments_r[last].view(count, size)
        if state is None:
            zeros = q_Hmcd.new_zeros((q_Hmcd.shape[0], q_Hmcd.shape[-1], v_Hmcd.shape[-1]))
            state = _State(zeros, segments_mc[0, 0])

        steps = torch.arange(size, device=segments_r.device)
        between_cc = steps[:, None] - steps
        unseen_mcc = (segments_mc[:, :, None] != segments_mc[:, None, :]) | (between_cc < 0)
        weights_Hmcc = q_Hmcd @ k_Hmcd.transpose(-1, -2) * self._powers(between_cc.clamp(min=0), q_Hmcd)[:, None]
        out_Hmcd = weights_Hmcc.masked_fill_(unseen_mcc, 0) @ v_Hmcd

        before_Hmdd, state = self._states(k_Hmcd, v_Hmcd, segments_mc, state)
        q_Hmcd = q_Hmcd * self._powers(steps + 1, q_Hmcd)[:, None, :, None]
        goes_on_mc = segments_mc == before_Hmdd.segments_m[:, None]
        out_Hmcd += (q_Hmcd * goes_on_mc[..., None]) @ before_Hmdd.sums_Hmdd
        return out_Hmcd.flatten(1, 2)[:, :rows].transpose(0, 1), state

    def _states(
        self, k_Hmcd: Tensor, v_Hmcd: Tensor, segments_mc: Tensor, state: _State
    ) -> tuple["_StatesBefore", _State]:
        """The states before each chunk and behind the last one."""
        count, size = segments_mc.shape
        steps = torch.arange(size - 1, -1, -1, device=segments_mc.device)
        lasts_m = segments_mc[:, -1]
        kept_mc = segments_mc == lasts_m[:, None]
        k_Hmcd = k_Hmcd * self._powers(steps, k_Hmcd)[:, None, :, None] * kept_mc[..., None]
        added_Hmdd = k_Hmcd.transpose(-1, -2) @ v_Hmcd
        # The same sum again, over chunks instead of rows: the carried state counts as the first one.
        added_Hmdd = torch.cat([state.sums_Hdd[:, None], added_Hmdd], 1)
        segments_m = torch.cat([state.segment[None], lasts_m])
        chunks = torch.arange(count + 1, device=segments_mc.device)
        between_mm = chunks[:, None] - chunks
        unseen_mm = (segments_m[:, None] != segments_m) | (between_mm < 0)
        weights_Hmm = self._powers(size * between_mm.clamp(min=0), k_Hmcd).masked_fill_(unseen_mm, 0)
        # One product for all chunks of a group, not a loop over them: a launch each would leave a GPU waiting for the
        # host.
        sums_Hmdd = (weights_Hmm @ added_Hmdd.flatten(2)).view_as(added_Hmdd)
        behind = _State(sums_Hmdd[:, -1], segments_m[-1])
        return _StatesBefore(sums_Hmdd[:, :-1], segments_m[:-1]), behind

    def _chunks(self, x_rHd: Tensor) -> Tensor:
        """[H, m, c, d], filled up with zeros."""
        missing = -x_rHd.shape[0] % self.chunk_size
        x_Hrd = F.pad(x_rHd.transpose(0, 1), (0, 0, 0, missing))
        return x_Hrd.unflatten(1, (-1, self.chunk_size))

    def _powers(self, exponents: Tensor, like: Tensor) -> Tensor:
        """lambda^exponents of each head, [H, ...]."""
        return torch.exp(self.log_decay_H.view(-1, *[1] * exponents.dim()) * exponents).to(like.dtype)


class _StatesBefore(NamedTuple):
    """The states before the chunks of a group."""

    sums_Hmdd: Tensor
    segments_m: Tensor
    """The segment that each state belongs to."""
