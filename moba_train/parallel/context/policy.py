"""Choice of the transport for a stage's context parallelism, with its reasons.

Each transport says itself what it can do and what it costs (`TransportSpec`); transports are found by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from moba_train.config.parallel import CPLayout
from moba_train.parallel.context.costs import TransportCost
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.context.transport.base import TransportSpec
from moba_train.parallel.links import LINKS
from moba_train.registry import TRANSPORTS

SEVERAL_SLICES = 4
"""Slices of keys and values if one slice does not fit in memory or crosses the network. Inside a node one slice is
fastest: narrower kernel launches cost more than the overlap saves (benchmarks/results/context-slices-h200.json,
context-slices-dense-h200.json)."""


def transport_spec(name: str) -> TransportSpec:
    """The registered transport of this name. Raises ValueError, naming the YAML key, for any other."""
    if name not in TRANSPORTS:
        allowed = ", ".join(["auto", *TRANSPORTS])
        raise ValueError(f"parallel.cp_transport: given {name!r}, which is not registered; allowed: {allowed}")
    return cast(TransportSpec, TRANSPORTS[name])


def check_sizes(strategy: CPStrategy) -> None:
    """Raises ValueError, naming the YAML key, for a strategy that is impossible with any attention."""
    spec = transport_spec(strategy.transport)
    if strategy.ranks < 1:
        raise ValueError(f"parallel.cp: {strategy.ranks} given, at least 1 needed")
    spec.check_sizes(strategy)


def predict_cost(strategy: CPStrategy, shape: AttentionShape) -> TransportCost:
    """The cost of a strategy that is possible for this attention."""
    return transport_spec(strategy.transport).cost(strategy, shape)


def choose_strategy(
    transport: str,
    layout: CPLayout | Literal["auto"],
    shape: AttentionShape,
    *,
    ranks: int,
    node_size: int,
    memory_bytes: float | None = None,
) -> tuple[CPStrategy, str]:
    """The strategy to use, and the reason as lines to print.

    Args:
        transport: name of a transport, or `auto`: among the transports that fit in memory, one that is preferred
            (`TransportSpec.is_preferred`), else that with the least predicted time; if none fits, the one whose
            variant with the smallest buffers needs the least memory.
        layout: a layout, or `auto`: zigzag if contiguous shards would be unequal work.
        shape: the attention of one layer.
        ranks: ranks of the context-parallel group.
        node_size: consecutive ranks of the group that share a node.
        memory_bytes: limit for the buffers of one layer; None: no limit. A transport that was asked for and does not
            fit takes its variant with the smallest buffers.

    Raises:
        ValueError: the transport that was asked for cannot do these sizes; the message names the YAML key.
    """
    choice = _Choice(layout, shape, ranks, node_size, memory_bytes)
    if transport != "auto":
        strategy = choice.strategy(transport)
        if not choice.fits(strategy):
            strategy = transport_spec(transport).with_least_memory(strategy, shape) or strategy
        return strategy, f"context parallelism: as configured, {choice.describe(strategy)}"

    lines: list[str] = []
    possible: list[CPStrategy] = []
    for candidate, spec in TRANSPORTS.usable().items():
        if reason := spec.not_for_auto:
            lines.append(f"  {candidate}: {reason}")
            continue
        try:
            strategy = choice.strategy(candidate)
        except ValueError as error:
            lines.append(f"  {candidate}: {str(error).partition(': ')[2]}")
            continue
        possible.append(strategy)
        line = f"  {choice.describe(strategy)}"
        if not choice.fits(strategy):
            line += f": does not fit in {max(0, memory_bytes or 0) / 2**20:.0f} MiB"
        lines.append(line)
    fitting = [strategy for strategy in possible if choice.fits(strategy)]
    chosen = min(fitting, key=choice.preference) if fitting else choice.least_memory(possible)
    return chosen, "\n".join([f"context parallelism: auto takes {choice.describe(chosen)}", *lines])


@dataclass(frozen=True)
class _Choice:
    """The circumstances of a choice: the arguments of `choose_strategy`."""

    layout: CPLayout | Literal["auto"]
    shape: AttentionShape
    ranks: int
    node_size: int
    memory_bytes: float | None

    def strategy(self, transport: str) -> CPStrategy:
        """The best strategy with this transport. Raises ValueError for sizes that the transport cannot do."""
        spec = transport_spec(transport)
        layout = self.layout
        if layout == "auto":
            layout = "zigzag" if spec.has_unequal_shards(self.shape.facts.work_grows) else "contiguous"
        strategy = CPStrategy(self.ranks, transport, layout, self.node_size)
        check_sizes(strategy)
        spec.check_shape(strategy, self.shape)
        if spec.uses_slices:
            crosses_nodes = self.node_size < self.ranks
            if crosses_nodes or not self.fits(strategy):
                return replace(strategy, slices=SEVERAL_SLICES)
        return strategy

    def least_memory(self, possible: Sequence[CPStrategy]) -> CPStrategy:
        """The strategy that needs the least memory for its buffers."""
        variants = (transport_spec(one.transport).with_least_memory(one, self.shape) for one in possible)
        return min((one for one in variants if one), key=lambda strategy: self.cost(strategy).memory_bytes)

    def fits(self, strategy: CPStrategy) -> bool:
        """True if the buffers of a layer fit in the memory that is left for them."""
        return self.memory_bytes is None or self.cost(strategy).memory_bytes <= self.memory_bytes

    def preference(self, strategy: CPStrategy) -> tuple[bool, float]:
        """Sort key among strategies that fit, best first."""
        preferred = transport_spec(strategy.transport).is_preferred(strategy, self.shape)
        return not preferred, self.cost(strategy).seconds()

    def cost(self, strategy: CPStrategy) -> TransportCost:
        """The predicted cost for one layer."""
        return predict_cost(strategy, self.shape)

    def describe(self, strategy: CPStrategy) -> str:
        """One line: the strategy and its predicted cost."""
        cost = self.cost(strategy)
        details = transport_spec(strategy.transport).describe(strategy)
        links = f", at {8e-9 * LINKS.network:g} Gbit/s a GPU between nodes" if cost.network_bytes else ""
        return (
            f"{strategy.transport} over {strategy.ranks} ranks, {strategy.layout}{details}: a layer receives "
            f"{cost.node_bytes / 2**20:.0f} MiB in the node and {cost.network_bytes / 2**20:.0f} MiB from other nodes "
            f"({1e3 * cost.seconds():.2f} ms without overlap{links}), buffers {cost.memory_bytes / 2**20:.0f} MiB"
        )
