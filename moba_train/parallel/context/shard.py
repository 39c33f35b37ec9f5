"""One rank's shard of a packed sequence, as a layer's kind sees it (attention/shard.py).

Shape suffixes: L rows of a shard (padding included), n tokens in it, T tokens of the sequence, R ranks.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.operator_shard import OperatorShard, all_ranks
from moba_train.attention.operators import OperatorEngine
from moba_train.attention.protocol import Layout, TokenRanges
from moba_train.parallel.context.layout import SequenceLayout


class RankShard(OperatorShard):
    """The tokens of this rank. Attention runs on this rank alone, over keys that it has gathered."""

    def __init__(self, engine: OperatorEngine, layout: Layout, sequence: SequenceLayout, rank: int) -> None:
        """`layout`: of the whole packed sequence; `sequence`: how it is shared."""
        super().__init__(engine, layout)
        self._sequence = sequence
        self.rank = rank
        self.ranks = sequence.ranks
        self._tokens = sequence.tokens(rank)

    @property
    def layout(self) -> Layout:
        """The layout of this rank's queries and all keys."""
        ranges = self._sequence.ranges[self.rank]
        # torch.compile takes no layer as a whole that adds to a layout's cache; what it traces has operators for all
        # that follows from a layout, so that nothing is derived twice.
        if torch.compiler.is_compiling():
            return replace(self._whole, q_ranges=ranges, _cache={})
        return self._whole.part(ranges, None)

    @property
    def ranges_by_rank(self) -> tuple[TokenRanges, ...]:
        """Tokens of each rank: one range, or two under the zigzag layout, or none."""
        return self._sequence.ranges

    def own(self, x_Lx: Tensor) -> Tensor:
        """The rows before the padding."""
        return x_Lx[: self._tokens]

    def padded(self, x_nx: Tensor) -> Tensor:
        """Zeros appended up to the rows of a shard."""
        missing = self._sequence.rows - self._tokens
        return F.pad(x_nx, (0, 0) * (x_nx.dim() - 1) + (0, missing)) if missing else x_nx

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows of all ranks in the order of the packed sequence, by one all-gather; gradients are sent back to the
        owners, which sum them in float32 or float64."""
        return self._sequence.to_packed(self._all_shards(self.padded(x_nx)))

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` of all ranks, [R, ...], by one all-gather."""
        return self._all_shards(x.unsqueeze(0))

    def _all_shards(self, x_Lx: Tensor) -> Tensor:
        return all_ranks(x_Lx, self._sequence.ranks, self._engine.handle)
