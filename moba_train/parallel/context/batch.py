"""A rank's shard of a micro-batch."""

import dataclasses

from moba_train.data.batch import Batch
from moba_train.parallel.context.layout import SequenceLayout


def shard_batch(batch: Batch, sequence: SequenceLayout, rank: int) -> Batch:
    """One rank's rows of a micro-batch, with the layout of the whole packed sequence.

    Positions are those of the tokens, not of the rows. Padding is token 0 at position 0 without loss; it follows the
    tokens, and no token sees it. Every loss token of the batch belongs to exactly one rank.
    """
    rows_n = sequence.local_rows(batch.loss_index, rank)
    here = rows_n >= 0
    return dataclasses.replace(
        batch.with_loss_on(rows_n[here], batch.loss_weight[here]),
        tokens=sequence.shard(batch.tokens, rank),
        labels=sequence.shard(batch.labels, rank),
        positions=sequence.shard(batch.positions, rank),
    )
