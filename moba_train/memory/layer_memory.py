"""Bytes of a rank's layers for one micro-batch: what stays while other blocks work, and what a block at work takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.attention.kind import MicroBatch
from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.memory.pipeline import RankWork
from moba_train.model.build import build_attention
from moba_train.model.feed_forward import feed_forward_costs
from moba_train.model.objective import objective_costs
from moba_train.parallel.activations import FEED_FORWARD_ROWS, Kept, LayerActivations
from moba_train.parallel.fsdp import Computation


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block's activations for each token of a tp group, without those that only some attention kinds have;
    a rank of the group has its part of them."""

    attention: int
    """All tensors that attention and its projections keep for their backward pass."""
    feed_forward: int
    """All tensors that the SwiGLU and its norm keep."""
    kept: dict[Kept, int]
    """Bytes that stay while other blocks work, by what the block keeps."""
    attention_gradients: int
    """Gradients of queries, keys, values and the attention's output."""
    feed_forward_gradients: int
    """Gradients inside the SwiGLU beyond the activations that they replace."""


def input_bytes(computation: Computation) -> int:
    """Bytes of each element of what a projection keeps of its input.

    Compiled, a layer in FP8 keeps the input in FP8 where forward and backward pass round it alike: with tensorwise
    scaling. With a scale for each row the backward pass rounds the input once more, and a compiled block computes that
    again from what it keeps anyway. Uncompiled, a layer keeps the input itself.
    """
    precision = computation.precision
    if not computation.compiled or precision.linear != "fp8" or precision.implementation != "torchao":
        return computation.width
    return 1 if precision.gathers_fp8 else 0


def block_bytes(
    model: ModelConfig, width: int, tp: int, compiled: bool, input_width: int, layer: int = 0
) -> BlockBytes:
    """Activations of a block with the feed-forward of `layer`, `width` bytes an element. Experts in addition keep the
    copies of a token's hidden state that go into them, which every rank of a tp group has; uncompiled, also what they
    multiply by the router's weights.

    A block that is not recomputed keeps the inputs of its norms and of the projections behind them (4 D, or 6 D with
    norms on both sides; every rank of a tp group holds the gathered inputs of the projections), rotated queries and
    keys, values and the attention's output (and the queries and keys before qk_norm, with its fp32 scales), the fp32
    LSE, and four tensors of the SwiGLU. A compiled block recomputes one of these four: 4.00 GiB less were measured on
    16 layers (benchmarks/results/training-1b-h200.json).
    Inputs of projections take `input_width` bytes an element; that of the output projection, which attention keeps for
    itself, as many as the compute dtype has. In FP8 5.5 GiB less are predicted on 32 layers, 5.8 were measured; with a
    scale for each row 11.0 and 10.9 (benchmarks/results/training-8b-h200-x2.json).
    """
    queries = model.heads * model.head_width
    keys = model.kv_heads * model.head_width
    hidden = model.hidden_size
    lse = 4 * model.heads
    heads = 2 * queries + 2 * keys + (queries + keys if model.qk_norm else 0)
    normed = hidden * (2 if model.norms == "both" else 1)
    scales = {False: 0, True: model.heads + model.kv_heads, "all_heads": 2}[model.qk_norm]
    attention = width * (normed + heads) + input_width * tp * hidden + lse + 4 * scales
    fed = feed_forward_costs(model, layer)
    feed_forward = width * (normed + (2 if compiled else 4 if fed.copies else 3) * fed.width + tp * fed.copies * hidden)
    feed_forward += input_width * (tp * hidden + fed.width)
    added = {
        Kept.INPUT: width * hidden,
        Kept.ATTENTION: width * queries + lse,
        Kept.PROJECTIONS: width * (queries + 2 * keys + hidden),
        Kept.PRODUCTS: width * 2 * fed.width,
    }
    kept = {level: sum(added[below] for below in added if below <= level) for level in added}
    return BlockBytes(
        attention=attention,
        feed_forward=feed_forward,
        kept=kept | {Kept.ALL: attention + feed_forward},
        attention_gradients=width * 2 * (queries + keys),
        feed_forward_gradients=width * (1 if compiled else 2) * fed.width,
    )


