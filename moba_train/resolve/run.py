"""`ResolvedRun`: a recipe with every decision made, for a number of ranks and their devices.

    RunConfig    everything that a recipe may say -----------+
    WorldSize    ranks, and ranks of a node -----------------+--> resolve --> ResolvedRun
    Device       the weakest rank's GPU and host memory -----+

`resolve` (recipe.py) finds all problems first and then decides, once: the steps and the attention of every stage, the
parts of a pipeline, the number format, and, for each stage on its mesh, the context-parallel strategy, what every layer
keeps for the backward pass and the memory that a step is predicted to take. `moba-train plan` prints a resolved run,
the trainer carries it out, and its log and its checkpoints' metadata are views of it.

Facts that are not known leave their decisions open: without a world size there are no layouts, and without a device
nothing limits what layers keep. `on` decides again for other ranks or devices, `after_exit` sets the clock of the
stages when one has ended by its criterion; nothing else ever changes.

Only resolve/, the assembly in run/ and the commands take a whole resolved run. Everything else takes the parts that it
uses: a `Stage` what is trained, a `StageLayout` how, a `ModelSetup` the model that is built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moba_train.attention.block_sparse import BlockOptions
from moba_train.attention.kernels.table import BackendChoice, Facts, Machine, resolve_backend, this_machine
from moba_train.attention.registry import KINDS
from moba_train.checkpoint.recipe import checkpoint_folders
from moba_train.config.attention import LayerAttention
from moba_train.config.checkpoint import CheckpointConfig
from moba_train.config.data import DataConfig, SourceConfig
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.health import HealthConfig
from moba_train.config.load import dump_config
from moba_train.config.mesh import MeshSizes, WorldSize, mesh_sizes
from moba_train.config.model import ModelConfig
from moba_train.config.optim import OptimConfig
from moba_train.config.parallel import ParallelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages, timed
from moba_train.config.telemetry import TelemetryConfig
from moba_train.data.loader import DataSpec
from moba_train.errors import ConfigError
from moba_train.memory.activations import StageActivations, stage_activations
from moba_train.memory.devices import H200, Device
from moba_train.memory.memory import NO_TRANSPORT, MemoryPolicy, memory_for_buffers
from moba_train.memory.pipeline import best_parts
from moba_train.model.build import with_adapters
from moba_train.model.spec import model_spec
from moba_train.optim.adamw import keeps_state_on_host
from moba_train.parallel.context.costs import most_memory
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.fsdp import Computation, ModelSetup, compute_dtype
from moba_train.parallel.stage_strategy import stage_costs, stage_strategy


@dataclass(frozen=True)
class RunFolders:
    """Folders of a run."""

    run: Path
    """Metrics, recipe, and what else the run leaves."""
    checkpoints: tuple[Path, ...]
    """Folders of checkpoints: in the run's folder and, if the recipe names one, in checkpoint.fallback_dir."""


@dataclass(frozen=True)
class StageLayout:
    """A stage on the ranks of a run."""

    mesh: MeshSizes
    micro_batches: int
    """Micro-batches of each rank in one optimizer step."""
    strategy: CPStrategy | None
    """Transport and layout of sequences that several ranks share; None without context parallelism."""
    reason: str
    """Reason for the strategy, as lines to print; empty without one."""
    activations: StageActivations
    """Activations that every layer keeps for the backward pass, and the predicted memory."""
    backends: Mapping[LayerAttention, BackendChoice]
    """Backends of the attention to selected blocks; empty if the device is not known."""


