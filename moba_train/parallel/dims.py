"""The layout of a run: its device mesh, the coordinates of every rank in it, and every process group.

No other file computes ranks. They are numbered row by row over the dimensions of `MeshSizes`, tp innermost: the ranks
of a tp group are neighbours, and a cp group spans as few nodes as it can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moba_train.config.mesh import MeshSizes
from moba_train.parallel.world import World, gather_over_ranks

SHARD = "dp_shard_cp"
"""The mesh dimension that parameters, gradients and optimizer state are sharded over: dp_shard x cp, cp innermost."""

_MESH = {"pp": ("pp",), "dp_replicate": ("dp_replicate",), SHARD: ("dp_shard", "cp"), "tp": ("tp",)}
"""The dimensions of the DeviceMesh, outermost first, each with the dimensions of `MeshSizes` that it is made of."""
_EXPERT_MESH = {"pp": ("pp",), "dp_replicate": ("dp_replicate",), "experts_shard": ("dp_shard",)}
_EXPERT_MESH |= {"ep": ("cp",), "tp": ("tp",)}
"""That of experts, of `MeshSizes` with dp_shard x cp divided otherwise."""
_SHARDED = (SHARD, "experts_shard")


def coordinates(sizes: MeshSizes, rank: int) -> MeshSizes:
    """Place of `rank` along each dimension of the layout, counted from 0."""
    found = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        found.append(coordinate)
    return MeshSizes(*reversed(found))


def rank_groups(sizes: MeshSizes, *dimensions: str) -> list[list[int]]:
    """All groups of ranks that differ in their coordinates along `dimensions` only, each in ascending order."""
    groups: dict[MeshSizes, list[int]] = {}
    for rank in range(sizes.ranks):
        rest = coordinates(sizes, rank)._replace(**dict.fromkeys(dimensions, 0))
        groups.setdefault(rest, []).append(rank)
    return list(groups.values())


@dataclass(frozen=True)
class StageDims:
    """This rank's coordinates and groups in one stage."""

    sizes: MeshSizes
    rank: int
    cp_group: dist.ProcessGroup | None
    """The ranks that share this rank's sequences, in the order of their shards; None: it has whole sequences."""

    @property
    def computes_loss(self) -> bool:
        """True if this rank has the last layers of its pipeline."""
        return coordinates(self.sizes, self.rank).pp == self.sizes.pp - 1

    @property
    def dp_rank(self) -> int:
        """Number, out of `sizes.dp`, of the sequences read at the same time that this rank reads."""
        own = coordinates(self.sizes, self.rank)
        return own.dp_replicate * self.sizes.dp_shard + own.dp_shard

    @property
    def tp_rank(self) -> int:
        """Number, out of `sizes.tp`, of this rank's part of every layer."""
        return coordinates(self.sizes, self.rank).tp


