"""Access to the queries, keys and values that layers attend with, on one device or over all ranks that share them."""

from collections.abc import Sequence

from torch import Tensor

from moba_train.attention.layout import Layout
from moba_train.attention.shard import padded
from moba_train.parallel.data_shard import DataShard


def gathered(
    q_LHD: Tensor, keys: Sequence[Tensor], tokens_n: Tensor, layout: Layout, shard: DataShard
) -> tuple[Tensor, list[Tensor]] | None:
    """Queries of `tokens_n`, [n, H, D], and `keys` (tensors with one row a token) of the whole sequence.

    None on all but the first of the ranks that share a sequence, which call it together.
    """
    if shard.engine is None:
        return q_LHD[tokens_n], list(keys)
    q_nHD = shard.engine.gather_tokens(q_LHD, tokens_n, layout.total)
    whole = [shard.engine.gather(x, layout.total) for x in keys]
    return None if shard.engine.rank else (q_nHD, whole)


def gathered_rows(x_nx: Tensor, tokens_n: Tensor, layout: Layout, shard: DataShard) -> Tensor:
    """Rows of `tokens_n` of a tensor that has one for each token of this rank's shard, without padding.

    Equal on all ranks that share a sequence, which call it together.
    """
    if shard.engine is None:
        return x_nx[tokens_n]
    rows = shard.engine.sequence(layout.total).rows
    return shard.engine.gather_tokens(padded(x_nx, rows), tokens_n, layout.total)
