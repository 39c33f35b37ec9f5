"""Peak memory per GPU by part, in bytes: an estimate for choosing a layout.

A step needs most memory at one of a few moments, and the parts never all exist at once: gradients only come as
activations go, and logits are gone before the blocks' gradients begin. Each moment is added up, and the largest counts.

Assumed: FSDP2 with one unit a block, fp32 master weights and gradients, all parameters trained. Left out: the CUDA
context (about 1 GiB), fragmentation, NCCL's buffers and workspaces of attention kernels, for which `USABLE`
leaves room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.model.build import build_attention
from moba_train.model.loss import CHUNK_TOKENS
from moba_train.optim.registry import OPTIMIZERS
from moba_train.parallel.activations import Kept, LayerActivations
from moba_train.planning.block import block_bytes
from moba_train.planning.parameters import count_recipe_parameters

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
    """State of the optimizer, sharded; for AdamW two fp32 moments."""
    gradients: int
    """fp32, sharded: those that exist at this moment."""
    unsharded: int
    """Gathered weights in the compute dtype: embedding and output, and two blocks (one at work, one prefetched)."""
    activations: int
    """Tensors of one micro-batch that the forward pass, or a block's recomputation, keeps for the backward pass."""
    working: int
    """Logits of one chunk with log-softmax and gradient, or gradients on their way through one block."""
    transport: int = 0
    """Buffers of context parallelism, of one layer at a time."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, part) for part in MEMORY_PARTS)


MEMORY_PARTS = ("parameters", "optimizer", "gradients", "unsharded", "activations", "working", "transport")
"""Fields of `Memory` that are bytes, in the order to print."""


def element_bytes(config: RunConfig) -> int:
    """Bytes of one element in the compute dtype of the layers, on a GPU."""
    return 4 if config.precision.compute == "fp32" else 2


class MemoryEstimate:
    """The memory of one rank in a stage, by what its layers keep."""

    def __init__(self, config: RunConfig, stage: Stage, sizes: MeshSizes) -> None:
        self._config = config
        self._stage = stage
        self._sizes = sizes
        self._width = element_bytes(config)
        self._tokens = -(-stage.micro_batch_size * stage.seq_len // sizes.cp)  # of a micro-batch, in the tp group
        self._weights = _weights(config, sizes, self._width)
        self._block = block_bytes(config.model, self._width, sizes.tp, config.compile)
        kinds = build_attention(stage.attention, config.model.head_width)
        self._saved = [kind.saved_bytes(config.model, stage.seq_len) for kind in kinds]
        self._own = [kind.activation_bytes(config.model, self._width) for kind in kinds]

    def kept_bytes(self, layer: int, kept: Kept) -> int:
        """Bytes that a layer keeps from its forward pass to its backward pass, wherever it keeps them."""
        found = self._block.kept[kept] + (self._saved[layer] if kept >= Kept.ATTENTION else 0)
        return self._on_rank(found + (self._own[layer] if kept is Kept.ALL else 0))

    def host_bytes(self, layers: Sequence[LayerActivations]) -> int:
        """Bytes of host memory that the layers' activations take."""
        return sum(self._sent_bytes(index, layer) for index, layer in enumerate(layers))

    def peak(self, layers: Sequence[LayerActivations], transport: float = 0) -> Memory:
        """GPU memory at the moment of a step that needs most.

        transport: bytes of the rank's buffers for context parallelism.
        """
        return max(self._moments(layers, round(transport)), key=lambda memory: memory.total)

    def _on_rank(self, bytes_per_token: int) -> int:
        return bytes_per_token * self._tokens // self._sizes.tp

    def _sent_bytes(self, index: int, layer: LayerActivations) -> int:
        """Bytes that a layer sends to the host. Without torch.compile, what a recomputed block keeps besides its input
        is out of the offload's sight."""
        in_sight = layer.kept if self._config.compile or layer.kept is Kept.ALL else Kept.INPUT
        return self.kept_bytes(index, in_sight) if layer.on_host else 0

    def _moments(self, layers: Sequence[LayerActivations], transport: int) -> list[Memory]:
        """Memory at each moment of a step that can be its peak."""
        config, stage, sizes, width, weights = self._config, self._stage, self._sizes, self._width, self._weights
        tp = sizes.tp
        tokens = self._tokens
        hidden = width * config.model.hidden_size * tokens // tp
        sent = [self._sent_bytes(index, layer) for index, layer in enumerate(layers)]
        kept = [self.kept_bytes(index, layer.kept) - sent[index] for index, layer in enumerate(layers)]
        travelling = 2 * max(sent)  # a layer's activations on their way, and those of the layer at work

        several = stage.batch_sequences > stage.micro_batch_size * sizes.dp  # gradients of other micro-batches stay
        early = 4 * weights.shard if several else 0
        late = 4 * weights.shard if several else 4 * (weights.shard - weights.ends // sizes.shards)
        rows = min(CHUNK_TOKENS, tokens // tp)
        # log-softmax, its gradient and that of the logits, float32 (benchmarks/loss_memory.py); the rows of all chunks,
        # their gradient and, from the chunk before, the weight's
        loss = 12 * rows * config.model.vocab_size + 2 * hidden + (weights.head if tokens // tp > CHUNK_TOKENS else 0)
        # In the blocks: the gradients of the output weight, the residual stream and the block's own weights. FSDP
        # reduces the first at the very end, with the embedding's, as both belong to its outermost unit.
        passing = weights.head + hidden + width * weights.block
        reduced = 4 * weights.block  # float32, a whole block

        state_bytes = OPTIMIZERS[config.optim.kind].state_bytes
        at = partial(Memory, parameters=4 * weights.shard, optimizer=state_bytes * weights.shard)
        moments = [
            at(
                "loss",
                gradients=early,
                unsharded=weights.gathered_ends,
                activations=sum(kept) + travelling + 2 * hidden,  # the last block's output, before and after the norm
                working=loss,
            ),
            at(
                "embedding",
                gradients=4 * weights.shard,
                unsharded=weights.gathered_ends,
                activations=0,
                working=(width + 4) * weights.ends + (weights.head if tp > 1 else 0),
            ),
        ]
        for name, index, gradients, reducing in (("last", -1, early, 0), ("first", 0, late, reduced)):
            others = (sum(kept[:-1]) if index else 0) + travelling
            feed_forward, attention = map(self._on_rank, self._at_work(layers, index))
            in_block = partial(at, gradients=gradients, unsharded=weights.gathered)
            moments += [
                in_block(
                    f"{name} feed-forward",
                    activations=others + feed_forward,
                    working=passing + reducing + self._on_rank(self._block.feed_forward_gradients),
                ),
                in_block(
                    f"{name} attention",
                    activations=others + attention,
                    working=passing + reducing + self._on_rank(self._block.attention_gradients),
                    transport=transport,
                ),
            ]
        return moments

    def _at_work(self, layers: Sequence[LayerActivations], index: int) -> tuple[int, int]:
        """Bytes for each token of the block whose backward pass is computed: in its feed-forward, and in its attention.

        A compiled block recomputes for its feed-forward what that needs; without torch.compile a block is recomputed
        as a whole before its backward pass.
        """
        block = self._block
        kept = layers[index].kept
        recomputed = max(
            (own for own, layer in zip(self._own, layers, strict=True) if layer.kept < Kept.ALL), default=0
        )
        kinds = self._saved[index] + (self._own[index] if kept is Kept.ALL else recomputed)
        attention = block.attention + kinds
        if self._config.compile and kept < Kept.ALL:
            before = block.kept[min(kept, Kept.PROJECTIONS)] + (self._saved[index] if kept >= Kept.ATTENTION else 0)
            return before + block.feed_forward, attention
        return attention + block.feed_forward, attention


def fixed_activations(config: RunConfig) -> tuple[LayerActivations, ...]:
    """What the layers keep on the GPU by a policy that knows no sizes; `budget` counts as `full`."""
    kept = {"none": Kept.ALL, "selective": Kept.PRODUCTS}.get(config.activation_checkpointing, Kept.ATTENTION)
    return (LayerActivations(kept),) * config.model.layers


def memory_for_buffers(config: RunConfig, stage: Stage, sizes: MeshSizes, gpu_bytes: float) -> float:
    """Bytes of a GPU's memory that are left for the buffers of context parallelism in `stage`."""
    return USABLE * gpu_bytes - MemoryEstimate(config, stage, sizes).peak(fixed_activations(config)).total


def buffer_memory(config: RunConfig, device: torch.device, stage: Stage, sizes: MeshSizes) -> float | None:
    """`memory_for_buffers` of this rank's GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    return memory_for_buffers(config, stage, sizes, torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True)
class _Weights:
    """Numbers and bytes of weights on a rank. The ends are the embedding and the output projection."""

    shard: int
    """Parameters that the rank keeps."""
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


def _weights(config: RunConfig, sizes: MeshSizes, width: int) -> _Weights:
    counts = count_recipe_parameters(config)
    ends = (counts.embedding + counts.output) // sizes.tp
    block = counts.without_embeddings // config.model.layers // sizes.tp
    head = width * config.model.vocab_size * config.model.hidden_size
    gathered_ends = width * ends + (head if sizes.tp > 1 else 0)
    return _Weights(
        shard=-(-counts.total // (sizes.shards * sizes.tp)),
        ends=ends,
        block=block,
        head=head,
        gathered_ends=gathered_ends,
        gathered=gathered_ends + _gathered_bytes(config, width) * min(2, config.model.layers) * block,
    )
