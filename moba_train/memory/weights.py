"""Weights, gradients and optimizer state of one rank, in numbers and bytes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moba_train.config.mesh import MeshSizes
from moba_train.config.parallel import ParallelConfig
from moba_train.config.precision import PrecisionConfig
from moba_train.memory.pipeline import RankWork
from moba_train.model.spec import ModelSpec
from moba_train.optim.registry import OPTIMIZERS
from moba_train.parallel.fsdp import Computation, has_head_unit, is_one_unit
from moba_train.parallel.transfers import GATHER_BUFFERS, REDUCTION_BUFFER


class Trained(NamedTuple):
    """Numbers of parameters that have gradients, as the fields of these names in `Weights` count all: fewer with
    adapters."""

    shard: int
    total: int
    ends: int
    outer: int
    largest_block: int


@dataclass(frozen=True)
class Weights:
    """Numbers and bytes of weights on a rank, and of the optimizer's state. The ends are the embedding and the output
    projection."""

    shard: int
    """Parameters that the rank keeps."""
    trained: "Trained"
    """Those that have gradients."""
    total: int
    """Parameters of the rank's tp part, not sharded."""
    ends: int
    """Parameters of the ends in the rank's tp part."""
    outer: int
    """Parameters of the ends in FSDP's outermost unit: without the output projection if that is a separate unit."""
    blocks: Mapping[int, int]
    """Parameters of each of the rank's blocks in its tp part, by layer."""
    head: int
    """Bytes of the output weight in the compute dtype, gathered over the tp group for the loss."""
    gathered_ends: int
    """Bytes of the gathered ends in the compute dtype."""
    gathered_outer: int
    """Bytes of those in FSDP's outermost unit."""
    gathered: int
    """Bytes of the gathered outermost unit and of the two largest blocks; in a pipeline and as one unit of FSDP, of all
    the rank's blocks."""
    held: int
    """Bytes of each parameter of a gathered block that stays between its forward and its backward pass; 0 where all
    stay in any case."""
    copied: int
    """Bytes of the buffer into which FSDP gathered the last unit of the forward pass. The unit's weights are copied out
    of it, but FSDP frees it only when it gathers the next unit or the forward pass ends, so it is still there in the
    loss. 0 where nothing is gathered, where copy engines have buffers for it, and in a pipeline, which gathers only
    once a step."""
    gradient_sent: int
    """Bytes of a gradient that is sent to its rank: in float32, or by copy engines in the compute dtype."""
    gradient: int
    """Bytes of a gradient in the buffers on its way."""
    buffers: int
    """Bytes of the buffers that copy engines write into."""
    is_one_unit: bool
    """True: FSDP gathers and reduces all weights at once, not block by block."""
    cast: int
    """Bytes of the rank's part of the blocks' weights in FP8, which stay for all gathers of a step."""
    optimizer: int
    """Bytes of the optimizer's state, on the GPU or its host."""


