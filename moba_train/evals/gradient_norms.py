"""Statistics of gradient norms by the distance to the loss token that the gradient comes from.

Shape suffixes: L layers, T tokens of a micro-batch, R rows of this rank's shard, B buckets of distance.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.data.batch import Batch

DISTANCES = 24
"""Buckets of distance in tokens: 0, 1, 2, 3-4, 5-8, ..., the last one open (from 2M on)."""
THRESHOLD = 1e-3
"""A token counts as reached when its gradient norm is above this fraction of the mean norm of all context tokens."""


def distance_buckets(batch: Batch) -> Tensor:
    """int64 [T]: the bucket of each token of a whole micro-batch, on the CPU, by its distance to the nearest loss token
    at or after it in its document. 0: it carries loss itself; above 0: it is context; -1: no loss token follows.
    """
    total = len(batch.tokens)
    places_T = torch.arange(total)
    next_T = torch.full((total,), total)
    index_n = batch.loss_index[batch.loss_weight != 0]
    next_T[index_n] = index_n
    next_T = next_T.flip(0).cummin(0).values.flip(0)
    ends_T = batch.layout.cu_seqlens.long()[1:][batch.layout.documents(places_T)]
    edges = torch.tensor([0, *(2**power for power in range(DISTANCES - 2))])
    return torch.where(next_T < ends_T, torch.bucketize(next_T - places_T, edges), -1)


def distance_label(bucket: int) -> str:
    """The distances, in tokens, of a bucket."""
    if bucket < 3:
        return str(bucket)
    low = 2 ** (bucket - 2) + 1
    return f"{low}+" if bucket == DISTANCES - 1 else f"{low}-{2 ** (bucket - 1)}"


@dataclass(frozen=True)
class ObservedGradients:
    """Gradient norms of one sequence, on one rank."""

    norms_LR: Tensor
    """L2 norm of the gradient of each row of each layer's input, float32 or float64."""
    buckets_R: Tensor
    """int64: the bucket of each row's token, -1 for padding too."""

    def by_bucket(self, values_LR: Tensor) -> Tensor:
        """Sums of `values_LR` over the rows of each bucket, float64 [L, B]."""
        members_RB = self.buckets_R[:, None] == torch.arange(DISTANCES, device=self.buckets_R.device)
        return values_LR.double() @ members_RB.double()


@dataclass(frozen=True)
class ReachStatistics:
    """Sums over the tokens of each layer and distance, float64 [L, B] on the CPU, over all sequences and ranks."""

    tokens: Tensor
    norms: Tensor
    """Sums of gradient norms."""
    zeros: Tensor
    """Tokens whose gradient is exactly 0."""
    reached: Tensor
    """Tokens whose gradient norm is above `THRESHOLD` times the mean of all context tokens of the layer."""

    @property
    def reach(self) -> Tensor:
        """Share of the context tokens that are reached, [L]."""
        return self.reached[:, 1:].sum(1) / self.tokens[:, 1:].sum(1)

    @property
    def zero_share(self) -> Tensor:
        """Share of the context tokens whose gradient is exactly 0, [L]."""
        return self.zeros[:, 1:].sum(1) / self.tokens[:, 1:].sum(1)

    @property
    def context_norm(self) -> Tensor:
        """Mean gradient norm of the context tokens over that of the loss tokens, [L]."""
        context = self.norms[:, 1:].sum(1) / self.tokens[:, 1:].sum(1)
        return context / (self.norms[:, 0] / self.tokens[:, 0])

    @property
    def mass(self) -> Tensor:
        """Share of the context's summed gradient norms in each bucket, [L, B]; 0 in bucket 0 and without any norm."""
        context = self.norms.clone()
        context[:, 0] = 0
        return context / context.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def context_thresholds(tokens_LB: Tensor, norms_LB: Tensor) -> Tensor:
    """The norm above which a token counts as reached, [L, 1]."""
    return THRESHOLD * norms_LB[:, 1:].sum(1, keepdim=True) / tokens_LB[:, 1:].sum(1, keepdim=True)
