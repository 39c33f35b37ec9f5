"""Plan of a resolved run: the FLOPs, communication and time of each stage, beside its layout and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.config.attention import LayerAttention
from moba_train.config.mesh import MeshSizes, WorldSize
from moba_train.config.stages import Stage
from moba_train.memory.activations import StageActivations
from moba_train.memory.flops import (
    Documents,
    dense_flops,
    layer_flops,
    real_flops,
    recomputed_flops,
    stage_documents,
)
from moba_train.memory.moments import Memory
from moba_train.memory.pipeline import best_parts, pipeline_bubble
from moba_train.model.spec import ParameterCounts
from moba_train.parallel.activations import Kept
from moba_train.parallel.context.costs import TransportCost, TransportMemory, most_memory
from moba_train.parallel.context.policy import predict_cost
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.fsdp import ModelSetup
from moba_train.parallel.links import LINKS, Links
from moba_train.parallel.stage_strategy import stage_attention_shape, stage_costs
from moba_train.resolve.run import ResolvedRun, StageLayout


@dataclass(frozen=True)
class ContextPlan:
    """Context parallelism of a stage: forward and backward of one layer and one micro-batch, on one rank."""

    strategy: CPStrategy
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
        """Memory of the rank that its buffers take, in the layer that needs most."""
        return most_memory(self.layer_costs.values())


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of a stage."""

    parts: tuple[int, ...]
    """Number of layers in each part."""
    best_parts: tuple[int, ...]
    """The split whose most expensive part costs least, over all stages."""
    bubble: float
    """Share of a step in which a rank waits, on average: at the ends of the step, and for slower ranks throughout."""


@dataclass(frozen=True)
class StagePlan:
    """Cost of one stage. FLOPs are per token, forward and backward."""

    stage: Stage
    layout: StageLayout
    dense_flops: float
    real_flops: float
    documents: Documents
    """Documents whose attention `real_flops` counts."""
    context: ContextPlan | None
    """None without context parallelism."""
    pipeline: PipelinePlan | None
    """None without pipeline parallelism."""
    tensor_seconds: float
    """Seconds that tensor parallelism communicates in one optimizer step; nothing overlaps with it."""
    seconds: float
    """Time of the stage: real FLOPs at the plan's rate, the communication of context parallelism that attention cannot
    overlap, that of tensor parallelism, and the bubble of a pipeline."""
    recomputation_seconds: float
    """Time of the FLOPs that activation checkpointing repeats, which `seconds` and utilisation do not count."""

    @property
    def mesh(self) -> MeshSizes:
        """The mesh of the stage."""
        return self.layout.mesh

    @property
    def activations(self) -> StageActivations:
        """Activations that the layers keep for the backward pass."""
        return self.layout.activations

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
    """Cost of a run on `world` GPUs of `peak_tflops`, at a utilisation of `mfu` (by the real FLOPs)."""

    world: WorldSize
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
    run: ResolvedRun,
    peak_tflops: float,
    mfu: float,
    documents: Sequence[Documents] | None = None,
    links: Links = LINKS,
) -> Plan:
    """The plan of a run on a known number of ranks.

    peak_tflops: dense peak of one GPU
    mfu: 0 to 1
    documents: those of each stage if they are known, else see `stage_documents`: attention is counted by the documents
        of the stage's corpora if these are on disk
    links: bandwidths between GPUs

    Raises DataError for a corpus that is found but unusable.
    """
    assert run.world is not None
    rate = peak_tflops * 1e12 * mfu
    found = documents or [stage_documents(run.samples, stage) for stage in run.stages]
    best = None
    if run.parallel.pp > 1:
        best = best_parts(run.setup.shape, run.parallel, run.stages, run.memory.checkpointing)
    stages = tuple(
        _stage_plan(run.setup, stage, layout, of_stage, rate, links, best)
        for stage, layout, of_stage in zip(run.stages, run.layouts, found, strict=True)
    )
    return Plan(run.world, links, peak_tflops, mfu, run.setup.spec.counts, stages)


def _stage_plan(
    setup: ModelSetup,
    stage: Stage,
    layout: StageLayout,
    documents: Documents,
    rate: float,
    links: Links,
    best: tuple[int, ...] | None,
) -> StagePlan:
    """best: parts of a pipeline that cost least over all stages; None without pipeline parallelism."""
    model = setup.shape
    mesh = layout.mesh
    real = real_flops(model, stage.attention, documents.lengths) / documents.tokens
    tokens = -(-stage.micro_batch_size * stage.seq_len // mesh.cp)
    seconds_per_flop = (stage.end_token - stage.first_token) / (rate * mesh.ranks)
    seconds = real * seconds_per_flop
    context = None
    if layout.strategy is not None:
        context = _context_plan(setup, stage, layout.strategy, documents, rate, links)
        exposed = sum(map(context.exposed_seconds, stage.attention)) / mesh.pp
        seconds += stage.steps * layout.micro_batches * exposed
    tensor_seconds = layout.micro_batches * _tensor_parallel_seconds(setup, tokens, mesh.tp, layout.activations, links)
    seconds += stage.steps * tensor_seconds / mesh.pp  # of a rank's layers
    layers = layout.activations.layers
    pipeline = None
    if best is not None:
        bubble = pipeline_bubble(model, setup.parts, stage, documents.lengths, layout.micro_batches, layers)
        pipeline = PipelinePlan(setup.parts, best, bubble)
        seconds /= 1 - bubble
    return StagePlan(
        stage=stage,
        layout=layout,
        dense_flops=dense_flops(model, stage.seq_len),
        real_flops=real,
        documents=documents,
        context=context,
        pipeline=pipeline,
        tensor_seconds=tensor_seconds,
        seconds=seconds,
        recomputation_seconds=recomputed_flops(model, stage, layers) * seconds_per_flop,
    )


def _tensor_parallel_seconds(
    setup: ModelSetup, tokens: int, tp: int, activations: StageActivations, links: Links
) -> float:
    """Seconds that a tp group communicates in one micro-batch, forward and backward.

    tokens: tokens of the micro-batch that the group holds.

    Attention and SwiGLU of every block each all-gather their input and reduce-scatter their output, and do the reverse
    for the gradients; see `repeated_transfers` for what recomputation adds. The loss gathers the output weight, and its
    gradient is reduced.
    """
    model = setup.shape
    transfers = sum(8 + repeated_transfers(layer.kept) for layer in activations.layers)
    numbers = (transfers * tokens + 2 * model.vocab_size) * model.hidden_size
    return numbers * setup.computation.width * (1 - 1 / tp) / links.node


def repeated_transfers(kept: Kept) -> int:
    """Transfers of a tp group that recomputation adds: it all-gathers both inputs once more and reduce-scatters the
    output of attention, if that is gone."""
    return 0 if kept is Kept.ALL else 2 if kept >= Kept.PROJECTIONS else 3


def _context_plan(
    setup: ModelSetup, stage: Stage, strategy: CPStrategy, documents: Documents, rate: float, links: Links
) -> ContextPlan:
    model = setup.shape
    width = setup.computation.width
    shape = stage_attention_shape(model, stage, width)
    tokens = stage.micro_batch_size * stage.seq_len / (strategy.ranks * stage.parallel.tp)  # on each rank
    flops = {layer: layer_flops(model, layer, documents.lengths) for layer in dict.fromkeys(stage.attention)}
    seconds = {layer: count / documents.tokens * tokens / rate for layer, count in flops.items()}
    costs = stage_costs(model, stage, strategy, width)
    return ContextPlan(strategy, predict_cost(strategy, shape), costs, seconds, links)
