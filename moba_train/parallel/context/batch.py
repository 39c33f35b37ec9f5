"""A micro-batch cut over the ranks of context parallelism."""

import dataclasses

import torch

from moba_train.data.batch import Batch
from moba_train.parallel.context.layout import SequenceLayout


def shard_batch(batch: Batch, sequence: SequenceLayout, rank: int) -> Batch:
    """One rank's rows of a micro-batch; its layout stays that of the whole packed sequence.

    Positions are those of the tokens, not of the rows. Padding is token 0 at position 0 without loss; it is known by
    its place behind the tokens, and no token sees it. The loss tokens of all ranks together are those of the batch.
    """
    rows_n = sequence.rows_of(batch.loss_index, rank)
    here = rows_n >= 0
    loss_index, loss_weight = rows_n[here], batch.loss_weight[here]
    loss_weight_sum, loss_tokens = float(loss_weight.sum(dtype=torch.float64)), int(loss_weight.count_nonzero())
    if not loss_index.numel():
        loss_index, loss_weight = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return dataclasses.replace(
        batch,
        tokens=sequence.shard(batch.tokens, rank),
        labels=sequence.shard(batch.labels, rank),
        positions=sequence.shard(batch.positions, rank),
        loss_index=loss_index,
        loss_weight=loss_weight,
        loss_weight_sum=loss_weight_sum,
        loss_tokens=loss_tokens,
    )