def rank_weights(
    spec: ModelSpec,
    computation: Computation,
    parallel: ParallelConfig,
    optimizer: str,
    sizes: MeshSizes,
    work: RankWork,
) -> Weights:
    """Weights of a rank with this work, and the state of the optimizer with this name."""
    model = spec.config
    counts = spec.counts
    width = computation.width
    inner, ends = _numbers(spec, work)
    # Of experts that other ranks of an ep group have; FSDP's shards are as large without them, of fewer ranks.
    away = {layer: spec.blocks[layer].separate * (parallel.ep - 1) // parallel.ep for layer in work.layers}
    total = -(-(inner + ends - sum(away.values())) // sizes.tp)
    ends //= sizes.tp
    blocks = {layer: (spec.blocks[layer].parameters - away[layer]) // sizes.tp for layer in work.layers}
    head = width * model.vocab_size * model.hidden_size if work.part.has_output else 0
    one_unit = is_one_unit(counts.total, sizes)
    head_unit = has_head_unit(model.tie_embeddings, sizes) and not one_unit
    outer = ends - counts.output // sizes.tp if head_unit else ends
    gathered_ends = width * ends + (head if sizes.tp > 1 else 0)
    gathered_outer = width * outer if head_unit else gathered_ends
    all_stay = sizes.pp > 1 or one_unit
    by_size = sorted(blocks.values())
    at_once = sum(by_size if all_stay else by_size[-2:])
    block_width = gathered_bytes(computation.precision, width)
    held = 0 if all_stay else block_width
    copy_engines = parallel.fsdp_copy_engines and sizes.shards > 1
    sent = width if copy_engines and sizes.pp == 1 else 4
    buffers = GATHER_BUFFERS * block_width * by_size[-1] + REDUCTION_BUFFER
    last_block = 0 if copy_engines else held * blocks[work.layers[-1]]
    copied = width * (counts.output // sizes.tp) if head_unit else last_block
    all_ranks = sizes.shards * sizes.tp
    shard = -(-(inner + ends * sizes.tp) // all_ranks)
    trained = Trained(shard, total, ends, outer, by_size[-1])
    if spec.base:  # experts are in the base
        inner, own_ends = _numbers(spec, work, spec.base)
        largest = max(spec.blocks[layer].parameters - spec.blocks[layer].base for layer in work.layers)
        trained = Trained(
            -(-(inner + own_ends) // all_ranks), inner + own_ends, own_ends, min(outer, own_ends), largest
        )
    return Weights(
        shard=shard,
        trained=trained,
        total=total,
        ends=ends,
        outer=outer,
        blocks=blocks,
        head=head,
        gathered_ends=gathered_ends,
        gathered_outer=gathered_outer,
        gathered=gathered_outer + block_width * at_once,
        held=held,
        copied=copied if sizes.shards > 1 else 0,
        gradient_sent=sent,
        gradient=0 if sizes.ranks == 1 else sent,  # one rank's do not travel (parallel/forward.py)
        buffers=buffers if copy_engines else 0,
        is_one_unit=one_unit,
        cast=-(-sum(by_size) // sizes.shards) if computation.precision.gathers_fp8 else 0,
        optimizer=_optimizer_state(spec, optimizer, sizes, work),
    )


def _optimizer_state(spec: ModelSpec, optimizer: str, sizes: MeshSizes, work: RankWork) -> int:
    ranks = sizes.shards * sizes.tp
    matrices = sum(spec.blocks[layer].matrices for layer in work.layers)
    others = sum(_numbers(spec, work, spec.base)) - matrices
    return OPTIMIZERS[optimizer].state_bytes(-(-matrices // ranks), -(-others // ranks))


def _numbers(spec: ModelSpec, work: RankWork, base: Collection[str] = ()) -> tuple[int, int]:
    """Parameters of a pipeline rank's blocks and last norm, and of its ends; without these of `spec.base`."""
    embedding = 0 if "embedding.weight" in base else spec.counts.embedding
    output = 0 if "output.weight" in base else spec.counts.output
    part = work.part
    ends = (embedding if part.has_embedding else 0) + (output if part.has_output else 0)
    if part.has_output and not part.has_embedding and not output:
        ends = embedding  # its copy, tied
    blocks = sum(spec.blocks[layer].parameters - bool(base) * spec.blocks[layer].base for layer in work.layers)
    return blocks + (spec.config.hidden_size if part.has_output and "norm.weight" not in base else 0), ends


def gathered_bytes(precision: PrecisionConfig, width: int) -> int:
    """Bytes of one gathered weight of a block, `width` of one in the compute dtype; the few weights that FP8 leaves
    out, norms among them, count as the others."""
    return 1 if precision.gathers_fp8 else width


def checkpoint_bytes(spec: ModelSpec, optimizer: str) -> int:
    """Bytes of one checkpoint of all ranks: float32 weights and the state of the optimizer with this name."""
    numbers = spec.counts.total - spec.counts.base
    return 4 * numbers + OPTIMIZERS[optimizer].state_bytes(spec.matrices, numbers - spec.matrices)
