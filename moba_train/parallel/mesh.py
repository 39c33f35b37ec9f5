"""The device mesh that the weights are sharded over."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moba_train.config.mesh import MeshSizes
from moba_train.parallel.world import World


def build_mesh(sizes: MeshSizes, world: World) -> DeviceMesh:
    """The mesh (dp_replicate, shard), where shard is dp_shard x cp, cp innermost; with tp, (dp_replicate, shard, tp).

    The weights know nothing of cp, so stages may differ in it: dp_shard gives way, and every rank keeps its shards.
    The groups of cp are made by `parallel.stage`.
    """
    shape, names = [sizes.dp_replicate, sizes.shards], ["dp_replicate", "shard"]
    if sizes.tp > 1:
        shape, names = [*shape, sizes.tp], [*names, "tp"]
    ranks = torch.arange(world.size).view(shape)
    # Made here, not by init_device_mesh, whose groups would have torch's default timeout.
    groups = [_group(ranks.movedim(axis, -1).flatten(0, -2).tolist(), world) for axis in range(len(shape))]
    return DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=tuple(names))


def _group(all_members: list[list[int]], world: World) -> dist.ProcessGroup:
    """Of these groups, the one with this rank in it."""
    group = dist.group.WORLD
    if len(all_members) > 1:
        group, _ = dist.new_subgroups_by_enumeration(all_members, timeout=world.timeout)
    assert group is not None
    return group