@dataclass(frozen=True)
class ResolvedRun:
    """Everything that a run does, decided. See the module's docstring."""

    name: str
    seed: int
    recipe: str
    """Every value of the recipe, as YAML: the text that is saved beside the checkpoints and in each of them."""
    folders: RunFolders
    init_from: str | None
    """Folder of the first weights, `init_from`; ignored once the run has a checkpoint of its own."""
    stages: tuple[Stage, ...]
    parallel: ParallelConfig
    """The parallel layout of the whole run; stages may have another cp."""
    setup: ModelSetup
    memory: MemoryPolicy
    data: DataConfig
    samples: DataSpec
    optim: OptimConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    telemetry: TelemetryConfig
    health: HealthConfig
    deterministic: bool
    world: WorldSize | None = None
    """None: the number of ranks is not known."""
    device: Device | None = None
    """None: not known."""
    layouts: tuple[StageLayout, ...] = ()
    """One for each stage; none where the number of ranks is not known."""

    def on(self, world: WorldSize | None, device: Device | None) -> "ResolvedRun":
        """The run on these ranks and devices, its layouts decided for them.

        Raises ConfigError if a mesh does not fit the ranks, the host's memory not the offloaded activations, or a
        backend of attention not the device, and ValueError, naming the key, if a transport cannot do a stage's sizes.
        """
        setup = setup_on(self.setup, device)
        layouts: tuple[StageLayout, ...] = ()
        if world is not None:
            layouts = tuple(
                stage_layout(
                    setup, self.memory, stage, mesh_sizes(stage.parallel, world.ranks), world.ranks_per_node, device
                )
                for stage in self.stages
            )
        return replace(self, setup=setup, world=world, device=device, layouts=layouts)

    def after_exit(self, exited_steps: Mapping[str, int]) -> "ResolvedRun":
        """The run with the stages whose exit criterion was met ending after these steps of theirs, by name; stages
        after them begin earlier."""
        return replace(self, stages=timed(self.stages, exited_steps))

    def named_sources(self) -> list[tuple[str, SourceConfig]]:
        """Every source of the recipe, with its key."""
        lists = {"data.train": self.data.train, "data.validation": self.data.validation}
        lists |= {stage.key("train"): [*stage.sources] for stage in self.stages if "train" in stage.own_keys}
        return [(f"{key}[{index}]", source) for key, sources in lists.items() for index, source in enumerate(sources)]


def resolve_unchecked(config: RunConfig) -> ResolvedRun:
    """The run of a recipe whose problems are known or do not matter, such as that of a checkpoint, on no machine.

    Raises ConfigError for attention that does not exist.
    """
    stages = resolve_stages(config)
    spec = with_adapters(model_spec(config.model, [stage.attention for stage in stages]), config.adapters.given)
    parts = pipeline_parts(config.model, config.parallel, stages, config.activation_checkpointing)
    data = config.data
    precision = config.precision
    computation = Computation(compute_dtype(precision, None), precision, compiled=config.compile)
    optim = config.optim
    memory = MemoryPolicy(
        checkpointing=config.activation_checkpointing,
        offload=config.activation_offload,
        gpu_bytes=_bytes(config.memory.gpu_gib),
        host_bytes=_bytes(config.memory.host_gib),
        optimizer=optim.kind,
        optimizer_on_host=keeps_state_on_host(optim),
        saves=config.checkpoint.every is not None,
    )
    folders = RunFolders(Path(config.run_dir), checkpoint_folders(config.run_dir, config.checkpoint.fallback_dir))
    return ResolvedRun(
        name=config.name,
        seed=config.seed,
        recipe=dump_config(config),
        folders=folders,
        init_from=config.init_from,
        stages=stages,
        parallel=config.parallel,
        setup=ModelSetup(spec, parts, computation),
        memory=memory,
        data=data,
        samples=DataSpec(config.seed, config.model.vocab_size, data.packing, config.loss_norm, data.long_conversations),
        optim=optim,
        evaluation=config.evaluation,
        checkpoint=config.checkpoint,
        telemetry=config.telemetry,
        health=config.health,
        deterministic=config.deterministic,
    )


