"""Which strategy `auto` takes, and why."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from moba_train.config.run import CPLayout, CPTransport
from moba_train.parallel.context.costs import TransportCost, predict_cost
from moba_train.parallel.context.strategy import (
    GATHERING_TRANSPORTS,
    AttentionShape,
    CPStrategy,
    check_heads,
    check_merges,
    check_sizes,
    check_units,
)

SEVERAL_SLICES = 4
"""Slices of keys and values where one slice does not fit in memory or crosses the network. Inside a node one slice is
fastest: narrower kernel launches cost more than the overlap saves (benchmarks/results/context-slices-h200.json,
context-slices-dense-h200.json)."""

NEVER_CHOSEN = "only as configured: the owner of blocks that all queries select would attend for all of them"
"""Why `auto` does not take dispatch, whose time depends on what queries select."""


def choose_strategy(
    transport: CPTransport | Literal["auto"],
    layout: CPLayout | Literal["auto"],
    shape: AttentionShape,
    *,
    ranks: int,
    node_size: int,
    work_grows: bool,
    memory_bytes: float | None = None,
    ring_depth: int | None = None,
    slices: int | None = None,
) -> tuple[CPStrategy, str]:
    """The strategy to use, and the reason as lines to print.

    Args:
        transport: a transport, or `auto`: Ulysses among more than two ranks of a node where every rank gets whole
            key/value heads and it fits in memory, otherwise the transport with the least predicted time among those
            that fit, or, if none fits, a ring with two buffers or all-gather in slices, whichever needs less memory;
            never dispatch, whose time depends on what queries select.
        layout: a layout, or `auto`: zigzag where contiguous shards would be unequal work.
        shape: the attention of one layer.
        ranks: ranks of the context-parallel group.
        node_size: consecutive ranks of the group that share a node.
        work_grows: whether a query's work grows with its position in any layer, all the way to the end (dense
            attention), so that contiguous shards are unequal work.
        memory_bytes: limit for the buffers of one layer; None: no limit.
        ring_depth: see `CPStrategy`.
        slices: see `CPStrategy`; None: one, but `SEVERAL_SLICES` across nodes and where one does not fit.

    Raises:
        ValueError: the transport that was asked for cannot do these sizes; the message names the YAML key.
    """
    choice = _Choice(layout, shape, ranks, node_size, work_grows, memory_bytes, ring_depth, slices)
    if transport != "auto":
        strategy = choice.strategy(transport)
        return strategy, f"context parallelism: {transport} as configured, {choice.describe(strategy)}"

    lines: list[str] = []
    fitting: list[CPStrategy] = []
    for candidate in get_args(CPTransport):
        if candidate == "dispatch":
            lines.append(f"  dispatch: {NEVER_CHOSEN}")
            continue
        try:
            strategy = choice.strategy(candidate)
        except ValueError as error:
            lines.append(f"  {candidate}: {str(error).partition(': ')[2]}")
            continue
        line = f"  {choice.describe(strategy)}"
        if choice.fits(strategy):
            fitting.append(strategy)
        else:
            line += f": does not fit in {max(0, memory_bytes or 0) / 2**20:.0f} MiB"
        lines.append(line)
    chosen = min(fitting, key=choice.preference) if fitting else choice.least_memory()
    return chosen, "\n".join([f"context parallelism: auto takes {choice.describe(chosen)}", *lines])


@dataclass(frozen=True)
class _Choice:
    """The circumstances of a choice: the arguments of `choose_strategy`."""

    layout: CPLayout | Literal["auto"]
    shape: AttentionShape
    ranks: int
    node_size: int
    work_grows: bool
    memory_bytes: float | None
    ring_depth: int | None
    slices: int | None

    def strategy(self, transport: CPTransport) -> CPStrategy:
        """The best strategy with this transport. Raises ValueError for sizes that the transport cannot do."""
        layout = self._best_layout(transport) if self.layout == "auto" else self.layout
        strategy = CPStrategy(self.ranks, transport, layout, self.node_size, self.ring_depth, self.slices or 1)
        check_sizes(strategy)
        check_heads(strategy, self.shape.heads, self.shape.kv_heads, self.shape.couples_heads)
        check_units(strategy, self.shape.selected_units)
        check_merges(strategy, self.shape.merges)
        if self.slices is None and transport in GATHERING_TRANSPORTS:
            crosses_nodes = self.node_size < self.ranks
            if crosses_nodes or not self.fits(strategy):
                return replace(strategy, slices=SEVERAL_SLICES)
        return strategy

    def least_memory(self) -> CPStrategy:
        """The strategy that needs the least memory for its buffers."""
        gather = self.strategy("allgather")  # in slices, as it does not fit
        if not self.shape.merges:
            return gather
        ring = replace(self, ring_depth=2).strategy("ring")
        return min(gather, ring, key=lambda strategy: self.cost(strategy).memory_bytes)

    def _best_layout(self, transport: CPTransport) -> CPLayout:
        # Under Ulysses every rank attends to whole sequences. With the other transports a rank's work is that of its
        # own queries. In a ring it also depends on the chunks that they see, and later queries see more. MoBA's work
        # grows until topk blocks lie behind a query, too: zigzag shards are up to 27 % faster under all-gather at 64K
        # tokens, and never slower (benchmarks/results/context-parallel-h200.json); under hierarchical they cost a copy.
        # Under dispatch a rank's work is that of its keys, and earlier keys are selected by more queries.
        unequal = transport in ("ring", "allgather", "dispatch") or (self.work_grows and transport != "ulysses")
        return "zigzag" if unequal else "contiguous"

    def fits(self, strategy: CPStrategy) -> bool:
        """Whether the buffers of a layer fit in the memory that is left for them."""
        return self.memory_bytes is None or self.cost(strategy).memory_bytes <= self.memory_bytes

    def preference(self, strategy: CPStrategy) -> tuple[bool, float]:
        """Sort key among strategies that fit, best first."""
        return not _is_ulysses_with_whole_heads(strategy, self.shape), self.cost(strategy).seconds()

    def cost(self, strategy: CPStrategy) -> TransportCost:
        """The predicted cost for one layer."""
        return predict_cost(strategy, self.shape)

    def describe(self, strategy: CPStrategy) -> str:
        """One line: the strategy and its predicted cost."""
        cost = self.cost(strategy)
        gathers = strategy.transport in GATHERING_TRANSPORTS
        parts = f", {strategy.slices} slices" if gathers and strategy.slices > 1 else ""
        if strategy.transport == "ring" and strategy.chunks_per_call < strategy.ranks:
            parts = f", {strategy.chunks_per_call} of {strategy.ranks} chunks in an attention call"
        return (
            f"{strategy.transport} over {strategy.ranks} ranks, {strategy.layout}{parts}: a layer receives "
            f"{cost.node_bytes / 2**20:.0f} MiB in the node and {cost.network_bytes / 2**20:.0f} MiB from other nodes "
            f"({1e3 * cost.seconds():.2f} ms without overlap), buffers {cost.memory_bytes / 2**20:.0f} MiB"
        )


def _is_ulysses_with_whole_heads(strategy: CPStrategy, shape: AttentionShape) -> bool:
    """Whether this is Ulysses among more than two ranks of a node, without repeated key/value heads, which `auto`
    prefers to all others.

    Ranks attend to whole sequences with some of the heads, in larger kernel launches and with less memory. On 4 x H200
    at 256K tokens it takes 9 % less time than all-gather for MoBA 4096/12, but 4 % more for dense attention and 5 %
    more for MoBA 512/8 (benchmarks/results/context-parallel-h200.json, context-parallel-dense-h200.json). In training
    at 128K tokens with MoBA 512/8 it is 2.6 % faster in bf16, as smaller buffers leave more for activations, and 1.6 %
    slower in FP8 (training-8b-128k-h200-x4.json). Two ranks have half of all keys already, and Ulysses would send half
    of the queries and outputs as well: on 2 x H100 it takes 17 % more time for MoBA 512/8 at 64K and 256K tokens, and
    the same for dense attention (context-parallel-h100-x2.json).
    """
    in_one_node = 2 < strategy.ranks == strategy.node_size
    return strategy.transport == "ulysses" and in_one_node and shape.kv_heads % strategy.ranks == 0
