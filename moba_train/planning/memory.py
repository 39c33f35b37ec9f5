"""Peak memory per GPU by part, in bytes: an estimate for choosing a layout.

A step needs most memory at one of a few moments, and the parts never all exist at once: gradients only come as
activations go, and logits are gone before the blocks' gradients begin. Each moment is added up, and the largest counts.

Assumed: FSDP2 with one unit a block, fp32 master weights and gradients, all parameters trained. Left out: the CUDA
context (about 1 GiB), fragmentation, NCCL's buffers and workspaces of attention kernels, for which `USABLE`
leaves room.
"""

from dataclasses import dataclass
from functools import partial

import torch

from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.model.build import build_attention
from moba_train.model.loss import CHUNK_TOKENS
from moba_train.model.transformer import ModelPart
from moba_train.optim.registry import OPTIMIZERS
from moba_train.parallel.pipeline.split import model_parts, rank_part
from moba_train.planning.parameters import count_block_matrices, count_recipe_parameters
from moba_train.planning.pipeline import kept_micro_batches, pipeline_layers

USABLE = 0.9
"""Fraction of a GPU's memory that a run can use; the CUDA context, NCCL and fragmentation take the rest."""


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU by part, at the moment of a step that needs most."""

    moment: str
    """What is computed then: the loss, or the backward pass of a part of the last or first block, or of the
    embedding."""
    parameters: int
    """fp32 master weights, sharded."""
    optimizer: int
    """State of the optimizer, sharded: for AdamW two fp32 moments, none where they are in host memory; for Muon one of
    the matrices."""
    gradients: int
    """fp32, sharded: those that exist at this moment; in a pipeline whole."""
    unsharded: int
    """Gathered weights in the compute dtype: embedding and output, and two blocks (one at work, one prefetched); in a
    pipeline all of the rank's."""
    activations: int
    """Tensors of one micro-batch that the forward pass, or a block's recomputation, keeps for the backward pass; in a
    pipeline of several, and its buffers."""
    working: int
    """Logits of one chunk with log-softmax and gradient, or gradients on their way through one block."""
    transport: int = 0
    """Buffers of context parallelism, of one layer at a time."""
    host_optimizer: int = 0
    """State of the optimizer in host memory, for each GPU; not in `total`."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, part) for part in MEMORY_PARTS)


MEMORY_PARTS = ("parameters", "optimizer", "gradients", "unsharded", "activations", "working", "transport")
"""Fields of `Memory` that are bytes on the GPU, in the order to print."""


def element_bytes(config: RunConfig) -> int:
    """Bytes of one element in the compute dtype of the layers, on a GPU."""
    return 4 if config.precision.compute == "fp32" else 2


def estimate_memory(config: RunConfig, stage: Stage, sizes: MeshSizes, transport: float = 0) -> Memory:
    """Peak memory of one rank in `stage`, on a mesh of these sizes.

    transport: bytes of the rank's buffers for context parallelism. With pipeline parallelism, it is the rank of a
    pipeline that needs most.
    """
    return max(memory_by_rank(config, stage, sizes, transport), key=lambda memory: memory.total)


def memory_by_rank(config: RunConfig, stage: Stage, sizes: MeshSizes, transport: float = 0) -> list[Memory]:
    """Peak memory of each rank of a pipeline, first layers first; of the only one without pipeline parallelism."""
    found = []
    for rank in range(sizes.pp):
        moments = _moments(config, stage, sizes, round(transport), _rank_work(config, stage, sizes, rank))
        found.append(max(moments, key=lambda memory: memory.total))
    return found


@dataclass(frozen=True)
class _RankWork:
    """What a rank of a pipeline has to keep."""

    part: ModelPart
    """Its modules."""
    kept: float
    """Micro-batches whose activations it keeps at once."""
    received: int
    """Hidden states and gradients of hidden states that it has buffers for."""

    @property
    def layers(self) -> int:
        """Number of its layers."""
        return len(self.part.layers)


def _rank_work(config: RunConfig, stage: Stage, sizes: MeshSizes, rank: int) -> _RankWork:
    if sizes.pp == 1:
        return _RankWork(ModelPart(tuple(range(config.model.layers)), True, True), 1, 0)
    own = model_parts(pipeline_layers(config))[rank :: sizes.pp]
    count = max(1, stage.batch_sequences // (stage.micro_batch_size * sizes.dp))
    received = count * sum((not part.has_embedding) + (not part.has_output) for part in own)
    return _RankWork(rank_part(own), kept_micro_batches(config.parallel, rank, count), received)


def buffer_memory(config: RunConfig, device: torch.device, stage: Stage, sizes: MeshSizes) -> float | None:
    """Bytes of a GPU's memory that are left for the buffers of context parallelism in `stage`; None on a CPU."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return USABLE * total - estimate_memory(config, stage, sizes).total


