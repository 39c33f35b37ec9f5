"""The attention engine of a model whose sequence is sharded over ranks."""

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moba_train.attention.operators import OperatorEngine
from moba_train.attention.protocol import Layout, LocalAttention, Plan
from moba_train.parallel.context.checks import check_heads, check_sizes
from moba_train.parallel.context.comm import Communicator, hierarchical_groups
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.base import Job, Transport
from moba_train.parallel.context.transport.ring import Ring
from moba_train.parallel.context.transport.ulysses import Local, Ulysses


class ContextParallel(OperatorEngine):
    """Attention of this rank's queries to the keys of all ranks.

    It takes this rank's shard of q, k and v (`SequenceLayout.shard`: tokens in ascending order, then padding) and the
    layout of the whole packed sequence. Results and selected blocks are those of one device; rows of padding have
    out = 0, lse = -inf. All ranks must call it with the same attention, layout and shapes.
    """

    def __init__(self, strategy: CPStrategy, transport: Transport) -> None:
        """`transport`: implements `strategy`; `context_engine` creates both."""
        self.strategy = strategy
        self.transport = transport

    @property
    def rank(self) -> int:
        """Index of this rank in the context-parallel group, and of its shard."""
        return self.transport.rank

    def sequence(self, total: int) -> SequenceLayout:
        """The layout of a packed sequence of `total` tokens over the ranks."""
        return SequenceLayout.split(total, self.strategy.ranks, self.strategy.layout)

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor, Plan]:
        """See `OperatorEngine.forward`."""
        return self.transport.forward(q_THD, k_SKD, v_SKD, self._job(q_THD, k_SKD, attention, layout))

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        plan: Plan,
        attention: LocalAttention,
        layout: Layout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `OperatorEngine.backward`."""
        job = self._job(q_THD, k_SKD, attention, layout)
        return self.transport.backward(dout_THD, q_THD, k_SKD, v_SKD, out_THD, lse_HT, plan, job)

    def empty_plan(self, q_THD: Tensor, k_SKD: Tensor, attention: LocalAttention, layout: Layout) -> Plan:
        """See `OperatorEngine.empty_plan`."""
        return self.transport.empty_plan(q_THD, k_SKD, self._job(q_THD, k_SKD, attention, layout))

    def _job(self, q_LHD: Tensor, k_LKD: Tensor, attention: LocalAttention, layout: Layout) -> Job:
        """Raises ValueError, before any message, for shapes that the transport cannot do."""
        assert layout.is_whole, "the layout of the whole sequence is needed, not that of a shard"
        sequence = self.sequence(int(layout.total))
        if q_LHD.shape[0] != sequence.rows:
            raise ValueError(
                f"q: {q_LHD.shape[0]} rows given, {sequence.rows} needed: this rank's shard of {layout.total} tokens"
            )
        check_heads(self.strategy, q_LHD.shape[1], k_LKD.shape[1], attention.couples_heads)
        return Job(attention, layout, sequence)


def context_engine(
    strategy: CPStrategy, group: ProcessGroup, device: torch.device, timeout: timedelta | None = None
) -> ContextParallel:
    """Create the engine for the ranks of `group`, in their order, with all its connections.

    Collective over the whole world: every rank calls it with the same strategy and its own group. `timeout`: of the
    groups that it creates. Raises ValueError, naming the YAML key, for an impossible strategy.
    """
    size = group.size()
    if size != strategy.ranks:
        raise ValueError(f"parallel.cp: {strategy.ranks} given, the group has {size} ranks")
    check_sizes(strategy)
    transport: Transport
    if strategy.transport == "ring":
        transport = Ring(Communicator(group, device), strategy.ring_depth)
    elif strategy.transport == "allgather":
        transport = AllGather(Communicator(group, device), strategy.slices)
    elif strategy.transport == "ulysses":
        transport = Ulysses(Communicator(group, device), Local())
    else:
        node, across = hierarchical_groups(group, strategy.node_size, timeout)
        transport = Ulysses(Communicator(node, device), AllGather(Communicator(across, device), strategy.slices))
    return ContextParallel(strategy, transport)
