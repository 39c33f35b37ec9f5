"""Plan of a recipe: layout, parameters, and the FLOPs, memory, communication and time of each stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.config.attention import LayerAttention
from moba_train.config.mesh import MeshSizes, mesh_sizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.memory.activations import StageActivations, stage_activations
from moba_train.memory.devices import H200
from moba_train.memory.flops import (
    Documents,
    ParameterCounts,
    count_recipe_parameters,
    dense_flops,
    layer_flops,
    real_flops,
    recomputed_flops,
    stage_documents,
)
from moba_train.memory.memory import NO_TRANSPORT, element_bytes, memory_for_buffers
from moba_train.memory.moments import Memory
from moba_train.memory.pipeline import PipelinePlan, plan_pipeline
from moba_train.parallel.activations import Kept
from moba_train.parallel.context.costs import TransportCost, TransportMemory, most_memory, predict_cost
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.links import LINKS, Links
from moba_train.parallel.stage_strategy import stage_attention_shape, stage_costs, stage_strategy


@dataclass(frozen=True)
class ContextPlan:
    """Context parallelism of a stage: forward and backward of one layer and one micro-batch, on one rank."""

    strategy: CPStrategy
    reason: str
    """Reason for the strategy, as lines to print."""
    cost: TransportCost
    """Cost of the strategy's transport in a layer whose attention goes through it."""
    layer_costs: dict[LayerAttention, TransportCost]
    """Cost of transport in a layer with each attention of the stage, through the strategy's transport or not."""
    attention_seconds: dict[LayerAttention, float]
    """Seconds of each layer attention of the stage, at the plan's rate."""
    links: Links

    @property
    def seconds(self) -> float:
        """Seconds of communication and copies without any overlap."""
        return self.cost.seconds(self.links)

    def exposed_seconds(self, layer: LayerAttention) -> float:
        """Seconds of communication that a layer with this attention cannot overlap, at best."""
        return self.layer_costs[layer].exposed_seconds(self.attention_seconds[layer], self.links)

    @property
    def memory(self) -> TransportMemory:
        """What it makes of the rank's memory, in the layer that needs most."""
        return most_memory(self.layer_costs.values())


@dataclass(frozen=True)
class StagePlan:
    """Cost of one stage. FLOPs are per token, forward and backward."""

    stage: Stage
    mesh: MeshSizes
    dense_flops: float
    real_flops: float
    documents: Documents
    """Documents whose attention `real_flops` counts."""
    activations: StageActivations
    """What the layers keep for the backward pass."""
    context: ContextPlan | None
    """None without context parallelism."""
    pipeline: PipelinePlan | None
    """None without pipeline parallelism."""
    tensor_seconds: float
    """Seconds that tensor parallelism communicates in one optimizer step; nothing overlaps with it."""
    accumulation: int
    """Micro-batches per rank and optimizer step."""
    seconds: float
    """Time of the stage: real FLOPs at the plan's rate, the communication of context parallelism that attention cannot
    overlap, that of tensor parallelism, and the bubble of a pipeline."""
    recomputation_seconds: float
    """Time of the FLOPs that activation checkpointing repeats, which `seconds` and utilisation do not count."""

    @property
    def memory(self) -> Memory:
        """GPU memory at the step's peak."""
        return self.activations.memory

    @property
    def tokens(self) -> int:
        """Tokens of all optimizer steps; with an exit criterion the maximum, which `seconds` counts as well."""
        return self.stage.end_token - self.stage.first_token


@dataclass(frozen=True)
class Plan:
    """Cost of a recipe on `world_size` GPUs of `peak_tflops`, at a utilisation of `mfu` (by the real FLOPs)."""

    world_size: int
    ranks_per_node: int
    links: Links
    peak_tflops: float
    mfu: float
    parameters: ParameterCounts
    stages: tuple[StagePlan, ...]

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def recomputed_seconds(self) -> float:
        """Time of all stages with the FLOPs that activation checkpointing repeats, to compare recipes by."""
        return sum(stage.seconds + stage.recomputation_seconds for stage in self.stages)