@dataclass(frozen=True)
class _BlockActivations:
    """Bytes of one block's activations on a rank, for the tokens of one micro-batch."""

    attention: int
    """All tensors that attention and its projections keep for their backward pass."""
    feed_forward: int
    """All tensors that the SwiGLU and its norm keep."""
    kept: int
    """Tensors that stay while other blocks work: all, or with checkpointing those that recomputation begins with."""
    attention_gradients: int
    """Gradients of queries, keys, values and the attention's output."""
    feed_forward_gradients: int
    """Gradients inside the SwiGLU beyond the activations that they replace."""


def _block_activations(
    model: ModelConfig, tokens: int, width: int, tp: int, checkpointing: bool, compiled: bool
) -> _BlockActivations:
    """Activations of one block, `width` bytes an element, where a tp group has `tokens` tokens.

    A block keeps the inputs of both norms and of the projections behind them (4 D; every rank of a tp group holds the
    gathered inputs of the projections), rotated queries and keys, values and the attention's output (and the queries
    and keys before qk_norm), the fp32 LSE, and four tensors of the SwiGLU. A compiled block recomputes one of these
    four: 4.00 GiB less were measured on 16 layers (benchmarks/results/training-1b-h200.json). Checkpointing keeps the
    block's input and its attention's output and LSE.
    """
    queries = model.heads * model.head_width
    keys = model.kv_heads * model.head_width
    lse = 4 * model.heads
    heads = 2 * queries + 2 * keys + (queries + keys if model.qk_norm else 0)
    attention = width * ((1 + tp) * model.hidden_size + heads) + lse
    feed_forward = width * ((1 + tp) * model.hidden_size + (3 if compiled else 4) * model.intermediate_size)
    kept = width * (model.hidden_size + queries) + lse if checkpointing else attention + feed_forward
    bytes_per_token = {
        "attention": attention,
        "feed_forward": feed_forward,
        "kept": kept,
        "attention_gradients": width * 2 * (queries + keys),
        "feed_forward_gradients": width * (1 if compiled else 2) * model.intermediate_size,
    }
    return _BlockActivations(**{name: count * tokens // tp for name, count in bytes_per_token.items()})


@dataclass(frozen=True)
class _Weights:
    """Numbers and bytes of weights on a rank. The ends are the embedding and the output projection."""

    shard: int
    """Parameters that the rank keeps."""
    total: int
    """Parameters of the rank's tp part, not sharded."""
    ends: int
    """Parameters of the ends in the rank's tp part."""
    block: int
    """Parameters of one block in the rank's tp part."""
    head: int
    """Bytes of the output weight in the compute dtype, gathered over the tp group for the loss."""
    gathered_ends: int
    """Bytes of the gathered ends in the compute dtype."""
    gathered: int
    """Bytes of the gathered ends and of two blocks."""


def _gathered_bytes(config: RunConfig, width: int) -> int:
    """Bytes of one gathered weight of a block; the few that FP8 leaves out, norms among them, are not told apart."""
    precision = config.precision
    return 1 if precision.linear == "fp8" and precision.fp8.scaling == "tensorwise" else width


def _numbers(config: RunConfig, work: _RankWork) -> tuple[int, int]:
    """Parameters of a pipeline rank's blocks, and of its ends."""
    counts = count_recipe_parameters(config)
    part = work.part
    ends = (counts.embedding if part.has_embedding else 0) + (counts.output if part.has_output else 0)
    if part.has_output and not part.has_embedding and not counts.output:
        ends = counts.embedding  # its copy, tied
    return counts.without_embeddings * work.layers // config.model.layers, ends


def _weights(config: RunConfig, sizes: MeshSizes, width: int, work: _RankWork) -> _Weights:
    counts = count_recipe_parameters(config)
    blocks, ends = _numbers(config, work)
    total = -(-(blocks + ends) // sizes.tp)
    ends //= sizes.tp
    block = counts.without_embeddings // config.model.layers // sizes.tp
    head = width * config.model.vocab_size * config.model.hidden_size if work.part.has_output else 0
    gathered_ends = width * ends + (head if sizes.tp > 1 else 0)
    at_once = min(2, config.model.layers) if sizes.pp == 1 else work.layers
    return _Weights(
        shard=-(-(blocks + ends * sizes.tp) // (sizes.shards * sizes.tp)),
        total=total,
        ends=ends,
        block=block,
        head=head,
        gathered_ends=gathered_ends,
        gathered=gathered_ends + _gathered_bytes(config, width) * at_once * block,
    )


def _optimizer_state(config: RunConfig, sizes: MeshSizes, work: _RankWork) -> int:
    """Bytes of a rank's optimizer state."""
    ranks = sizes.shards * sizes.tp
    matrices = count_block_matrices(config) * work.layers // config.model.layers
    return OPTIMIZERS[config.optim.kind].state_bytes(
        -(-matrices // ranks), -(-(sum(_numbers(config, work)) - matrices) // ranks)
    )


def _moments(config: RunConfig, stage: Stage, sizes: MeshSizes, transport: int, work: _RankWork) -> list[Memory]:
    """Memory of a rank at each moment of a step that can be its peak.

    A rank of a pipeline keeps its weights gathered and its gradients whole in float32 for all micro-batches of a step.
    """
    tp = sizes.tp
    model = config.model
    width = element_bytes(config)
    tokens = -(-stage.micro_batch_size * stage.seq_len // sizes.cp)  # of a micro-batch, in the rank's tp group
    hidden = width * model.hidden_size * tokens // tp
    checkpointing = config.activation_checkpointing == "full"
    block = _block_activations(model, tokens, width, tp, checkpointing, config.compile)
    kinds = build_attention([stage.attention[layer] for layer in work.part.layers], model.head_width)
    selected = [kind.saved_bytes(model, stage.seq_len) * tokens // tp for kind in kinds]
    own = [kind.activation_bytes(model, width) * tokens // tp for kind in kinds]
    recomputed = max(own) if checkpointing else 0
    if not checkpointing:
        selected = [saved + activations for saved, activations in zip(selected, own, strict=True)]
    all_kept = round(work.kept * (work.layers * block.kept + sum(selected)))
    weights = _weights(config, sizes, width, work)

    several = stage.batch_sequences > stage.micro_batch_size * sizes.dp  # the gradients of other micro-batches stay
    early = 4 * weights.shard if several else 0
    late = 4 * weights.shard if several else 4 * (weights.shard - weights.ends // sizes.shards)
    before_first = all_kept - work.layers * block.kept - sum(selected[1:])
    held = weights.gathered_ends
    if sizes.pp > 1:
        early = late = 4 * weights.total
        held = weights.gathered
        all_kept += work.received * hidden
        before_first += work.received * hidden
    rows = min(CHUNK_TOKENS, tokens // tp)
    # log-softmax, its gradient and that of the logits, float32 (benchmarks/loss_memory.py); the rows of all chunks,
    # their gradient and, from the chunk before, the weight's
    loss = 12 * rows * model.vocab_size + 2 * hidden + (weights.head if tokens // tp > CHUNK_TOKENS else 0)
    # In the blocks: the gradients of the output weight, the residual stream and the block's own weights. FSDP reduces
    # the first at the very end, with the embedding's, as both belong to its outermost unit.
    passing = weights.head + hidden + width * weights.block
    reduced = 4 * weights.block  # float32, a whole block

    in_host_memory = config.optim.implementation == "deepspeed_cpu"
    state = _optimizer_state(config, sizes, work)
    at = partial(
        Memory,
        parameters=4 * weights.shard,
        optimizer=0 if in_host_memory else state,
        host_optimizer=state if in_host_memory else 0,
    )
    moments = [
        at(
            "loss",
            gradients=early,
            unsharded=held,
            activations=all_kept + 2 * hidden,  # the last block's output, before and after the norm
            working=loss,
        ),
        at(
            "embedding",
            gradients=4 * weights.shard if sizes.pp == 1 else 4 * (weights.shard + weights.total),
            unsharded=held,
            activations=work.received * hidden,
            working=(width + 4) * weights.ends + (weights.head if tp > 1 else 0),
        ),
    ]
    if not work.part.has_output:
        moments = moments[1:]
    for name, others, gradients, reducing in (
        ("last", all_kept - block.kept, early, 0),
        ("first", before_first, late, reduced),
    ):
        in_block = partial(at, gradients=gradients, unsharded=weights.gathered)
        moments += [
            in_block(
                f"{name} feed-forward",
                activations=others + recomputed + block.attention + block.feed_forward,
                working=passing + reducing + block.feed_forward_gradients,
            ),
            in_block(
                f"{name} attention",
                activations=others + recomputed + block.attention,
                working=passing + reducing + block.attention_gradients,
                transport=transport,
            ),
        ]
    return moments
