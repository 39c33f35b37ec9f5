"""A micro-batch cut over the ranks of context parallelism."""

import dataclasses

from moba_train.data.batch import Batch
from moba_train.parallel.context.layout import SequenceLayout


def shard_batch(batch: Batch, sequence: SequenceLayout, rank: int) -> Batch:
    """One rank's rows of a micro-batch; its layout stays that of the whole packed sequence.

    Positions are those of the tokens, not of the rows. Padding is token 0 at position 0 without loss; it is known by
    its place behind the tokens, and no token sees it. The loss tokens of all ranks together are those of the batch.
    """
    rows_n = sequence.local_rows(batch.loss_index, rank)
    here = rows_n >= 0
    return dataclasses.replace(
        batch.with_loss_on(rows_n[here], batch.loss_weight[here]),
        tokens=sequence.shard(batch.tokens, rank),
        labels=sequence.shard(batch.labels, rank),
        positions=sequence.shard(batch.positions, rank),
    )
