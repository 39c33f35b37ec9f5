"""What every transport is: a way to bring queries and keys of different ranks together.

Shape suffixes: L rows of a shard (padding included), n tokens in it, H query heads, K key/value heads, D head width.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.call import AttentionCall
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.parallel.context.layout import SequenceLayout


@dataclass(frozen=True)
class ShardedCall:
    """One attention call over a sequence that is cut over ranks."""

    whole: AttentionCall
    """The call on the layout of the whole packed sequence."""
    sequence: SequenceLayout

    def against_all(self, rank: int) -> AttentionCall:
        """The call for a rank's queries against the keys of all ranks."""
        return self.whole.part(self.sequence.place(rank), self.sequence.together)

    def against(self, rank: int, owner: int) -> AttentionCall:
        """The call for a rank's queries against the keys of the rank `owner`."""
        return self.whole.part(self.sequence.place(rank), self.sequence.place(owner))


class Transport(ABC):
    """Runs an attention call with one shard of the sequence on each rank.

    q, dout and out are [L, H, D], k and v [L, K, D], lse [H, L]: the rows of this rank's shard. Padding is never
    attended to; its queries give out = 0, lse = -inf and its gradients are 0.
    """

    rank: int
    """This rank's shard in the call's sequence."""

    def __repr__(self) -> str:
        """Equal text in all processes: the handle of an engine contains it."""
        return f"{type(self).__name__} of rank {self.rank}"

    @abstractmethod
    def forward(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """(out, lse, selection)."""

    @abstractmethod
    def backward(self, state: BackwardState, selection: Selection, call: ShardedCall) -> Gradients:
        """(dq, dk, dv)."""

    @abstractmethod
    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """Tensors of the shapes and dtypes of the selection, contents undefined."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that partial results of `dtype` are added up in."""
    return torch.promote_types(dtype, torch.float32)


def padded(x: Tensor, rows: int) -> Tensor:
    """Zeros behind `x` up to `rows` rows; `x` itself where it has them."""
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def padded_lse(lse_Hn: Tensor, rows: int) -> Tensor:
    """[H, n] -> [H, rows]: queries behind have seen nothing."""
    return F.pad(lse_Hn, (0, rows - lse_Hn.shape[1]), value=-torch.inf)
