"""The links between GPUs, and what collectives over a group of ranks send through them.

NCCL is taken to use rings that enter every node through the adapters of all ranks that the group has there.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from moba_train.config.mesh import MeshSizes


class Links(NamedTuple):
    """Bytes per second that a rank receives over each kind of link."""

    node: float = 300e9
    """Bytes per second over its node's links, measured on 4 x H200 with messages of 256 MiB (ring 302, all-gather 325,
    all-to-all 305 GB/s)."""
    network: float = 50e9
    """Bytes per second from other nodes, through its own adapter: 400 Gbit/s, not measured."""
    hop_s: float = 5e-6
    """Seconds that a collective waits for each further node of a ring; assumed, not measured."""


LINKS = Links()
"""Links of an H200 in its node, with one adapter of 400 Gbit/s for each GPU."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives."""

    node: float = 0.0
    """Over the links of its node."""
    network: float = 0.0
    """Through its network adapter."""

    def __add__(self, other: "Traffic") -> "Traffic":
        """The sum by link."""
        return Traffic(self.node + other.node, self.network + other.network)

    def times(self, count: float) -> "Traffic":
        """Traffic of `count` such transfers."""
        return Traffic(self.node * count, self.network * count)

    def seconds(self, links: Links) -> float:
        """Both kinds of links work at the same time."""
        return max(self.node / links.node, self.network / links.network)


@dataclass(frozen=True)
class LinkedGroup:
    """A group of ranks, by what decides which links it uses."""

    ranks: int
    in_node: int
    """Ranks of the group that share a node."""

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return self.ranks // self.in_node

    def gather(self, size: float) -> Traffic:
        """An all-gather of `size` bytes in all, or a reduce-scatter of as many."""
        received = size * (1 - 1 / self.ranks)
        network = received / self.in_node if self.nodes > 1 else 0.0
        return Traffic(received - network, network)

    def gather_seconds(self, size: float, links: Links) -> float:
        """Seconds of such a collective."""
        return self.gather(size).seconds(links) + links.hop_s * (self.nodes - 1)

    def pass_on(self, size: float) -> Traffic:
        """`size` bytes from the rank before, as in a pipeline: between the nodes if the group spans any."""
        return Traffic(network=size) if self.nodes > 1 else Traffic(node=size)


def linked_group(sizes: MeshSizes, ranks_per_node: int, *dimensions: str) -> LinkedGroup:
    """The groups of ranks that differ along `dimensions`, which are neighbours in `MeshSizes`: parallel/dims.py numbers
    the ranks row by row, so what lies inside these dimensions is the distance between a group's ranks."""
    ranks = distance = 1
    for name, size in reversed(sizes._asdict().items()):
        if name in dimensions:
            ranks *= size
        elif ranks == 1:
            distance *= size
    return LinkedGroup(ranks, gcd(ranks, max(1, ranks_per_node // distance)))