def make_plan(
    config: RunConfig,
    world_size: int,
    peak_tflops: float,
    mfu: float,
    ranks_per_node: int = 8,
    gpu_bytes: float | None = None,
    documents: Sequence[Documents] | None = None,
    host_bytes: float | None = None,
    links: Links = LINKS,
) -> Plan:
    """The plan of a validated recipe.

    peak_tflops: dense peak of one GPU
    mfu: 0 to 1
    gpu_bytes: memory of one GPU, which limits what `activation_checkpointing: budget` keeps and the buffers that
        `cp_transport: auto` may choose; None: not known, then nothing limits `budget`, and an H200's limits the buffers
    documents: those of each stage if they are known, else see `stage_documents`: attention is counted by the documents
        of the stage's corpora where these are on disk
    host_bytes: host memory for the offloaded activations of one GPU, the copy of a save, and the optimizer's state
        where that is there; None: not known
    links: bandwidths between GPUs

    Raises ConfigError for a layout that does not fit `world_size`, DataError for a corpus that is found but unusable.
    """
    rate = peak_tflops * 1e12 * mfu
    resolved = resolve_stages(config)
    found = documents or [stage_documents(config, stage) for stage in resolved]
    stages = tuple(
        _stage_plan(
            config,
            stage,
            of_stage,
            mesh_sizes(stage.parallel, world_size),
            rate,
            ranks_per_node,
            gpu_bytes,
            host_bytes,
            links,
        )
        for stage, of_stage in zip(resolved, found, strict=True)
    )
    return Plan(world_size, ranks_per_node, links, peak_tflops, mfu, count_recipe_parameters(config), stages)


def _stage_plan(
    config: RunConfig,
    stage: Stage,
    documents: Documents,
    mesh: MeshSizes,
    rate: float,
    ranks_per_node: int,
    gpu_bytes: float | None,
    host_bytes: float | None,
    links: Links,
) -> StagePlan:
    real = real_flops(config.model, stage.attention, documents.lengths) / documents.tokens
    tokens = -(-stage.micro_batch_size * stage.seq_len // mesh.cp)
    accumulation = stage.batch_sequences // (stage.micro_batch_size * mesh.dp)
    seconds_per_flop = (stage.end_token - stage.first_token) / (rate * mesh.ranks)
    seconds = real * seconds_per_flop
    context = None
    if mesh.cp > 1:
        for_buffers = memory_for_buffers(config, stage, mesh, gpu_bytes or H200.memory)
        context = _context_plan(config, stage, documents, rate, ranks_per_node, for_buffers, links)
        exposed = sum(map(context.exposed_seconds, stage.attention)) / mesh.pp
        seconds += stage.steps * accumulation * exposed
    transport = context.memory if context else NO_TRANSPORT
    activations = stage_activations(config, stage, mesh, gpu_bytes, host_bytes, transport)
    tensor_seconds = accumulation * _tensor_parallel_seconds(config, tokens, mesh.tp, activations, links)
    seconds += stage.steps * tensor_seconds / mesh.pp  # of a rank's layers
    pipeline = None
    if mesh.pp > 1:
        pipeline = plan_pipeline(config, stage, documents.lengths, accumulation, activations.layers)
        seconds /= 1 - pipeline.bubble
    return StagePlan(
        stage=stage,
        mesh=mesh,
        dense_flops=dense_flops(config.model, stage.seq_len),
        real_flops=real,
        documents=documents,
        activations=activations,
        context=context,
        pipeline=pipeline,
        tensor_seconds=tensor_seconds,
        accumulation=accumulation,
        seconds=seconds,
        recomputation_seconds=recomputed_flops(config.model, stage, activations.layers) * seconds_per_flop,
    )


def _tensor_parallel_seconds(
    config: RunConfig, tokens: int, tp: int, activations: StageActivations, links: Links
) -> float:
    """Seconds that a tp group communicates in one micro-batch, forward and backward.

    tokens: tokens of the micro-batch that the group holds.

    Attention and SwiGLU of every block each all-gather their input and reduce-scatter their output, and do the reverse
    for the gradients; see `repeated_transfers` for what recomputation adds. The loss gathers the output weight, and its
    gradient is reduced.
    """
    model, width = config.model, element_bytes(config)
    transfers = sum(8 + repeated_transfers(layer.kept) for layer in activations.layers)
    numbers = (transfers * tokens + 2 * model.vocab_size) * model.hidden_size
    return numbers * width * (1 - 1 / tp) / links.node


def repeated_transfers(kept: Kept) -> int:
    """Recomputation all-gathers both inputs once more and reduce-scatters the output of attention, if that is gone."""
    return 0 if kept is Kept.ALL else 2 if kept >= Kept.PROJECTIONS else 3


def _context_plan(
    config: RunConfig,
    stage: Stage,
    documents: Documents,
    rate: float,
    ranks_per_node: int,
    memory_bytes: float,
    links: Links,
) -> ContextPlan:
    width = element_bytes(config)
    strategy, reason = stage_strategy(config, stage, ranks_per_node, width, memory_bytes)
    shape = stage_attention_shape(config, stage, width)
    tokens = stage.micro_batch_size * stage.seq_len / (strategy.ranks * stage.parallel.tp)  # on each rank
    flops = {layer: layer_flops(config.model, layer, documents.lengths) for layer in dict.fromkeys(stage.attention)}
    seconds = {layer: count / documents.tokens * tokens / rate for layer, count in flops.items()}
    costs = stage_costs(config, stage, strategy, width)
    return ContextPlan(strategy, reason, predict_cost(strategy, shape), costs, seconds, links)
