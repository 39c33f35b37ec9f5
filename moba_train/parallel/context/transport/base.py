"""The interface of a transport, which brings queries and keys of different ranks together, and what is known of a
transport before it exists.

Shape suffixes: L rows of a shard (padding included), n tokens in it, H query heads, K key/value heads, D head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import AttentionFacts, BackwardState, Gradients, LocalAttention, Selection
from moba_train.config.model import ModelConfig
from moba_train.parallel.context.comm import Communicator, Ranks
from moba_train.parallel.context.costs import TransportCost
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy


@dataclass(frozen=True)
class ShardedCall:
    """One attention call over a sequence that is sharded over ranks."""

    attention: LocalAttention
    layout: Layout
    """Layout of the complete packed sequence."""
    sequence: SequenceLayout

    def against_all(self, rank: int) -> Layout:
        """The layout of a rank's queries and the keys of all ranks."""
        return self.against(rank, self.sequence)

    def against(self, rank: int, owners: SequenceLayout) -> Layout:
        """The layout of a rank's queries and the keys of some ranks: `SequenceLayout.select_ranks`."""
        return self.layout.part(self.sequence.ranges_of(rank), owners.all_ranges)


class Transport(ABC):
    """Runs an attention call with one shard of the sequence on each rank.

    q, dout and out are [L, H, D], k and v [L, K, D], lse [H, L]: the rows of this rank's shard. No query attends to
    padding; rows of padding have out = 0, lse = -inf and zero gradients.
    """

    rank: int
    """Index of this rank's shard in the call's sequence."""
    communicator: Communicator
    """Communication among the ranks that `gather` and `sum_shards` are over, unless a transport has its own."""
    of_all_ranks: Communicator | None = None
    """Communication among all ranks of the sequence, if the transport has it: for `AttentionFacts.exchange`."""

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

    def gather(self, x_LHD: Tensor) -> Tensor:
        """The shards of all ranks, [R * L, ...] in rank order, on every rank, by an all-gather; not differentiable."""
        (shards_RL,) = self.communicator.all_gather(x_LHD.contiguous()).wait()
        return shards_RL

    def sum_shards(self, x_RLx: Tensor) -> Tensor:
        """The sum over the ranks, in their order, of their rows for this rank, [L, ...], from [R * L, ...], by an
        all-to-all; not differentiable."""
        (received_RLx,) = self.communicator.all_to_all(x_RLx.contiguous()).wait()
        parts_RLx = received_RLx.unflatten(0, (self.communicator.size, -1))
        # All-to-all and a sum instead of a reduce-scatter: that would add in the dtype that is sent.
        return parts_RLx.sum(0, dtype=accumulation_dtype(x_RLx.dtype)).to(x_RLx.dtype)

    @abstractmethod
    def empty_selection(self, q_LHD: Tensor, k_LKD: Tensor, call: ShardedCall) -> Selection:
        """Tensors shaped like `forward`'s selection, with undefined contents, for tracing by torch.compile."""


class TransportSpec(ABC):
    """Member of the registry `TRANSPORTS`: how a transport is made, what it costs, and what it cannot do."""

    name: ClassVar[str]
    """Name in recipes: `parallel.cp_transport`."""
    uses_slices: ClassVar[bool] = False
    """True if it gathers keys and values in slices of the heads (`CPStrategy.slices`)."""
    has_all_ranks: ClassVar[bool] = False
    """True if its transports have `Transport.of_all_ranks`."""
    needs_nodes: ClassVar[bool] = False
    """True if it needs several nodes, so that nothing can be said while the ranks of a node are not known."""
    not_for_auto: ClassVar[str] = ""
    """Reason why `auto` does not take it; empty if it may."""

    @abstractmethod
    def make(self, strategy: CPStrategy, ranks: Ranks) -> Transport:
        """The transport of a strategy, with all its connections. A collective over the whole world."""

    @abstractmethod
    def cost(self, strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
        """Predicted cost of a layer, for a strategy that passes the checks below."""

    def check_sizes(self, strategy: CPStrategy) -> None:
        """Raises ValueError, naming the YAML key, for a strategy that is impossible with any attention."""
        return None

    def check_attention(self, strategy: CPStrategy, heads: int, kv_heads: int, facts: AttentionFacts) -> None:
        """Raises ValueError, naming the YAML key, if the transport cannot run an attention with these numbers of heads
        on one rank."""
        return None

    def check_shape(self, strategy: CPStrategy, shape: AttentionShape) -> None:
        """Raises ValueError, naming the YAML key, for layers that the transport is not for."""
        self.check_attention(strategy, shape.heads, shape.kv_heads, shape.facts)

    def problems(
        self, kinds: Sequence[AttentionKind], model: ModelConfig, device: str | None, compute: str
    ) -> Iterator[str]:
        """Reasons why the transport cannot run a stage with these kinds of layers, on a device ("cuda" or "cpu", None
        if not known) and in a compute dtype (`precision.compute`). Each is a clause that begins with "which"."""
        return iter(())

    def has_unequal_shards(self, work_grows: bool) -> bool:
        """True if contiguous shards would be unequal work, so that zigzag shards are worth the copy that they cost. By
        default, if a query's work grows with its position."""
        return work_grows

    def is_preferred(self, strategy: CPStrategy, shape: AttentionShape) -> bool:
        """True if `auto` takes it before all transports that are not, whatever they are predicted to cost."""
        return False

    def with_least_memory(self, strategy: CPStrategy, shape: AttentionShape) -> CPStrategy | None:
        """The strategy's variant with the smallest buffers, if nothing fits; None: there is none."""
        return None

    def describe(self, strategy: CPStrategy) -> str:
        """Details of the strategy, for messages."""
        return f", {strategy.slices} slices" if self.uses_slices and strategy.slices > 1 else ""


def padded_lse(lse_Hn: Tensor, rows: int) -> Tensor:
    """[H, n] -> [H, rows]: -inf for the appended queries, which see no key."""
    return F.pad(lse_Hn, (0, rows - lse_Hn.shape[1]), value=-torch.inf)
