"""Recipes resolved for tests, by the numbers of ranks and GPUs that a test names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import pytest

from moba_train.config.mesh import MeshSizes, WorldSize
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.loader import DataSpec
from moba_train.memory.activations import StageActivations, stage_activations
from moba_train.memory.devices import H200, Device, Gpu
from moba_train.memory.flops import Documents
from moba_train.memory.memory import NO_TRANSPORT, MemoryEstimate
from moba_train.memory.pipeline import RankWork, rank_work
from moba_train.memory.weights import Weights, rank_weights
from moba_train.model.spec import ModelSpec
from moba_train.model.transformer import Transformer
from moba_train.parallel.context.costs import TransportMemory
from moba_train.parallel.data_shard import ContextEngines, DataShard
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.fsdp import ModelSetup, sharded_model
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import ResolvedRun, resolve_unchecked, setup_on, stage_layout

if TYPE_CHECKING:
    from moba_train.tools.plan.plan import Plan

_DEVICES = {"cpu": Device(None, None), "cuda": Device(H200, None), None: None}


def check(
    config: RunConfig,
    ranks: int | None = None,
    *,
    ranks_per_node: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    gpu: Gpu | None = None,
    check_files: bool = False,
    allow_idle: bool = False,
    training: bool = True,
) -> ResolvedRun:
    """`resolve` on this many ranks, all of one node by default, of this machine's `device`, or of a `gpu` elsewhere."""
    world = WorldSize(ranks, ranks_per_node or ranks) if ranks is not None else None
    found = Device(gpu, None, is_here=False) if gpu is not None else _DEVICES[device]
    return resolve(config, world, found, check_files=check_files, allow_idle=allow_idle, training=training)


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """The stages of a recipe."""
    return resolve_unchecked(config).stages


def spec_of(config: RunConfig) -> ModelSpec:
    """The model of a recipe."""
    return resolve_unchecked(config).setup.spec


def plan_of(
    config: RunConfig,
    ranks: int,
    ranks_per_node: int = 8,
    gpu_bytes: float | None = None,
    documents: Sequence[Documents] | None = None,
    host_bytes: float | None = None,
    full_by_torch: bool = False,
) -> "Plan":
    """The plan of a recipe, not checked, on GPUs with this memory (None: not known) and the rates of an H200.

    host_bytes: host memory for the tensors of each GPU; None: not known; full_by_torch: see `Machine`

    Skips the test where the core is alone.
    """
    pytest.importorskip("moba_train.tools", reason="needs moba_train.tools")
    from moba_train.tools.plan.plan import make_plan
    from moba_train.tools.plan.step_time import make_machine

    device = None
    if gpu_bytes is not None or host_bytes is not None:
        device = _Device(Gpu("a GPU", None, gpu_bytes or float("inf")), host_bytes)
    run = resolve_unchecked(config).on(WorldSize(ranks, ranks_per_node), device)
    machine = make_machine(H200, ranks_per_node, 400.0, None)._replace(full_by_torch=full_by_torch)
    return make_plan(run, machine, documents)


class _Device(Device):
    """A device all of whose host memory may be used."""

    @property
    def host_bytes(self) -> float | None:
        return self.host_memory


def estimate_of(config: RunConfig, stage: Stage, mesh: MeshSizes) -> MemoryEstimate:
    """The memory of a stage of a recipe on a mesh."""
    run = resolve_unchecked(config)
    return MemoryEstimate(run.setup, run.memory, stage, mesh)


def kept_by(
    config: RunConfig,
    stage: Stage,
    mesh: MeshSizes,
    gpu_bytes: float | None,
    host_bytes: float | None,
    transport: TransportMemory = NO_TRANSPORT,
) -> StageActivations:
    """Activations that the layers of a stage of a recipe keep."""
    run = resolve_unchecked(config)
    return stage_activations(run.setup, run.memory, stage, mesh, gpu_bytes, host_bytes, transport)


def samples_of(config: RunConfig) -> DataSpec:
    """The way from a recipe's corpora to samples."""
    return resolve_unchecked(config).samples


def setup_of(config: RunConfig) -> ModelSetup:
    """The model of a recipe, on GPUs."""
    return resolve_unchecked(config).setup


def work_of(config: RunConfig, stage: Stage, mesh: MeshSizes, rank: int = 0) -> RankWork:
    """The work of a rank of a pipeline in a stage of a recipe."""
    setup = setup_of(config)
    return rank_work(setup.shape, setup.parts, stage, mesh, rank)


def weights_of(config: RunConfig, mesh: MeshSizes, work: RankWork) -> Weights:
    """The weights of a rank with this work."""
    run = resolve_unchecked(config)
    return rank_weights(run.setup.spec, run.setup.computation, run.parallel, run.optim.kind, mesh, work)


def sharded_of(config: RunConfig, dims: ParallelDims) -> Transformer:
    """A recipe's model on the ranks of `dims`."""
    run = resolve_unchecked(config)
    return sharded_model(setup_on(run.setup, _DEVICES[dims.world.device.type]), run.parallel, dims, run.seed)


def shard_of(config: RunConfig, stage: Stage, dims: ParallelDims) -> DataShard:
    """This rank's shard in a stage of a recipe whose mesh is that of `dims`."""
    run = resolve_unchecked(config)
    device = _DEVICES[dims.world.device.type]
    setup = setup_on(run.setup, device)
    layout = stage_layout(setup, run.memory, stage, dims.sizes, dims.world.ranks_per_node, device)
    return ContextEngines(dims).data_shard(layout.mesh, layout.strategy)