class LayerMemory:
    """The layers of a stage on one rank; results are bytes. Layers are numbered as in the whole model."""

    def __init__(self, model: ModelConfig, computation: Computation, stage: Stage, sizes: MeshSizes) -> None:
        width = computation.width
        self._compiled = computation.compiled
        self._tp = sizes.tp
        self.tokens = -(-stage.micro_batch_size * stage.seq_len // sizes.cp)
        """Tokens of a micro-batch that the rank, or the tp group that it is in, works on."""
        self.hidden = width * model.hidden_size * self.tokens // sizes.tp
        """Bytes of the residual stream of one micro-batch on the rank."""
        compiled = computation.compiled
        inputs = input_bytes(computation)
        self._blocks = [block_bytes(model, width, sizes.tp, compiled, inputs, n) for n in range(model.layers)]
        self._copies = [feed_forward_costs(model, layer).copies for layer in range(model.layers)]
        self._ep = stage.parallel.ep
        kinds = build_attention(stage.attention, model.head_width)
        batch = MicroBatch(width, stage.seq_len, self.tokens, sizes.cp, sizes.tp)
        costs = [kind.token_bytes(model, batch) for kind in kinds]
        self._saved = [cost.saved for cost in costs]
        self._workspace = [cost.workspace for cost in costs]
        # What a kind gathers of other ranks' tokens is kept like its own activations, for each of this rank's tokens.
        others = sizes.cp - 1
        self._own = [cost.activations + others * (cost.gathered or 0) for cost in costs]
        for layer, gates in enumerate(map(model.gates, range(model.layers))):
            # The sigmoid, and what the output projection is given instead of the attention's output.
            self._own[layer] += width * (gates + model.heads * model.head_width) * (gates > 0)
        objective = objective_costs(stage)
        for layer, compared in enumerate(objective.attention):
            self._own[layer] += objective.kept_bytes * model.heads * model.head_width * (compared is not None)

    def kept(self, layer: int, kept: Kept) -> int:
        """Bytes that a layer keeps from its forward pass to its backward pass, on the GPU or its host."""
        found = self._blocks[layer].kept[kept] + (self._saved[layer] if kept >= Kept.ATTENTION else 0)
        return self._on_rank(found + (self._own[layer] if kept is Kept.ALL else 0))

    def sent(self, layer: int, activations: LayerActivations) -> int:
        """Bytes that a layer sends to the host. Without torch.compile, the offload does not see what a recomputed block
        keeps in addition to its input."""
        in_sight = activations.kept if self._compiled or activations.kept is Kept.ALL else Kept.INPUT
        return self.kept(layer, in_sight) if activations.on_host else 0

    def at_work(self, work: RankWork, layers: Sequence[LayerActivations], layer: int) -> tuple[int, int]:
        """Bytes of the block whose backward pass is computed: in its feed-forward, and in its attention.

        A compiled block recomputes for its feed-forward what that needs; without torch.compile a block is recomputed
        as a whole before its backward pass.
        """
        block = self._blocks[layer]
        kept = layers[layer].kept
        recomputed = max((self._own[one] for one in work.layers if layers[one].kept < Kept.ALL), default=0)
        kinds = self._saved[layer] + (self._own[layer] if kept is Kept.ALL else recomputed)
        attention = self._on_rank(block.attention + kinds)
        feed_forward = self._on_rank(block.feed_forward)
        if self._compiled and kept < Kept.ALL:
            before = block.kept[min(kept, Kept.PROJECTIONS)] + (self._saved[layer] if kept >= Kept.ATTENTION else 0)
            return self._on_rank(before) + round(self._fed_at_once(kept, layer) * feed_forward), attention
        return attention + feed_forward, attention

    def feed_forward_gradients(self, kept: Kept, layer: int) -> int:
        """Gradients inside the feed-forward of a layer that keeps this; in parts, a part's gradient of its input is
        added to those of the parts before. Of experts also two tensors of a token's copies, or four where these travel
        (counted on a CPU, tests/mechanisms/test_planned_memory.py)."""
        at_once = self._fed_at_once(kept, layer)
        inside = round(at_once * self._on_rank(self._blocks[layer].feed_forward_gradients))
        inside += (4 if self._ep > 1 else 2) * self._copies[layer] * self._tp * self.hidden
        return inside + (self.hidden if at_once < 1 else 0)

    def attention_gradients(self, layer: int, heads_at_once: float) -> int:
        """Gradients inside a layer's attention and the workspace of its kernels, which work on this share of the heads
        at once; and a compiled block's upstream gradient, which exists until its backward pass ends."""
        workspace = round(heads_at_once * self._workspace[layer])
        upstream = self.hidden if self._compiled else 0
        return upstream + self._on_rank(self._blocks[layer].attention_gradients + workspace)

    def _on_rank(self, bytes_per_token: int) -> int:
        return bytes_per_token * self.tokens // self._tp

    def _fed_at_once(self, kept: Kept, layer: int) -> float:
        """Share of a rank's rows that the feed-forward of a compiled block takes at once (parallel/activations.py);
        experts take all."""
        if not self._compiled or self._copies[layer] or kept >= Kept.PRODUCTS:
            return 1.0
        return min(1.0, FEED_FORWARD_ROWS * self._tp / self.tokens)
