"""The moments of a step at which a rank can need most memory.

The parts never all exist at once: gradients only come as activations go, and logits are gone before the blocks'
gradients begin. A rank of a pipeline keeps its weights gathered and its gradients whole for all micro-batches of a
step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.memory.layer_memory import LayerMemory
from moba_train.memory.pipeline import RankWork
from moba_train.memory.weights import Weights
from moba_train.model.loss import chunk_tokens, filled_rows
from moba_train.model.objective import objective_costs
from moba_train.parallel.activations import LayerActivations
from moba_train.parallel.context.costs import TransportMemory
from moba_train.parallel.fsdp import Computation


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU by part, at the moment of a step that needs most."""

    moment: str
    """Name of what is computed then: the loss, or the backward pass of a part of the last or first block, or of the
    embedding."""
    parameters: int
    """fp32 master weights, sharded; those that are gathered in FP8 once more, in FP8; buffers of copy engines."""
    optimizer: int
    """State of the optimizer, sharded: for AdamW two fp32 moments, none where they are in host memory; for Muon one of
    the matrices."""
    gradients: int
    """fp32, sharded: those that exist at this moment; in a pipeline whole."""
    unsharded: int
    """Gathered weights in the compute dtype: embedding and output, and two blocks (one at work, one prefetched); in a
    pipeline all of the rank's. In the loss also the buffer of FSDP's last gather (`Weights.copied`)."""
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
    host_copies: int = 0
    """The copy of weights and optimizer state in host memory from which a checkpoint is written, for each GPU; not in
    `total`."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, part) for part in MEMORY_PARTS)


MEMORY_PARTS = ("parameters", "optimizer", "gradients", "unsharded", "activations", "working", "transport")
"""Fields of `Memory` that are bytes on the GPU, in the order to print."""


def bytes_per_logit(computation: Computation, is_capped: bool = False) -> int:
    """Bytes for each logit of a chunk at the loss's peak.

    Log-softmax, its gradient and that of the logits, float32 (benchmarks/loss_memory.py), and the tanh of a cap;
    compiled, the logits and their gradient in the compute dtype, to 1 % (benchmarks/results/loss-compare-h200.json).
    """
    return 2 * computation.width if computation.compiled else 16 if is_capped else 12


class _Gradients(NamedTuple):
    """Bytes of gradients on a rank as its backward pass goes on, and of the weights that it has gathered meanwhile."""

    early: int
    """float32, while the loss and the last block are computed: those of other micro-batches."""
    late: int
    """float32, while the first block is computed."""
    in_the_end: int
    """float32, all."""
    reduced: int
    """Bytes of the buffers in which a whole block's gradients travel to the ranks that keep them."""
    in_blocks: int
    """Elements whose gradients FSDP reduces together, of the blocks."""
    at_the_end: int
    """Elements whose gradients it reduces at the very end."""
    gathered: int
    """Weights that are gathered outside the blocks."""


