"""The device mesh of a recipe."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moba_train.config.schema import RunConfig
from moba_train.config.validate import data_parallel_sizes
from moba_train.parallel.world import World


def build_mesh(config: RunConfig, world: World) -> DeviceMesh:
    """The mesh (dp_replicate, dp_shard). Raises ConfigError when the sizes do not fill the world."""
    sizes = data_parallel_sizes(config, world.size)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
