"""Probability of full attention, head by head, that a selection, a window or a copy of a single token would need.

Measured on the queries and keys of a layer with full attention, for a sample of queries: which groups of heads would do
with a window, which ones with the best blocks, and which ones copy from far away (the retrieval heads of RTPurbo,
arXiv:2605.16928).

Shape suffixes: n sampled queries, S keys of the sequence, N blocks, H query heads, K key/value heads, G = H / K, D head
width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.observer import AttentionCall, Observer
from moba_train.data.batch import collate
from moba_train.data.samples import Sample
from moba_train.evals.evaluation import EvaluationContext, Layers
from moba_train.mechanisms.probes.probing import gathered
from moba_train.model.build import observed_layers
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.forward import training_loss
from moba_train.parallel.world import sum_over_ranks


class Budget(NamedTuple):
    """Keys that a query may attend to: `topk` blocks, its own included."""

    block_size: int
    topk: int


class Look(NamedTuple):
    """Queries of a sample that are looked at."""

    sample: Sample
    tokens: Sequence[int]
    """Tokens of the sample's first document, by their place in it."""
    sources: Sequence[int]
    """For each of these the token that it should find; empty: not known."""


@torch.no_grad()
def head_reach(
    context: EvaluationContext, attention: Layers, looks: Sequence[Look], budget: Budget
) -> npt.NDArray[np.float64]:
    """Means over the queries, [layers, 3, H]: probability outside the best blocks, which the heads of a group select
    together; outside the first block and a window of as many keys as the other blocks hold; of the token to find.

    `attention`: of every layer meanwhile, full in those that are measured. Called on all ranks together; leaves the
    model with the stage's attention.
    """
    shard = context.data_shard
    config = context.model.config
    scale = config.attention_scale or config.head_width**-0.5
    probes = [_LayerReach(shard, config.heads, scale, budget) for _ in range(config.layers)]
    for _ in replace(context, attentions={"full": attention}).each_attention():
        for index, counts in context.passes(len(looks), "reach of the heads"):
            look = looks[index]
            for probe in probes:
                probe.look = look if counts else look._replace(tokens=[])
            batch = shard.shard_batch(collate([look.sample])).to(context.device)
            with observed_layers(context.model, shard.engine or LOCAL_ENGINE, probes):
                training_loss(context.model, batch)
    summed = sum_over_ranks([value for probe in probes for value in probe.sums.flatten().tolist()])
    sums = np.array(summed).reshape(len(probes), 4, config.heads)
    means: npt.NDArray[np.float64] = sums[:, 1:] / np.maximum(sums[:, :1], 1)
    return means


class _LayerReach(Observer):
    """Sums over queries of one layer: queries, and what `head_reach` gives, float64 [4, H]; 0 for the heads of other
    ranks."""

    def __init__(self, shard: DataShard, heads: int, scale: float, budget: Budget) -> None:
        self._shard = shard
        self._scale = scale
        self._budget = budget
        self.look: Look
        self.sums = torch.zeros(4, heads, dtype=torch.float64)

    def attended(self, call: AttentionCall, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Adds the queries that are looked at; ranks that share the sequence count once."""
        tokens_n = torch.tensor(self.look.tokens, dtype=torch.int64, device=call.q_THD.device)
        found = gathered(call.q_THD, (call.k_SKD,), tokens_n, call.layout, self._shard)
        if found is not None and len(tokens_n):
            q_nHD, (k_SKD,) = found
            heads = q_nHD.shape[1]
            first = self._shard.tp_rank * heads
            self.sums[:, first : first + heads] += self._added(q_nHD, k_SKD, tokens_n).cpu()

    def _added(self, q_nHD: Tensor, k_SKD: Tensor, tokens_n: Tensor) -> Tensor:
        """[4, H] of this rank's heads."""
        size, topk = self._budget
        dtype = accumulation_dtype(q_nHD.dtype)
        count = len(k_SKD)
        blocks = -(-count // size)
        keys_S = torch.arange(count, device=q_nHD.device)
        near_nS = (keys_S > tokens_n[:, None] - (topk - 1) * size) | (keys_S < size)
        own_nN = torch.arange(blocks, device=q_nHD.device) == tokens_n[:, None] // size
        sources_n = torch.tensor(self.look.sources, dtype=torch.int64, device=q_nHD.device)
        by_group = []
        for kv_head, q_nGD in enumerate(q_nHD.to(dtype).chunk(k_SKD.shape[1], 1)):
            scores_GnS = q_nGD.transpose(0, 1) @ k_SKD[:, kv_head].to(dtype).T * self._scale
            p_GnS = scores_GnS.masked_fill(keys_S > tokens_n[:, None], -torch.inf).softmax(-1)
            mass_GnN = F.pad(p_GnS, (0, blocks * size - count)).unflatten(-1, (blocks, size)).sum(-1)
            # The own block is attended to in any case.
            rank_nN = mass_GnN.sum(0).masked_fill(own_nN, torch.inf)
            best_GnC = rank_nN.topk(min(topk, blocks)).indices.expand(len(mass_GnN), -1, -1)
            outside_Gn = 1 - mass_GnN.gather(2, best_GnC).sum(-1)
            window_Gn = 1 - (p_GnS * near_nS).sum(-1)
            found_Gn = torch.zeros_like(window_Gn)
            if len(sources_n):
                found_Gn = p_GnS.gather(2, sources_n[None, :, None].expand(len(p_GnS), -1, 1))[..., 0]
            sums = (torch.ones_like(window_Gn), outside_Gn, window_Gn, found_Gn)
            by_group.append(torch.stack([value_Gn.double().sum(-1) for value_Gn in sums]))
        return torch.cat(by_group, 1)