def _gradients(stage: Stage, sizes: MeshSizes, weights: Weights) -> _Gradients:
    several = stage.batch_sequences > stage.micro_batch_size * sizes.dp  # gradients of other micro-batches stay
    trained = weights.trained
    shard = 4 * trained.shard
    block_by_block = _Gradients(
        early=shard if several else 0,
        late=shard if several else 4 * (trained.shard - trained.outer // sizes.shards),
        in_the_end=shard,
        reduced=weights.gradient * trained.largest_block,
        in_blocks=trained.largest_block,
        at_the_end=trained.outer,
        gathered=weights.gathered_outer,
    )
    if sizes.pp > 1:
        whole = 4 * trained.total
        return block_by_block._replace(early=whole, late=whole, in_the_end=shard + whole, gathered=weights.gathered)
    if weights.is_one_unit:
        return block_by_block._replace(
            late=block_by_block.early,
            reduced=0,
            in_blocks=trained.total - trained.ends,
            at_the_end=trained.total,
            gathered=weights.gathered,
        )
    return block_by_block


class RankMoments:
    """The moments of one rank's step."""

    def __init__(
        self,
        model: ModelConfig,
        computation: Computation,
        stage: Stage,
        sizes: MeshSizes,
        work: RankWork,
        weights: Weights,
        memory: LayerMemory,
        *,
        optimizer_on_host: bool,
        saves: bool,
    ) -> None:
        """memory: of the rank's layers. optimizer_on_host: its state is in host memory. saves: the run saves
        checkpoints, each from a copy in host memory."""
        self._model = model
        self._computation = computation
        self._width = computation.width
        self._zero_bubble = stage.parallel.pp_schedule == "zero_bubble"
        self._sizes = sizes
        self._work = work
        self._weights = weights
        self._memory = memory
        self._logit_peak = objective_costs(stage).logit_peak
        self._gradients = _gradients(stage, sizes, weights)
        host_optimizer = weights.optimizer if optimizer_on_host else 0
        trained = weights.trained.shard
        host_copies = 4 * trained + weights.optimizer if saves else 0
        self.host_taken = host_optimizer + host_copies
        """Bytes of host memory for each GPU, whatever the layers keep."""
        self._at = partial(
            Memory,
            parameters=4 * trained + self._width * (weights.shard - trained) + weights.cast + weights.buffers,
            optimizer=0 if optimizer_on_host else weights.optimizer,
            host_optimizer=host_optimizer,
            host_copies=host_copies,
        )
        self._buffers = work.received * memory.hidden
        # In the blocks: the gradients of the residual stream and the block's own weights, and of the output weight
        # where FSDP's outermost unit has it, which is reduced at the very end; and so are those of all blocks where
        # they also belong to it.
        in_outer = weights.head if weights.outer == weights.ends else 0
        self._passing = in_outer + memory.hidden + self._width * self._gradients.in_blocks

    def every(self, layers: Sequence[LayerActivations], transport: TransportMemory) -> list[Memory]:
        """All of them. layers: what the layers of the whole model keep; transport: of context parallelism."""
        work, memory = self._work, self._memory
        sent = [memory.sent(layer, layers[layer]) for layer in work.layers]
        whole = [memory.kept(layer, layers[layer].kept) for layer in work.layers]
        kept = [here - away for here, away in zip(whole, sent, strict=True)]
        travelling = 2 * max(sent)  # a layer's activations on their way, and those of the layer at work
        all_kept = round(work.kept * sum(kept)) + travelling + self._buffers + self._kept_by_loss()
        held = self._weights.held * sum(size for layer, size in self._weights.blocks.items() if layers[layer].weights)
        moments = [self._embedding()]
        if work.part.has_output:
            moments.append(self._loss(all_kept, held))
        last, first = work.layers[-1], work.layers[0]
        unsharded = max(self._weights.gathered, self._gradients.gathered + held)
        in_last = partial(self._at, gradients=self._gradients.early, unsharded=unsharded)
        in_first = partial(self._at, gradients=self._gradients.late, unsharded=self._weights.gathered)
        head = self._weights.trained.ends - self._weights.trained.outer
        reduced = self._weights.gradient * head + 4 * head // self._sizes.shards
        moments += self._in_block("last", last, layers, all_kept - kept[-1], transport, in_last, reduced)
        reduced = self._gradients.reduced
        moments += self._in_block("first", first, layers, all_kept - sum(kept), transport, in_first, reduced)
        return moments

    def _kept_by_loss(self) -> int:
        """Gradients of the loss of other micro-batches, which a backward pass in two parts keeps until the second."""
        if not self._work.part.has_output or not self._zero_bubble:
            return 0
        return round((self._work.kept - 1) * (self._memory.hidden + self._weights.head))

    def _embedding(self) -> Memory:
        head = self._weights.head if self._sizes.tp > 1 else 0
        return self._at(
            "embedding",
            gradients=self._gradients.in_the_end,
            unsharded=self._gradients.gathered,
            activations=self._buffers,
            working=(self._width + self._weights.gradient) * self._gradients.at_the_end + head,
        )

    def _loss(self, all_kept: int, held: int) -> Memory:
        rows_here = self._memory.tokens // self._sizes.tp
        complete = chunk_tokens(self._model.vocab_size)
        own = self._logit_peak * min(complete, rows_here)
        rows = min(complete, rows_here)
        rows = filled_rows(rows) if self._computation.compiled else rows
        logits = max(own, bytes_per_logit(self._computation, self._model.logits_cap is not None) * rows)
        logits *= self._model.vocab_size
        chunk = logits + 2 * min(rows, rows_here) * self._width * self._model.hidden_size
        # Their gradients, whose sums over chunks are scaled.
        hidden, weight = self._memory.hidden, self._weights.head if self._weights.trained.ends else 0
        last_chunk = chunk + hidden + (weight if rows_here > complete else 0)
        copied = self._weights.copied  # freed before the backward pass, which scales the sums
        return self._at(
            "loss",
            gradients=self._gradients.early,
            unsharded=self._gradients.gathered
            + self._weights.gathered_ends
            - self._weights.gathered_outer
            + held
            + copied,
            # The last block's output, before and after the norm, and that of a teacher.
            activations=all_kept + (3 if own else 2) * hidden,
            working=max(last_chunk, 2 * (hidden + weight) - copied),
        )

    def _in_block(
        self,
        name: str,
        layer: int,
        layers: Sequence[LayerActivations],
        kept: int,
        transport: TransportMemory,
        at: partial[Memory],
        reduced: int,
    ) -> Iterator[Memory]:
        """The backward pass of a block, while other blocks keep `kept` bytes and gradients of `reduced` are on their
        way."""
        feed_forward, attention = self._memory.at_work(self._work, layers, layer)
        yield at(
            f"{name} feed-forward",
            activations=kept + feed_forward,
            working=self._passing + reduced + self._memory.feed_forward_gradients(layers[layer].kept, layer),
        )
        yield at(
            f"{name} attention",
            activations=kept + attention,
            working=self._passing + reduced + self._memory.attention_gradients(layer, transport.heads_at_once),
            transport=round(transport.buffers),
        )