class ParallelDims:
    """The parallel layout of a run. Made on all ranks together, once the default process group exists.

    Stages may differ in cp, and dp_shard gives way to it. Weights are sharded over dp_shard x cp together and know
    nothing of either, so `mesh` holds for the whole run and every rank keeps its shards; `for_stage` gives the view of
    one stage. All groups have the run's timeout and are kept.
    """

    def __init__(self, sizes: MeshSizes, world: World, ep: int = 1) -> None:
        """ep: neighbours among the ranks of dp_shard x cp that expert parallelism divides experts over."""
        assert sizes.ranks == world.size, "config.mesh fits the sizes to the world"
        self.sizes = sizes
        self.world = world
        self.ep = ep
        self.mesh = self._build_mesh(sizes, _MESH)
        if ep > 1:
            self.expert_mesh = self._build_mesh(sizes._replace(dp_shard=sizes.shards // ep, cp=ep), _EXPERT_MESH)
            """The mesh (pp, dp_replicate, experts_shard, ep, tp): dp_shard_cp in two, only with expert parallelism."""
        parts = rank_groups(sizes, "dp_replicate", "dp_shard", "cp", "tp")
        self.layers_group = self._new_group(parts) if len(parts) > 1 else _default_group()
        """All ranks that hold shards of this rank's layers; without pipeline parallelism, all ranks."""
        self._cp_groups: dict[int, dist.ProcessGroup] = {}

    @property
    def weight_mesh(self) -> DeviceMesh:
        """The mesh (dp_replicate, dp_shard_cp) for FSDP2: copies of the parameters, and the ranks that share one; with
        one copy the mesh (dp_shard_cp,)."""
        names = self.mesh.mesh_dim_names
        weights = ("dp_replicate", SHARD) if self.sizes.dp_replicate > 1 else (SHARD,)
        return self.mesh if names == weights else self.mesh[weights]

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The mesh (tp,) of the ranks that share each layer; None without tensor parallelism."""
        return self.mesh["tp"] if self.sizes.tp > 1 else None

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks of this rank's pipeline, in the order of its layers; only with pipeline parallelism."""
        return self.mesh.get_group("pp")

    def for_stage(self, sizes: MeshSizes) -> StageDims:
        """The layout of a stage with these sizes, which differ from the run's in dp_shard and cp at most. Called on all
        ranks together."""
        given, own = ((s.pp, s.dp_replicate, s.shards, s.tp) for s in (sizes, self.sizes))
        assert given == own, "resolve/layout.py lets no other sizes through"
        if sizes.cp > 1 and sizes.cp not in self._cp_groups:
            # Never the default group, so that transfers of attention do not queue behind those of weights.
            self._cp_groups[sizes.cp] = self._new_group(rank_groups(sizes, "cp"))
        return StageDims(sizes, self.world.rank, self._cp_groups[sizes.cp] if sizes.cp > 1 else None)

    def _build_mesh(self, sizes: MeshSizes, named: Mapping[str, Sequence[str]]) -> DeviceMesh:
        """The DeviceMesh of the `named` dimensions, where those of one rank are left out that no weight must be sharded
        over: over dp_replicate, FSDP2 would all-reduce the gradients of each layer, with one copy too."""
        groups = {name: rank_groups(sizes, *dimensions) for name, dimensions in named.items()}
        # On a CPU a step of a tiny model takes 0.94 of its time without dp_replicate (benchmarks/LOG.md, "Host time of
        # small models").
        kept = {name: found for name, found in groups.items() if name in _SHARDED or len(found[0]) > 1}
        ranks = torch.arange(self.world.size).view([len(found[0]) for found in kept.values()])
        # Not init_device_mesh, whose groups would have torch's default timeout.
        own = [self._new_group(found) if len(found) > 1 else _default_group() for found in kept.values()]
        return DeviceMesh.from_group(own, self.world.device.type, ranks, mesh_dim_names=tuple(kept))

    def _new_group(self, groups: list[list[int]]) -> dist.ProcessGroup:
        """Creates all `groups` and returns the one that this rank is in."""
        group, _ = dist.new_subgroups_by_enumeration(groups, timeout=self.world.timeout)
        assert group is not None
        return group


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def hierarchical_groups(
    group: dist.ProcessGroup, node_size: int, timeout: timedelta | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Split a context-parallel group into a group inside this rank's node and a group across the nodes.

    The group across holds the ranks with this rank's position in every node. `node_size`: consecutive ranks of `group`
    in one node. Collective over the whole world, also when it holds several context-parallel groups.
    """
    groups = sorted({*map(tuple, gather_over_ranks(dist.get_process_group_ranks(group)))})
    nodes = [ranks[first : first + node_size] for ranks in groups for first in range(0, len(ranks), node_size)]
    across = [ranks[position::node_size] for ranks in groups for position in range(node_size)]
    # Every rank creates every group, in one order: it is a collective of the whole world.
    own = [dist.new_subgroups_by_enumeration([*map(list, each)], timeout=timeout)[0] for each in (nodes, across)]
    return own[0], own[1]
