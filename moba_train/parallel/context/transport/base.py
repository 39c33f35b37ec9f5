"""The interface of a transport, which brings queries and keys of different ranks together.

Shape suffixes: L rows of a shard (padding included), n tokens in it, H query heads, K key/value heads, D head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.call import AttentionCall
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.parallel.context.comm import Communicator, Ranks
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPStrategy


@dataclass(frozen=True)
class ShardedCall:
    """One attention call over a sequence that is sharded over ranks."""

    unsharded: AttentionCall
    """The call on the layout of the complete packed sequence."""
    sequence: SequenceLayout

    def against_all(self, rank: int) -> AttentionCall:
        """The call for a rank's queries against the keys of all ranks."""
        return self.against(rank, self.sequence)

    def against(self, rank: int, owners: SequenceLayout) -> AttentionCall:
        """The call for a rank's queries against the keys of some ranks: `SequenceLayout.select_ranks`."""
        return self.unsharded.part(self.sequence.ranges_of(rank), owners.all_ranges)


class Transport(ABC):
    """Runs an attention call with one shard of the sequence on each rank.

    q, dout and out are [L, H, D], k and v [L, K, D], lse [H, L]: the rows of this rank's shard. No query attends to
    padding; rows of padding have out = 0, lse = -inf and zero gradients.
    """

    rank: int
    """Index of this rank's shard in the call's sequence."""

    def __repr__(self) -> str:
        """Equal text in all processes: the handle of an engine contains it."""
        return f"{type(self).__name__} of rank {self.rank}"

    @abstractmethod
    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Attention of this rank's queries to the keys of all ranks: (out, lse, selection)."""

    @abstractmethod
    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """Gradients of this rank's shard: (dq, dk, dv). `state` and `selection` hold the results of `forward`."""

    @abstractmethod
    def gather(self, x_LHD: Tensor) -> Tensor:
        """The shards of all ranks, [R * L, ...] in rank order, on every rank; not differentiable."""

    @abstractmethod
    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """The sum over the ranks of their rows for this rank, [L, ...], from [R * L, ...]; not differentiable."""

    @abstractmethod
    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """Tensors shaped like `forward`'s selection, with undefined contents, for tracing by torch.compile."""


MakeTransport = Callable[[CPStrategy, Ranks], Transport]
"""Member of the registry `TRANSPORTS`: the transport of a strategy, with all its connections. A collective over the
whole world."""


def sum_over_ranks(x_RLx: Tensor, communicator: Communicator) -> Tensor:
    """The sum over the ranks of their rows for this rank, [L, ...], by an all-to-all; summed in rank order."""
    (received_RLx,) = communicator.all_to_all(x_RLx.contiguous()).wait()
    parts_RLx = received_RLx.unflatten(0, (communicator.size, -1))
    return parts_RLx.sum(0, dtype=sum_dtype(x_RLx.dtype)).to(x_RLx.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def padded(x: Tensor, rows: int) -> Tensor:
    """`x` with zero rows appended up to `rows` rows; `x` itself if it has as many."""
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def padded_lse(lse_Hn: Tensor, rows: int) -> Tensor:
    """[H, n] -> [H, rows]: -inf for the appended queries, which see no key."""
    return F.pad(lse_Hn, (0, rows - lse_Hn.shape[1]), value=-torch.inf)
