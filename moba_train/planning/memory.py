"""Peak memory per GPU by part, in bytes: an estimate for choosing a layout.

A step needs most memory at one of a few moments, and the parts never all exist at once: gradients only come as
activations go, and logits are gone before the blocks' gradients begin. Each moment is added up, and the largest counts.
A rank of a pipeline keeps its weights gathered and its gradients whole for all micro-batches of a step.

Assumed: FSDP2 with the units of parallel/fsdp.py, fp32 master weights and gradients, all parameters trained. Left out:
the CUDA context (about 1 GiB), fragmentation and NCCL's buffers, for which `USABLE` leaves room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.model.build import build_attention
from moba_train.model.loss import CHUNK_TOKENS, filled_rows
from moba_train.parallel.activations import FEED_FORWARD_ROWS, Kept, LayerActivations, sent_to_host
from moba_train.parallel.context.costs import TransportMemory
from moba_train.planning.block import block_bytes, input_bytes
from moba_train.planning.pipeline import RankWork, checkpointing_policy, rank_work
from moba_train.planning.weights import Weights, rank_weights

NO_TRANSPORT = TransportMemory()
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
    """Logits of one chunk and their gradient, or gradients on their way through one block and the workspace of its
    attention kernels."""
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


def bytes_per_logit(config: RunConfig, width: int) -> int:
    """Bytes for each logit of a chunk at the loss's peak.

    Log-softmax, its gradient and that of the logits, float32 (benchmarks/loss_memory.py); compiled, the logits and
    their gradient in the compute dtype, to 1 % (benchmarks/results/loss-compare-h200.json).
    """
    return 2 * width if config.compile else 12


class MemoryEstimate:
    """The memory of the ranks in a stage, by what the layers keep."""

    def __init__(self, config: RunConfig, stage: Stage, sizes: MeshSizes) -> None:
        self._config = config
        self._stage = stage
        self._sizes = sizes
        self._width = element_bytes(config)
        self._tokens = -(-stage.micro_batch_size * stage.seq_len // sizes.cp)  # of a micro-batch, in the tp group
        works = [rank_work(config, stage, sizes, rank) for rank in range(sizes.pp)]
        self._ranks = [(work, rank_weights(config, sizes, self._width, work)) for work in works]
        self._optimizer_on_host = config.optim.implementation == "deepspeed_cpu"
        self._block = block_bytes(config.model, self._width, sizes.tp, config.compile, input_bytes(config, self._width))
        kinds = build_attention(stage.attention, config.model.head_width)
        self._saved = [kind.saved_bytes(config.model, stage.seq_len) for kind in kinds]
        self._workspace = [kind.workspace_bytes(config.model, self._width) for kind in kinds]
        # What a kind gathers of other ranks' tokens is kept like its own activations, for each of this rank's tokens.
        others = sizes.cp - 1
        self._own = [
            kind.activation_bytes(config.model, self._width, self._tokens, sizes.cp)
            + others * (kind.gathered_bytes(config.model, self._width) or 0)
            for kind in kinds
        ]

    def kept_bytes(self, layer: int, kept: Kept) -> int:
        """Bytes of one micro-batch that a layer keeps from its forward pass to its backward pass, wherever that is."""
        found = self._block.kept[kept] + (self._saved[layer] if kept >= Kept.ATTENTION else 0)
        return self._on_rank(found + (self._own[layer] if kept is Kept.ALL else 0))

    def host_bytes(self, layers: Sequence[LayerActivations]) -> int:
        """Bytes of host memory that the layers' activations take, without pipeline parallelism."""
        return sum(self._sent_bytes(index, layer) for index, layer in enumerate(layers))

    @property
    def host_optimizer(self) -> int:
        """Bytes of host memory that the optimizer's state takes for each GPU."""
        return max(weights.optimizer for _, weights in self._ranks) if self._optimizer_on_host else 0

    def peak(self, layers: Sequence[LayerActivations], transport: TransportMemory = NO_TRANSPORT) -> Memory:
        """GPU memory at the moment of a step that needs most, on the rank of a pipeline that needs most.

        layers: of the whole model. transport: of context parallelism, in the layer that needs most.
        """
        return max(self.by_rank(layers, transport), key=lambda memory: memory.total)

    def by_rank(self, layers: Sequence[LayerActivations], transport: TransportMemory = NO_TRANSPORT) -> list[Memory]:
        """`peak` of each rank of a pipeline, first layers first; of the only one without pipeline parallelism."""
        moments = self._moments_by_rank(layers, transport)
        return [max(of_rank, key=lambda memory: memory.total) for of_rank in moments]

    def reserved(self, layers: Sequence[LayerActivations], transport: TransportMemory = NO_TRANSPORT) -> int:
        """GPU memory with which a step never waits for more, on the rank of a pipeline that needs most: all gradients,
        and beside them what else the moment takes that takes most.

        FSDP reduces gradients on a stream of its own, and torch keeps the memory of each stream for it. Where that
        leaves too little, torch waits for the GPU and gives back what is free, in each step again.
        """
        moments = self._moments_by_rank(layers, transport)
        return max(
            max(memory.gradients for memory in of_rank) + max(memory.total - memory.gradients for memory in of_rank)
            for of_rank in moments
        )

    def _moments_by_rank(self, layers: Sequence[LayerActivations], transport: TransportMemory) -> list[list[Memory]]:
        return [self._moments(work, weights, layers, transport) for work, weights in self._ranks]

    def _on_rank(self, bytes_per_token: int) -> int:
        return bytes_per_token * self._tokens // self._sizes.tp

    def _sent_bytes(self, index: int, layer: LayerActivations) -> int:
        """Bytes that a layer sends to the host. Without torch.compile, what a recomputed block keeps besides its input
        is out of the offload's sight."""
        in_sight = layer.kept if self._config.compile or layer.kept is Kept.ALL else Kept.INPUT
        return self.kept_bytes(index, in_sight) if layer.on_host else 0

    def _moments(
        self, work: RankWork, weights: Weights, layers: Sequence[LayerActivations], transport: TransportMemory
    ) -> list[Memory]:
        """Memory of a rank at each moment of a step that can be its peak."""
        config, stage, sizes, width = self._config, self._stage, self._sizes, self._width
        tp = sizes.tp
        tokens = self._tokens
        hidden = width * config.model.hidden_size * tokens // tp
        sent = [self._sent_bytes(index, layers[index]) for index in work.layers]
        kept = [self.kept_bytes(index, layers[index].kept) for index in work.layers]
        kept = [whole - away for whole, away in zip(kept, sent, strict=True)]
        buffers = work.received * hidden
        travelling = 2 * max(sent)  # a layer's activations on their way, and those of the layer at work
        all_kept = round(work.kept * sum(kept)) + travelling + buffers

        several = stage.batch_sequences > stage.micro_batch_size * sizes.dp  # gradients of other micro-batches stay
        early = 4 * weights.shard if several else 0
        late = 4 * weights.shard if several else 4 * (weights.shard - weights.ends // sizes.shards)
        in_the_end = 4 * weights.shard
        held = weights.gathered_ends
        in_blocks = weights.block  # whose gradients FSDP reduces at once
        at_end = weights.ends
        if sizes.pp > 1:
            early = late = 4 * weights.total
            in_the_end += 4 * weights.total
            held = weights.gathered
        elif weights.is_one_unit:
            late = early
            held = weights.gathered
            in_blocks = weights.total - weights.ends
            at_end = weights.total
        rows = min(CHUNK_TOKENS, tokens // tp)
        rows = filled_rows(rows) if config.compile else rows
        # The rows of all chunks, their gradient and, from the chunk before, the weight's.
        logits = bytes_per_logit(config, width) * rows * config.model.vocab_size
        loss = logits + 2 * hidden + (weights.head if tokens // tp > CHUNK_TOKENS else 0)
        # In the blocks: the gradients of the output weight, the residual stream and the block's own weights. FSDP
        # reduces the first at the very end, with the embedding's, as both belong to its outermost unit; and so it does
        # with those of all blocks where they belong to it, too.
        passing = weights.head + hidden + width * in_blocks
        reduced = 0 if weights.is_one_unit else 4 * weights.block  # float32, a whole block

        at = partial(
            Memory,
            parameters=4 * weights.shard,
            optimizer=0 if self._optimizer_on_host else weights.optimizer,
            host_optimizer=weights.optimizer if self._optimizer_on_host else 0,
        )
        moments = [
            at(
                "embedding",
                gradients=in_the_end,
                unsharded=held,
                activations=buffers,
                working=(width + 4) * at_end + (weights.head if tp > 1 else 0),
            ),
        ]
        if work.part.has_output:
            moments.append(
                at(
                    "loss",
                    gradients=early,
                    unsharded=held,
                    activations=all_kept + 2 * hidden,  # the last block's output, before and after the norm
                    working=loss,
                )
            )
        for name, index, gone, gradients, reducing in (
            ("last", work.layers[-1], kept[-1], early, 0),
            ("first", work.layers[0], sum(kept), late, reduced),
        ):
            feed_forward, attention = self._at_work(work, layers, index)
            workspace = round(transport.heads_at_once * self._workspace[index])
            at_once = self._fed_at_once(layers[index].kept)
            in_block = partial(at, gradients=gradients, unsharded=weights.gathered)
            moments += [
                in_block(
                    f"{name} feed-forward",
                    activations=all_kept - gone + feed_forward,
                    # In parts, a part's gradient is added to those of the parts before.
                    working=passing
                    + reducing
                    + round(at_once * self._on_rank(self._block.feed_forward_gradients))
                    + (hidden if at_once < 1 else 0),
                ),
                in_block(
                    f"{name} attention",
                    activations=all_kept - gone + attention,
                    # A compiled block's upstream gradient exists until its backward pass ends.
                    working=passing
                    + reducing
                    + (hidden if config.compile else 0)
                    + self._on_rank(self._block.attention_gradients + workspace),
                    transport=round(transport.buffers),
                ),
            ]
        return moments

    def _at_work(self, work: RankWork, layers: Sequence[LayerActivations], index: int) -> tuple[int, int]:
        """Bytes of the block whose backward pass is computed: in its feed-forward, and in its attention.

        A compiled block recomputes for its feed-forward what that needs; without torch.compile a block is recomputed
        as a whole before its backward pass.
        """
        block = self._block
        kept = layers[index].kept
        recomputed = max((self._own[layer] for layer in work.layers if layers[layer].kept < Kept.ALL), default=0)
        kinds = self._saved[index] + (self._own[index] if kept is Kept.ALL else recomputed)
        attention = self._on_rank(block.attention + kinds)
        feed_forward = self._on_rank(block.feed_forward)
        if self._config.compile and kept < Kept.ALL:
            before = block.kept[min(kept, Kept.PROJECTIONS)] + (self._saved[index] if kept >= Kept.ATTENTION else 0)
            return self._on_rank(before) + round(self._fed_at_once(kept) * feed_forward), attention
        return attention + feed_forward, attention

    def _fed_at_once(self, kept: Kept) -> float:
        """Share of a rank's rows that the feed-forward of a compiled block takes at once (parallel/activations.py)."""
        if not self._config.compile or kept >= Kept.PRODUCTS:
            return 1.0
        return min(1.0, FEED_FORWARD_ROWS * self._sizes.tp / self._tokens)


def fixed_activations(config: RunConfig, sizes: MeshSizes) -> tuple[LayerActivations, ...]:
    """What the layers keep on the GPU by a policy that knows no sizes; `budget` counts as `full`."""
    kept = {"none": Kept.ALL, "selective": Kept.PRODUCTS}.get(checkpointing_policy(config, sizes), Kept.ATTENTION)
    return (LayerActivations(kept),) * config.model.layers


def memory_for_buffers(config: RunConfig, stage: Stage, sizes: MeshSizes, gpu_bytes: float) -> float:
    """Bytes of a GPU's memory that are left for the buffers of context parallelism in `stage`."""
    layers = fixed_activations(config, sizes)
    if config.activation_offload:
        layers = sent_to_host(layers)
    return USABLE * gpu_bytes - MemoryEstimate(config, stage, sizes).peak(layers).total


def buffer_memory(config: RunConfig, device: torch.device, stage: Stage, sizes: MeshSizes) -> float | None:
    """`memory_for_buffers` of this rank's GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    return memory_for_buffers(config, stage, sizes, torch.cuda.get_device_properties(device).total_memory)
