"""Pipeline parallelism: the layers of each part, the work of each rank, and the time that ranks wait for each other.

The split goes by the floating-point operations of each layer, with those that activation checkpointing repeats. What
`activation_checkpointing: budget` repeats depends on the layers of each rank, so the split counts none of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.parallel import ParallelConfig
from moba_train.config.stages import Stage
from moba_train.memory.flops import layer_flops, repeated_flops
from moba_train.model.feed_forward import feed_forward_costs
from moba_train.model.part import ModelPart
from moba_train.model.spec import attention_matrices
from moba_train.parallel.activations import Kept
from moba_train.parallel.pipeline.model import balanced_split, model_parts, number_of_parts, rank_part


def best_parts(
    model: ModelConfig, parallel: ParallelConfig, stages: Sequence[Stage], checkpointing: str
) -> tuple[int, ...]:
    """Number of layers in each part: the split into as many parts as `parallel` asks for in which the most expensive
    part costs least over all stages.

    checkpointing: policy of the recipe; `full` recomputes every layer, of other policies nothing is counted
    """
    kept = Kept.ATTENTION if checkpointing == "full" else Kept.ALL
    layers = [0.0] * model.layers
    output = 0.0
    for stage in stages:
        tokens = stage.end_token - stage.first_token
        attention = {kind: layer_flops(model, kind, [stage.seq_len]) / stage.seq_len for kind in {*stage.attention}}
        for index, kind in enumerate(stage.attention):
            products = 6 * (attention_matrices(model, index) + feed_forward_costs(model, index).active)
            layers[index] += tokens * (products + attention[kind] + repeated_flops(model, stage, index, kept))
        output += tokens * 6.0 * model.vocab_size * model.hidden_size
    return balanced_split(layers, output, number_of_parts(parallel))


def rank_costs(parts: Sequence[int], pp: int, layers: Sequence[float], output: float) -> list[float]:
    """Cost of a micro-batch on each of `pp` ranks. parts: number of layers in each part of the model; layers: cost of
    each layer; output: cost of the output projection."""
    ranks = [0.0] * pp
    for number, part in enumerate(model_parts(parts)):
        ranks[number % pp] += sum(layers[layer] for layer in part.layers) + (output if part.has_output else 0.0)
    return ranks


def step_length(parallel: ParallelConfig, parts: int, ranks: Sequence[float], micro_batches: int) -> float:
    """Cost of a whole step, waiting included, given that of a micro-batch on each rank.

    It is what the slowest rank computes, and what the first micro-batch needs to reach the others: with several parts
    on a rank one of them, with zero bubble the forward pass or one of two backward passes.
    """
    slowest = max(ranks)
    filling = 3 if parallel.pp_schedule == "zero_bubble" else parts // parallel.pp
    return micro_batches * slowest + (sum(ranks) - slowest) / filling


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
    """The layers of a rank of a pipeline, and the micro-batches that it keeps."""

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


def rank_work(model: ModelConfig, parts: Sequence[int], stage: Stage, sizes: MeshSizes, rank: int) -> RankWork:
    """The work of a rank of a pipeline in `stage`, on a mesh of these sizes; everything without pipeline parallelism.

    parts: number of layers in each part of the model
    """
    if sizes.pp == 1:
        return RankWork(ModelPart(tuple(range(model.layers)), True, True), 1, 0)
    own = model_parts(parts)[rank :: sizes.pp]
    count = max(1, stage.batch_sequences // (stage.micro_batch_size * sizes.dp))
    # torch's stages keep a buffer for each micro-batch of the step and each neighbour.
    received = count * sum((not part.has_embedding) + (not part.has_output) for part in own)
    return RankWork(rank_part(own), kept_micro_batches(stage.parallel, rank, count), received)
