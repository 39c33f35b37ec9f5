"""Memory per GPU by part, in bytes: an estimate for choosing a layout, not a promise.

Assumed: FSDP2 with one unit a block, fp32 master weights and gradients. Left out: the CUDA context (about 1 GiB),
fragmentation, NCCL's buffers and attention workspaces.
"""

from dataclasses import dataclass, fields

import torch

from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.model.build import build_attention
from moba_train.model.loss import CHUNK_TOKENS
from moba_train.optim.registry import OPTIMIZERS
from moba_train.planning.parameters import count_recipe_parameters

USABLE = 0.9
"""Fraction of a GPU's memory that a run can use; the CUDA context, NCCL and fragmentation take the rest."""


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU by part."""

    parameters: int
    """fp32 master weights, sharded."""
    gradients: int
    """fp32, sharded."""
    optimizer: int
    """State of the optimizer, sharded; for AdamW two fp32 moments."""
    unsharded: int
    """Gathered weights in the compute dtype: two blocks (one at work, one prefetched), embedding and output."""
    activations: int
    """Tensors that the forward pass of one micro-batch keeps for the backward pass."""
    logits: int
    """One chunk of logits, with log-softmax and gradient."""
    transport: int
    """Buffers of context parallelism, of one layer at a time."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


def element_bytes(config: RunConfig) -> int:
    """Bytes of one element in the compute dtype of the layers, on a GPU."""
    return 4 if config.precision.compute == "fp32" else 2


def estimate_memory(config: RunConfig, stage: Stage, sizes: MeshSizes, transport: float = 0) -> Memory:
    """Memory of one rank in `stage`, on a mesh of these sizes.

    transport: bytes of the rank's buffers for context parallelism.
    """
    tp = sizes.tp
    model = config.model
    tokens = -(-stage.micro_batch_size * stage.seq_len // sizes.cp)  # of a micro-batch, in the rank's tp group
    kinds = build_attention(stage.attention, model.head_width)
    saved_by_kinds = sum(kind.saved_bytes(model, stage.seq_len) for kind in kinds)
    counts = count_recipe_parameters(config)
    width = element_bytes(config)
    checkpointing = config.activation_checkpointing == "full"
    shard = -(-counts.total // (sizes.shards * tp))
    blocks = min(2, model.layers) * counts.without_embeddings // model.layers
    return Memory(
        parameters=4 * shard,
        gradients=4 * shard,
        optimizer=OPTIMIZERS[config.optim.kind].state_bytes * shard,
        # the loss gathers the full output weight over the tp group
        unsharded=width * ((blocks + counts.embedding + counts.output) // tp + (counts.embedding if tp > 1 else 0)),
        activations=(_activations(model, checkpointing, width, tp) + saved_by_kinds) * tokens // tp,
        # logits in the compute dtype, and three fp32 tensors: their copy, log-softmax, gradient
        logits=min(CHUNK_TOKENS, tokens // tp) * model.vocab_size * (width + 12),
        transport=round(transport),
    )


def buffer_memory(config: RunConfig, device: torch.device, stage: Stage, sizes: MeshSizes) -> float | None:
    """Bytes of a GPU's memory that are left for the buffers of context parallelism in `stage`; None on a CPU."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return USABLE * total - estimate_memory(config, stage, sizes).total


def _activations(model: ModelConfig, checkpointing: bool, width: int, tp: int) -> int:
    """Bytes per token that all layers keep, `width` bytes an element, over all ranks of a tp group.

    One block keeps the inputs of both norms and of the projections behind them (4 D), rotated queries and keys,
    values and the attention's output (and the queries and keys before qk_norm), the fp32 LSE, and four tensors of
    the SwiGLU. Every rank of a tp group holds the gathered inputs of the projections, 2 D. With checkpointing every
    block keeps its input and its attention's output and LSE, and one block at a time keeps everything.
    """
    queries = model.heads * model.head_width
    keys = model.kv_heads * model.head_width
    heads = 2 * queries + 2 * keys + (queries + keys if model.qk_norm else 0)
    block = width * ((2 + 2 * tp) * model.hidden_size + heads + 4 * model.intermediate_size) + 4 * model.heads
    kept = width * (model.hidden_size + queries) + 4 * model.heads
    return model.layers * kept + block if checkpointing else model.layers * block
