"""QK-clip of MuonClip (Kimi K2, arXiv:2507.20534, section 2.1 and Algorithm 1): heads whose attention logits have grown
beyond a threshold get smaller query and key projections, behind the update, whatever the gradients say.

The largest logit of a head is bounded by its largest log-sum-exp, which the attention has computed in any case
(`parallel.largest_lse`): no kernel does more, and only one all-reduce of a number for each head is added to a step. The
bound exceeds the logit by at most ln(keys), 12 at 128K, so a head may be clipped a little early, never late.

The logits of a head h are scaled by tau / its bound. With a key head for each query head both projections are scaled by
the square root of it. A key head that several query heads share stays as it is, as MuonClip leaves the shared key of
MLA: the query head then takes all of the factor.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moba_train.attention.registry import KINDS
from moba_train.config.attention import merge_attention, resolve_layers
from moba_train.model.part import own_layers
from moba_train.model.transformer import Transformer
from moba_train.optim.gradients import local_part
from moba_train.torch_private import local_shape_and_offset


def clip_problems(config: Any) -> Iterator[str]:
    """Recipes whose logits cannot be clipped, or bounded."""
    threshold = config.optim.options_of("muon").qk_clip
    key = f"optim.muon.qk_clip: given {threshold:g}"
    if threshold <= (least := math.log(max(stage.seq_len for stage in config.stages))):
        yield f"{key}, which equal logits near 0 exceed by max_lse; allowed: above ln(seq_len), {least:.1f}, or null"
    if config.model.qk_norm:
        yield f"{key} with model.qk_norm, whose norms bound the logits; allowed: null"
    if config.adapters.given is not None:
        yield f"{key} with adapters, whose base stays as it is; allowed: null"
    for index, stage in enumerate(config.stages):
        attention = resolve_layers(merge_attention(config.attention, stage.attention), config.model.layers)
        if others := sorted({layer.kind for layer in attention if not KINDS[layer.kind].facts.takes_sink}):
            given = f"{key} with attention kind {others[0]!r} in stages[{index}]"
            yield f"{given}, whose logits are not known; allowed: kinds of one softmax, such as full, moba and window"


@torch.no_grad()
def clip(model: Transformer, largest_lH: Tensor, threshold: float) -> None:
    """Scale queries and keys of each head so that its logits are at most `threshold`, in place.

    largest_lH: bounds of the logits of all layers and heads of the whole model, [layers, H]
    """
    heads, kv_heads = model.config.heads, model.config.kv_heads
    factors_lH = torch.where(largest_lH > threshold, threshold / largest_lH, 1.0)
    shared = heads != kv_heads
    own_lH = factors_lH if shared else factors_lH.sqrt()
    for layer, block in zip(own_layers(model), model.blocks, strict=True):
        attention: Any = block.attention
        for projection in (attention.q_proj,) if shared else (attention.q_proj, attention.k_proj):
            rows = own_lH[layer].repeat_interleave(attention.head_dim)
            for parameter in projection.parameters():
                if parameter.requires_grad:
                    _scale_rows(parameter, rows)


def _scale_rows(parameter: Tensor, factors_n: Tensor) -> None:
    """Multiply each row of a matrix or vector, of which this rank may have a part, by its factor."""
    if isinstance(parameter, DTensor):
        (rows, *_), (first, *_) = local_shape_and_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        factors_n = factors_n[first : first + rows]
    part = local_part(parameter)
    part.mul_(factors_n.to(part.dtype).view(-1, *[1] * (part.dim() - 1)))
