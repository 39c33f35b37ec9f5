"""Largest log-sum-exp of each attention head in a step, which the attention returns in any case: at least the head's
largest logit, and at most that + ln(keys). A bound of what makes training diverge when it grows (Kimi K2,
arXiv:2507.20534, section 2.1)."""

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.model.part import own_layers
from moba_train.model.transformer import Transformer

SUSPECT = 100.0
"""A spike's first suspect is a logit above this, the threshold of Kimi K2."""


class LargestLse:
    """Largest log-sum-exp of the present step, which the training forward passes of `model` note here.

    Layers whose attention is more than one call of an engine, such as `nsa`, have none: -inf.
    """

    def __init__(self, model: Transformer, tp: int, tp_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers = torch.tensor(own_layers(model), device=device)
        self._tp_rank = tp_rank
        shape = len(self._layers), model.config.heads // tp
        self._own = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        self._all = (model.config.layers, tp, shape[1])
        for block, row_H in zip(model.blocks, self._own, strict=True):
            block.attention.largest_lse_H = row_H  # type: ignore[union-attr]  # blocks are modules to mypy

    def begin_step(self) -> None:
        """Forget the step before."""
        self._own.fill_(-torch.inf)

    def over_ranks(self) -> Tensor:
        """Values of all layers and heads over all ranks, [layers, H]. Called on all ranks together."""
        found = self._own.new_full(self._all, -torch.inf)
        found[:, self._tp_rank].index_copy_(0, self._layers, self._own)
        if dist.is_initialized():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.flatten(1)

    def suspect(self) -> str:
        """Phrase about the largest one if it is above `SUSPECT`; else empty. Called on all ranks together."""
        found = self.over_ranks()
        largest = found.max().item()
        if not largest > SUSPECT:
            return ""
        layer, head = divmod(int(found.argmax()), found.shape[1])
        return f"first suspect: attention logits of about {largest:.4g} in layer {layer}, head {head}"