def setup_on(setup: ModelSetup, device: Device | None) -> ModelSetup:
    """The model as it computes on a device; None: not known, taken for a GPU."""
    dtype = compute_dtype(setup.computation.precision, device.type if device is not None else None)
    return replace(setup, computation=replace(setup.computation, dtype=dtype))


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * 2**30


def pipeline_parts(
    model: ModelConfig, parallel: ParallelConfig, stages: Sequence[Stage], checkpointing: str
) -> tuple[int, ...]:
    """Number of layers in each part of the model; a single part without pipeline parallelism."""
    if parallel.pp == 1:
        return (model.layers,)
    if parallel.pp_layers != "auto":
        return tuple(parallel.pp_layers)
    return best_parts(model, parallel, stages, checkpointing)


def stage_layout(
    setup: ModelSetup,
    policy: MemoryPolicy,
    stage: Stage,
    mesh: MeshSizes,
    ranks_per_node: int,
    device: Device | None,
) -> StageLayout:
    """`stage` on a mesh, on these devices (None: not known). Raises ConfigError and ValueError as `ResolvedRun.on`.

    Buffers of context parallelism may take what a step without them leaves of a GPU, of an H200 where the device is not
    known; nothing limits them on a CPU.
    """
    gpu = device.gpu if device is not None else H200
    strategy: CPStrategy | None = None
    reason = ""
    transport = NO_TRANSPORT
    if mesh.cp > 1:
        model = setup.shape
        width = setup.computation.width
        free = memory_for_buffers(setup, policy, stage, mesh, gpu.memory) if gpu is not None else None
        strategy, reason = stage_strategy(model, stage, ranks_per_node, width, free)
        transport = most_memory(stage_costs(model, stage, strategy, width).values())
    gpu_bytes = device.gpu.memory if device is not None and device.gpu is not None else None
    host_bytes = device.host_bytes if device is not None else None
    activations = stage_activations(setup, policy, stage, mesh, gpu_bytes, host_bytes, transport)
    micro_batches = stage.batch_sequences // (stage.micro_batch_size * mesh.dp)
    backends = _block_backends(setup, stage, mesh, strategy, device) if device is not None else {}
    return StageLayout(mesh, micro_batches, strategy, reason, activations, backends)


_TRITON_ELSEWHERE = "3.6.0"
"""Release of Triton that a machine is taken to have on which a run is only planned."""


def _block_backends(
    setup: ModelSetup, stage: Stage, mesh: MeshSizes, strategy: CPStrategy | None, device: Device
) -> dict[LayerAttention, BackendChoice]:
    """The backends of each attention of the stage that attends to selected blocks; other attention takes the fastest
    kernel for each batch. Raises ConfigError if one cannot run that the recipe names.

    Before each call the layers look up their own facts in the same table and take the first backend that can do the
    batch. Those facts differ from these only in the number of rows of a batch.
    """
    model = setup.shape
    tokens = stage.micro_batch_size * stage.seq_len // mesh.cp
    found = {}
    problems = []
    for layer in dict.fromkeys(stage.attention):
        options = layer.options
        if not isinstance(options, BlockOptions):
            continue
        sizes = model.head_width, options.block_size, options.history_blocks, tokens * model.heads // mesh.tp
        all_keys = strategy is None or strategy.transport != "ring"
        facts = Facts(_machine(device), setup.computation.dtype, *sizes, whole=mesh.cp == 1, all_keys=all_keys)
        try:
            if not KINDS[layer.kind](layer.options, model.head_width).facts.own_kernels:
                found[layer] = resolve_backend(f"attention.{layer.kind}.backend", options.backend, facts)
        except ValueError as error:
            problems.append(f"{error} (stage {stage.name!r})")
    if problems:
        raise ConfigError(problems)
    return found


def _machine(device: Device) -> Machine:
    if device.is_here:
        return this_machine(torch.device(device.type))
    capability = device.gpu.capability if device.gpu is not None else None
    return Machine(device.type, capability, _TRITON_ELSEWHERE, packages=frozenset())
