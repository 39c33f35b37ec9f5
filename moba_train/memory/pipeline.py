"""Pipeline parallelism: which layers each part has, and how long ranks wait for each other.

Times are in floating-point operations that a rank carries out: those count that activation checkpointing repeats. What
`activation_checkpointing: budget` repeats depends on the layers of each rank, so the split counts none of it, but the
bubble does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.config.mesh import MeshSizes
from moba_train.config.run import ParallelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.memory.flops import attention_matrices, feed_forward_matrices, layer_flops, repeated_flops
from moba_train.memory.once import once_a_recipe
from moba_train.model.transformer import ModelPart
from moba_train.parallel.activations import Kept, LayerActivations
from moba_train.parallel.pipeline.model import balanced_split, model_parts, number_of_parts, rank_part


def pipeline_layers(config: RunConfig) -> tuple[int, ...]:
    """Number of layers in each part of the model, for all stages; a single part without pipeline parallelism."""
    parallel = config.parallel
    if parallel.pp == 1:
        return (config.model.layers,)
    if parallel.pp_layers != "auto":
        return tuple(parallel.pp_layers)
    return best_layers(config)


@once_a_recipe
def best_layers(config: RunConfig) -> tuple[int, ...]:
    """The split into the recipe's number of parts in which the most expensive one costs least over all stages."""
    layers, output = [0.0] * config.model.layers, 0.0
    kept = Kept.ATTENTION if config.activation_checkpointing == "full" else Kept.ALL
    for stage in resolve_stages(config):
        tokens = stage.end_token - stage.first_token
        costs = _layer_costs(config, stage, [stage.seq_len], [LayerActivations(kept)] * len(layers))
        layers = [total + tokens * cost for total, cost in zip(layers, costs, strict=True)]
        output += tokens * _output_cost(config)
    return balanced_split(layers, output, number_of_parts(config.parallel))


def _layer_costs(
    config: RunConfig, stage: Stage, lengths: Sequence[int], layers: Sequence[LayerActivations]
) -> list[float]:
    """Operations of each layer for each token of documents of these lengths, forward, backward, and repeated."""
    model = config.model
    matrices = 6 * (attention_matrices(model) + feed_forward_matrices(model))
    by_kind = {layer: layer_flops(model, layer, lengths) / sum(lengths) for layer in dict.fromkeys(stage.attention)}
    repeated = [repeated_flops(model, stage, index, layer.kept) for index, layer in enumerate(layers)]
    return [matrices + by_kind[kind] + more for kind, more in zip(stage.attention, repeated, strict=True)]


def _output_cost(config: RunConfig) -> float:
    """Operations of the output projection for each token that carries loss."""
    return 6.0 * config.model.vocab_size * config.model.hidden_size


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of a stage."""

    layers: tuple[int, ...]
    """Number of layers in each part."""
    best_layers: tuple[int, ...]
    """The split whose most expensive part costs least, over all stages."""
    bubble: float
    """Share of a step in which a rank waits, on average: at the ends of the step, and for slower ranks throughout."""


def plan_pipeline(
    config: RunConfig,
    stage: Stage,
    lengths: Sequence[int],
    micro_batches: int,
    activations: Sequence[LayerActivations],
) -> PipelinePlan:
    """The pipeline in `stage` with documents of these lengths and so many micro-batches on a rank in a step.

    activations: what each layer of the model keeps for its backward pass.

    A step takes as long as the slowest rank computes, and as long as the first micro-batch needs to reach the others:
    with several parts on a rank one of them, with zero bubble the forward pass or one of two backward passes.
    """
    layers = pipeline_layers(config)
    costs = _layer_costs(config, stage, lengths, activations)
    ranks = rank_costs(layers, config.parallel.pp, costs, _output_cost(config))
    computed = micro_batches * sum(ranks) / len(ranks)
    bubble = 1 - computed / step_length(config.parallel, len(layers), ranks, micro_batches)
    return PipelinePlan(layers, best_layers(config), bubble)


def rank_costs(parts: Sequence[int], pp: int, layers: Sequence[float], output: float) -> list[float]:
    """Cost of a micro-batch on each of `pp` ranks. parts: number of layers in each part of the model; layers: cost of
    each layer; output: cost of the output projection."""
    ranks = [0.0] * pp
    for number, part in enumerate(model_parts(parts)):
        ranks[number % pp] += sum(layers[layer] for layer in part.layers) + (output if part.has_output else 0.0)
    return ranks


def step_length(parallel: ParallelConfig, parts: int, ranks: Sequence[float], micro_batches: int) -> float:
    """Cost of a whole step, waiting included, given that of a micro-batch on each rank; see `plan_pipeline`."""
    slowest = max(ranks)
    return micro_batches * slowest + (sum(ranks) - slowest) / _steps_of_filling(parallel, parts)


def _steps_of_filling(parallel: ParallelConfig, parts: int) -> int:
    """In how many equal shares a rank's work for a micro-batch is passed on while the pipeline fills and empties."""
    return 3 if parallel.pp_schedule == "zero_bubble" else parts // parallel.pp


def kept_micro_batches(parallel: ParallelConfig, rank: int, micro_batches: int) -> float:
    """Micro-batches whose activations a rank of the pipeline keeps at once, in units of all its layers.

    1F1B: as many as there are ranks from this one on. Interleaved: by the number of passes before the first backward
    pass (Narayanan et al. 2021, section 2.2). Zero bubble: as many as there are ranks, as gradients of weights wait.
    """
    pp = parallel.pp
    match parallel.pp_schedule:
        case "1f1b":
            kept = float(pp - rank)
        case "interleaved_1f1b":
            chunks = number_of_parts(parallel) // pp
            kept = ((chunks - 1) * pp + 2 * (pp - 1 - rank) + 1) / chunks
        case "zero_bubble":
            kept = float(pp)
    return min(kept, micro_batches)


@dataclass(frozen=True)
class RankWork:
    """What a rank of a pipeline has to keep."""

    part: ModelPart
    """Its modules."""
    kept: float
    """Micro-batches whose activations it keeps at once."""
    received: int
    """Hidden states and gradients of hidden states that it has buffers for."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of its layers, ascending."""
        return self.part.layers


def rank_work(config: RunConfig, stage: Stage, sizes: MeshSizes, rank: int) -> RankWork:
    """What a rank of a pipeline keeps in `stage`, on a mesh of these sizes; everything without pipeline parallelism."""
    if sizes.pp == 1:
        return RankWork(ModelPart(tuple(range(config.model.layers)), True, True), 1, 0)
    own = model_parts(pipeline_layers(config))[rank :: sizes.pp]
    count = max(1, stage.batch_sequences // (stage.micro_batch_size * sizes.dp))
    received = count * sum((not part.has_embedding) + (not part.has_output) for part in own)
    return RankWork(rank_part(own), kept_micro_batches(config.parallel, rank, count), received)


def checkpointing_policy(config: RunConfig, sizes: MeshSizes) -> str:
    """`activation_checkpointing`, but `none` for the `budget` of a zero-bubble pipeline, which cannot recompute."""
    cannot = sizes.pp > 1 and config.parallel.pp_schedule == "zero_bubble"
    return "none" if cannot and config.activation_checkpointing == "budget" else config.activation_checkpointing
