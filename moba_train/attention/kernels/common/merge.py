"""Partial attention results joined by online softmax.

Attention over the union of two disjoint sets of keys follows from the results over each set: weights are
`exp(lse_i - lse)` with `lse = log(exp(lse_a) + exp(lse_b))` (Milakov & Gimelshein 2018, arXiv:1805.02867).
"""

import torch
from torch import Tensor


def merge(out_a_THD: Tensor, lse_a_HT: Tensor, out_b_THD: Tensor, lse_b_HT: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the attention over each.

    `lse` is the natural log-sum-exp, in float32 or float64; -inf marks a row that saw no key, and the result of two
    such rows is (0, -inf), never NaN. Returns (out, lse) in the dtypes of the first argument pair.
    """
    lse_HT, weight_a_TH1, weight_b_TH1 = _weights(lse_a_HT, lse_b_HT)
    return (out_a_THD * weight_a_TH1 + out_b_THD * weight_b_TH1).to(out_a_THD.dtype), lse_HT


def merge_into(out_THD: Tensor, lse_HT: Tensor, partial_THD: Tensor, partial_lse_HT: Tensor) -> None:
    """`merge` in place, into `out` (any float dtype) and `lse` (float32 or float64)."""
    merged_HT, weight_TH1, partial_weight_TH1 = _weights(lse_HT, partial_lse_HT)
    # In place: around a ring a temporary of the size of `out` would be written and read again for every chunk.
    if out_THD.dtype == lse_HT.dtype:
        out_THD.mul_(weight_TH1).addcmul_(partial_THD, partial_weight_TH1)
    else:  # one temporary, so that a narrow `out` is rounded once
        torch.addcmul(partial_THD * partial_weight_TH1, out_THD, weight_TH1, out=out_THD)
    lse_HT.copy_(merged_HT)


def nothing_seen(q_THD: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries that see no keys: zeros and -inf, with which merging changes nothing."""
    dtype = torch.promote_types(torch.float32, q_THD.dtype)
    lse_HT = torch.full((q_THD.shape[1], q_THD.shape[0]), -torch.inf, dtype=dtype, device=q_THD.device)
    return torch.zeros_like(q_THD), lse_HT


def with_sink(out_THD: Tensor, lse_HT: Tensor, sink_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a softmax that a logit of each head has joined, without a value.

    A sink is merged as the keys of another shard are. A backward pass is given merged results in any case, so that no
    kernel and no transport knows of it.
    """
    if sink_H is None:
        return out_THD, lse_HT
    with_HT = torch.logaddexp(lse_HT, sink_H.to(lse_HT.dtype)[:, None])
    return (out_THD * (lse_HT - with_HT).exp().T.unsqueeze(-1)).to(out_THD.dtype), with_HT


def sink_gradient(dout_THD: Tensor, out_THD: Tensor, lse_HT: Tensor, sink_H: Tensor | None) -> Tensor | None:
    """Gradient of the sink's logits [H], from the results of `with_sink`: the sum over queries of minus its probability
    times the product of output and its gradient. None without a sink."""
    if sink_H is None:
        return None
    products_HT = (dout_THD.to(lse_HT.dtype) * out_THD).sum(-1).T
    return -((sink_H.to(lse_HT.dtype)[:, None] - lse_HT).exp() * products_HT).sum(1).to(sink_H.dtype)


def _weights(lse_a_HT: Tensor, lse_b_HT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, weight of a [T, H, 1], weight of b) of the union of a and b."""
    lse_HT = torch.logaddexp(lse_a_HT, lse_b_HT)
    # -inf - -inf is NaN: where nothing was seen at all, any finite stand-in gives both sides the weight 0.
    finite_HT = lse_HT.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0)
    weight_a_TH1, weight_b_TH1 = ((side - finite_HT).exp().T.unsqueeze(-1) for side in (lse_a_HT, lse_b_HT))
    return lse_HT, weight_a_TH1, weight_b_TH1
