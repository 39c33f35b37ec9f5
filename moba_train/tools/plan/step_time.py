"""Predicted time of one optimizer step: computation by measured rates, and the communication that it cannot hide.

Every part of the step that a GPU computes takes its operations, or the bytes that it moves in memory, over a measured
rate (rates.py). Communication takes its bytes over the bandwidth of the links (parallel/links.py). It is hidden as
follows: FSDP's gathers behind the forward pass of other blocks, its gathers and reductions behind the backward pass,
and the part of context parallelism that need not come first behind attention. Nothing hides tensor parallelism without
`tp_overlap` and what a pipeline's ranks pass on. Left out are the host's time, which decides where a rank has few
tokens, evaluations, checkpoints, data, activations on their way to the host, and steps that train with other attention
than their stage's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from moba_train.attention.full.kernels import Cudnn
from moba_train.attention.kernels.table import varlen_problem
from moba_train.config.attention import LayerAttention
from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.errors import PlanError
from moba_train.memory.activations import StageActivations
from moba_train.memory.devices import H200, Gpu
from moba_train.memory.flops import Documents, layer_flops
from moba_train.memory.layer_memory import block_bytes
from moba_train.memory.pipeline import rank_costs, rank_work, step_length
from moba_train.memory.weights import gathered_bytes, rank_weights
from moba_train.model.feed_forward import FeedForwardCosts, feed_forward_costs
from moba_train.model.objective import objective_costs
from moba_train.model.spec import attention_matrices
from moba_train.parallel.activations import Kept
from moba_train.parallel.fsdp import ModelSetup
from moba_train.parallel.links import LinkedGroup, Links, Traffic, linked_group
from moba_train.parallel.stage_strategy import stage_costs
from moba_train.resolve.run import StageLayout
from moba_train.tools.plan.rates import CALIBRATE, Rates, read_rates, shipped_rates

# Of tensor parallelism in a block: attention and SwiGLU each gather their input and reduce their output, and do the
# reverse for the gradients.
_TRANSFERS = 8
_NOT_OVERLAPPED = 2  # of these with `tp_overlap` (parallel/tensor.py)
_CONTEXT_TRANSFERS = 3  # keys and values in the forward and the backward pass, and their gradients
# Bytes that a GPU reads and writes for each weight:
GATHERED_COPIES = 4  # at each gather: bf16, out of the buffer of the gather
SHARD_COPIES = 6  # of the rank's shard, at each gather: float32 to bf16
ACCUMULATED_COPIES = 10  # a gradient, bf16, is added to a float32 sum, in a pipeline or where no other rank has a part
FIRST_COPIES = 6  # where no other rank has a part, of the first gradient: bf16 to float32
NORM_BYTES = 4  # of the rank's shard: its gradient, float32, is read for the norms

GROUPED_SPEED = 0.79
"""Grouped products of experts, relative to others: 575 of 726 TFLOP/s, for groups of 2,048 rows on an H200
(benchmarks/results/training-profile-experts-64k-h200.json; training-profile-experts-64k-dense-h200.json)."""


class Machine(NamedTuple):
    """The machines that a run is predicted for."""

    gpu: Gpu
    ranks_per_node: int
    links: Links
    rates: Rates
    full_by_torch: bool = False
    """True if `auto` of full attention, whose shipped rates are those of flash-attn-4, has torch's own kernels."""


def make_machine(
    gpu: Gpu | None, ranks_per_node: int, network: float, rates: Path | None, is_here: bool = False
) -> Machine:
    """The machines to predict for: those of the file `rates`, else of the GPU with its shipped rates, else of an H200.

    network: Gbit/s of each GPU's adapter to other nodes; is_here: `gpu` is this machine's, whose packages count. Raises
    PlanError for a file that holds no rates.
    """
    found = read_rates(rates) if rates is not None else shipped_rates(gpu or H200)
    device = torch.device("cuda")
    by_torch = is_here and rates is None and bool(varlen_problem("flash-attn-4", device, torch.bfloat16, 128))
    return Machine(gpu or found.device, ranks_per_node, found.links(network), found, by_torch)


AttentionTimes = Mapping[LayerAttention, tuple[float, float]]
"""Seconds of each attention of a stage for a token, over the ranks that share it: forward, and forward and backward."""


def attention_times(model: ModelConfig, stage: Stage, documents: Documents, machine: Machine) -> AttentionTimes:
    """Times of the attentions of a stage, and of its objective, whose sequences hold `documents`. They are the same on
    every mesh.

    Raises PlanError for a kind that was not measured.
    """
    found = {}
    rates = machine.rates
    teachers = (layer for layer in objective_costs(stage).attention if layer is not None)
    for layer in dict.fromkeys((*stage.attention, *teachers)):
        timed = layer
        if machine.full_by_torch and (layer.kind, getattr(layer.options, "backend", "")) == ("full", "auto"):
            by_cudnn = len({*documents.lengths}) == 1 and model.head_width in Cudnn.widths
            by_torch = {"backend": "cudnn" if by_cudnn else "flash"}
            timed = replace(layer, options=layer.options.model_copy(update=by_torch))
        rate = rates.attention_rate(timed, model.head_width, stage.seq_len)
        flops = layer_flops(model, layer, documents.lengths) / documents.tokens / rates.attention_in_step
        found[layer] = flops / 3 / rate.forward, flops / rate.both
    return found


class LayerTime(NamedTuple):
    """Seconds of one layer and one micro-batch on a rank, forward and backward, by the parts of `StepTime`."""

    products: float
    attention: float
    memory: float
    repeated: float
    tp: float
    cp: float
    ep: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)

    @property
    def forward(self) -> float:
        """Seconds of the forward pass, a third of what is computed once."""
        return (self.seconds - self.repeated) / 3


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, on an average rank; they add up to the step."""

    products: float
    """Matrix products of the layers."""
    attention: float
    memory: float
    """Norms, rotary embedding, SwiGLU and residual sums, which only read and write memory, and FSDP's copies."""
    loss: float
    """Output projection and cross entropy."""
    repeated: float
    """Computed again in the backward pass."""
    objective: float
    """Attention, and all else of a forward pass, that the stage's objective computes in addition."""
    optimizer: float
    fsdp: float
    """Weights and gradients on their way, which nothing hides."""
    tp: float
    """Communication of tensor parallelism that nothing hides."""
    cp: float
    """Communication and copies of context parallelism that attention does not hide."""
    ep: float
    """Tokens on their way to their experts and back."""
    pp: float
    """Waiting for other ranks of the pipeline."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        """Seconds in which the GPU computes nothing."""
        return self.fsdp + self.tp + self.cp + self.ep + self.pp


@dataclass(frozen=True)
class StageStep:
    """The steps of a stage on a mesh."""

    stage: Stage
    mesh: MeshSizes
    activations: StageActivations
    time: StepTime
    traffic: Mapping[str, Traffic]
    """Bytes that a rank receives in a step, by the dimension that they come from."""

    @property
    def seconds(self) -> float:
        """All steps of the stage, evaluations and checkpoints left out."""
        return self.stage.steps * self.time.seconds

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second of one GPU."""
        return self.stage.batch_tokens / self.mesh.ranks / self.time.seconds

    @property
    def received(self) -> Traffic:
        """Sum of the traffic."""
        return sum(self.traffic.values(), Traffic())

    @property
    def memory(self) -> int:
        """Bytes of GPU memory at the step's peak."""
        return self.activations.memory.total


def predict_step(
    setup: ModelSetup,
    optimizer: str,
    stage: Stage,
    layout: StageLayout,
    attention: AttentionTimes,
    machine: Machine,
) -> StageStep:
    """The steps of `stage` in a layout, given the times of its attentions (`attention_times`).

    Raises PlanError for what was not measured.
    """
    rates = machine.rates
    precision = setup.computation.precision
    if precision.compute == "fp32":
        raise PlanError("precision.compute: given fp32, whose steps were never measured; allowed: auto or bf16")
    if optimizer not in rates.update_s:
        raise PlanError(
            f"optim.kind: given {optimizer}, whose update was not measured on {rates.gpu}, so no step with it "
            f"can be predicted; measured: {', '.join(rates.update_s)}; {CALIBRATE}"
        )
    if precision.linear == "fp8" and rates.float8_products is None:
        raise PlanError(
            f"precision.linear: given fp8, which was not measured on {rates.gpu}; {CALIBRATE}, if torchao is installed"
        )
    step = _Step(setup, optimizer, stage, layout, attention, machine)
    return StageStep(stage, layout.mesh, layout.activations, step.time(), step.traffic())


class _Step:
    """Layers, output projection, FSDP and pipeline of a step, put together."""

    def __init__(
        self,
        setup: ModelSetup,
        optimizer: str,
        stage: Stage,
        layout: StageLayout,
        attention: AttentionTimes,
        machine: Machine,
    ) -> None:
        model = setup.shape
        sizes = layout.mesh
        activations = layout.activations
        self._model = model
        self._computation = setup.computation
        self._optimizer = optimizer
        self._parallel = stage.parallel
        self._sizes = sizes
        self._attention = attention
        self._machine = machine
        self._width = setup.computation.width
        strategy = layout.strategy
        every = replace(stage, attention=tuple(attention))  # with those of the objective
        self._transports = {} if strategy is None else stage_costs(model, every, strategy, self._width)
        costs = [self._transports[layer] for layer in stage.attention if self._transports]
        self._received = sum((Traffic(cost.node_bytes, cost.network_bytes) for cost in costs), Traffic())
        """By all layers, for context parallelism, of one micro-batch."""
        self._tokens = stage.micro_batch_size * stage.seq_len / sizes.cp  # of a tp group
        self._hidden_bytes = self._tokens * model.hidden_size * self._width
        self._kept = [layer.kept for layer in activations.layers]
        self._fed = [feed_forward_costs(model, layer) for layer in range(model.layers)]
        keys = list(zip(stage.attention, self._fed, self._kept, strict=True))
        by_key = {key: self._layer(*key) for key in dict.fromkeys(keys)}
        self._layers = [by_key[key] for key in keys]
        self._micro_batches = layout.micro_batches
        self._objective = objective_costs(stage)
        self._share = self._micro_batches / sizes.pp
        """Micro-batches of all layers that make a rank's work."""
        self._parts = setup.parts
        last = rank_work(model, setup.parts, stage, sizes, sizes.pp - 1)
        self._blocks = len(last.layers)
        # Of the rank with the output.
        self._weights = rank_weights(setup.spec, setup.computation, stage.parallel, optimizer, sizes, last)
        experts = sum(setup.spec.blocks[layer].separate for layer in last.layers) / (stage.parallel.ep * sizes.tp)
        self._in_blocks = sum(self._weights.blocks.values()) - self._not_gathered(experts)
        self._alone = self._of_no_other_rank(experts)
        self._linear = sum(self._weights.blocks.values()) - experts
        """Elements of the blocks that FP8 applies to: the products of experts stay in bf16."""
        # A pipeline holds its weights and gradients for the whole step (parallel/pipeline/schedule.py).
        self._rounds = self._micro_batches if sizes.pp == 1 else 1
        stay = sum(layer.weights for layer in activations.layers)
        taught = self._objective.share if self._objective.logit_peak else 0.0
        self._gathers = taught + (2 - stay / len(activations.layers) if sizes.pp == 1 else 1.0)
        """Number of times that FSDP gathers a block's weights for one micro-batch, or a pipeline for all, on average.

        Once for the forward pass, again for the backward pass where they were freed between, and for a teacher.
        """
        self._further = self._objective_seconds()

    def _not_gathered(self, experts: float) -> float:
        """Elements of the rank's `experts`, as many as are gathered less because fewer ranks share them."""
        ep = self._parallel.ep
        shards = self._sizes.shards
        return experts * (1 - (1 - ep / shards) / (1 - 1 / shards)) if ep > 1 else 0.0

    def _of_no_other_rank(self, experts: float) -> float:
        """Elements of which no other rank has a part, so that their gradients stay (parallel/forward.py)."""
        sizes = self._sizes
        if sizes.pp * sizes.dp_replicate > 1:
            return 0.0
        return self._weights.total if sizes.shards == 1 else experts * (self._parallel.ep == sizes.shards)

    def time(self) -> StepTime:
        """Seconds by part."""

        def layers(part: str) -> float:
            return self._share * sum(getattr(layer, part) for layer in self._layers)

        rates = self._machine.rates
        return StepTime(
            products=layers("products"),
            attention=layers("attention"),
            memory=layers("memory") + self._copies(),
            loss=self._share * self._output_seconds(),
            repeated=layers("repeated"),
            objective=self._share * self._further,
            optimizer=(rates.update_s[self._optimizer] + NORM_BYTES / rates.memory) * self._weights.trained.shard,
            fsdp=self._rounds * self._waiting_for_weights(),
            tp=layers("tp") + self._share * self._output_tensor_bytes() / self._machine.links.node,
            cp=layers("cp"),
            ep=layers("ep"),
            pp=self._waiting_for_ranks(),
        )

    def traffic(self) -> dict[str, Traffic]:
        """Bytes that a rank receives, by the dimension that they come from."""
        blocks = map(self._tensor_bytes, self._kept)
        return {
            "fsdp": self._weights_traffic().times(self._rounds),
            "tp": Traffic(node=self._share * (sum(blocks) + self._output_tensor_bytes())),
            "cp": self._received.times(self._share),
            "ep": sum(map(self._expert_traffic, self._fed, self._kept), Traffic()).times(self._share),
            "pp": self._passed_on(),
        }

    def _layer(self, attention: LayerAttention, fed: FeedForwardCosts, kept: Kept) -> LayerTime:
        """A layer with this attention and feed-forward that keeps so much for its backward pass."""
        model, rates = self._model, self._machine.rates
        tokens = self._tokens / self._sizes.tp
        forward_s, attention_s = (tokens * seconds for seconds in self._attention[attention])
        float8 = rates.float8_products if self._computation.precision.linear == "fp8" else None
        product_s = 2 * tokens / (float8 or rates.products)  # of a weight, forward
        # Also in FP8, the inputs of products are read and written in the layer's precision.
        layer = self._fed.index(fed)
        compiled = self._computation.compiled
        block = block_bytes(model, self._width, self._sizes.tp, compiled, self._width, layer)
        passes = rates.compiled_passes if self._computation.compiled else rates.eager_passes
        results = self._width * self._sizes.tp * fed.copies * model.hidden_size  # of experts: nothing keeps them
        memory_s = passes * (block.attention + block.feed_forward + results) * tokens / rates.memory
        repeated = 0.0 if kept is Kept.ALL else memory_s / 3
        repeated += forward_s if kept < Kept.ATTENTION else 0.0
        repeated += product_s * attention_matrices(model) if kept < Kept.PROJECTIONS else 0.0
        fed_s = 2 * tokens * fed.active / (GROUPED_SPEED * rates.products) if fed.copies else product_s * fed.active
        # Uncompiled, the down projection of experts as well, behind which tensors are kept.
        fed_again = 1 if fed.copies and not compiled else 2 / 3
        repeated += fed_s * fed_again if kept < Kept.PRODUCTS else 0.0
        return LayerTime(
            products=3 * (product_s * attention_matrices(model) + fed_s),
            attention=attention_s,
            memory=memory_s,
            repeated=repeated,
            tp=self._tensor_bytes(kept, exposed=True) / self._machine.links.node,
            cp=self._context_seconds(attention, attention_s),
            ep=self._expert_traffic(fed, kept).seconds(self._machine.links),
        )

    def _objective_seconds(self) -> float:
        """Seconds of what the objective computes of all layers, for a micro-batch and on average over the steps."""
        objective = self._objective
        attentions = [attention for attention in objective.attention if attention is not None]
        seconds = self._tokens / self._sizes.tp * sum(self._attention[attention][0] for attention in attentions)
        if objective.logit_peak:
            layers = [self._layer(*key, Kept.ALL) for key in zip(attentions, self._fed, strict=True)]
            seconds += sum(layer.forward - layer.attention / 3 for layer in layers)
        return objective.share * seconds

    def _expert_traffic(self, fed: FeedForwardCosts, kept: Kept) -> Traffic:
        """Bytes that a rank receives of a layer's tokens: to their experts and back, forward and backward, and to their
        experts again where the layer is recomputed; without torch.compile, which knows what no gradient needs, also
        back."""
        ep = self._parallel.ep
        sizes = self._sizes._replace(dp_shard=self._sizes.shards // ep, cp=ep)  # neighbours (parallel/dims.py)
        group = linked_group(sizes, self._machine.ranks_per_node, "cp")
        exchanges = 4 if kept is Kept.ALL else 5 if self._computation.compiled else 6
        from_each = exchanges * fed.copies * self._hidden_bytes / ep
        return Traffic(from_each * (group.in_node - 1), from_each * (ep - group.in_node))

    def _tensor_bytes(self, kept: Kept, exposed: bool = False) -> float:
        """Bytes that a rank receives from its tp group for a layer; `exposed`: those that nothing hides."""
        overlapped = exposed and self._parallel.tp_overlap
        transfers = _NOT_OVERLAPPED if overlapped else _TRANSFERS
        # Recomputation gathers both inputs once more, and reduces the output of attention if that is gone.
        transfers += 0 if kept is Kept.ALL else 2 if kept >= Kept.PROJECTIONS else 3
        return transfers * self._hidden_bytes * (1 - 1 / self._sizes.tp)

    def _context_seconds(self, attention: LayerAttention, attention_s: float) -> float:
        """Seconds of context parallelism that this attention, of `attention_s` seconds, does not hide."""
        if attention not in self._transports:
            return 0.0
        links = self._machine.links
        hops = _CONTEXT_TRANSFERS * (self._group("cp").nodes - 1)
        cost = self._transports[attention]
        return cost.exposed_seconds(attention_s, links, self._machine.rates.memory) + hops * links.hop_s

    def _output_seconds(self) -> float:
        """Seconds of the output projection and its loss."""
        model, rates = self._model, self._machine.rates
        logits = self._tokens / self._sizes.tp * model.vocab_size
        passed = rates.compiled_loss_bytes if self._computation.compiled else rates.eager_loss_bytes
        seconds = logits * (6 * model.hidden_size / rates.products + passed / rates.memory)
        if not self._objective.logit_peak:
            return seconds
        own = logits * (8 * model.hidden_size / rates.products + self._objective.logit_traffic / rates.memory)
        return seconds + self._objective.share * (own - seconds)

    def _output_tensor_bytes(self) -> float:
        """Bytes of the output weight, and of its gradient, that a rank receives from its tp group for the loss."""
        weight = self._width * self._model.vocab_size * self._model.hidden_size
        return 2 * weight * (1 - 1 / self._sizes.tp)

    def _group(self, *dimensions: str) -> LinkedGroup:
        return linked_group(self._sizes, self._machine.ranks_per_node, *dimensions)

    def _waiting_for_weights(self) -> float:
        """Seconds of a round of FSDP that nothing hides: first gather, last reduction, those of its outermost unit, and
        the excess over the passes of the other blocks."""
        links, blocks = self._machine.links, self._blocks
        shards, copies = self._group("dp_shard", "cp"), self._group("dp_replicate")
        block, outer = self._in_blocks / blocks, self._weights.outer
        head = self._weights.ends - outer
        width = self._width
        gather_s = shards.gather_seconds(gathered_bytes(self._computation.precision, width) * block, links)
        outer_gather_s, head_gather_s = (shards.gather_seconds(width * count, links) for count in (outer, head))
        reduce_s, outer_reduce_s, head_reduce_s = (
            shards.gather_seconds(self._weights.gradient_sent * count, links)
            + 2 * copies.gather_seconds(4 * count / shards.ranks, links)
            for count in (block, outer, head)
        )
        forward_s = sum(layer.forward for layer in self._layers) / self._sizes.pp
        backward_s = sum(layer.seconds - layer.forward for layer in self._layers) / self._sizes.pp
        backward_s += self._further  # behind which the weights that it needs travel
        again_s = (self._gathers - 1) * gather_s
        longer_s = max(0.0, (blocks - 1) * gather_s + head_gather_s - forward_s)
        longer_s += max(0.0, blocks * again_s + head_reduce_s + (blocks - 1) * reduce_s - backward_s)
        return outer_gather_s + gather_s + longer_s + reduce_s + outer_reduce_s

    def _weights_traffic(self) -> Traffic:
        """Bytes that a rank receives in a round of FSDP."""
        shards, copies = self._group("dp_shard", "cp"), self._group("dp_replicate")
        in_blocks, ends = self._in_blocks, self._weights.ends
        gathered = (
            self._gathers * gathered_bytes(self._computation.precision, self._width) * in_blocks + self._width * ends
        )
        reduced = in_blocks + ends
        own = 4 * reduced / shards.ranks
        return shards.gather(gathered + self._weights.gradient_sent * reduced) + copies.gather(own).times(2)

    def _copies(self) -> float:
        """Seconds of FSDP's copies in the GPU's own memory, and of what it casts to FP8."""
        cast = self._machine.rates.float8_weight_bytes if self._computation.precision.linear == "fp8" else 0.0
        shared = self._weights.total - self._alone
        gathered = GATHERED_COPIES * shared + SHARD_COPIES * self._weights.shard
        # Gradients, bf16, into the buffer of their reduction; those that are copied are then added up, by compiled
        # code in one pass, else one by one.
        sent = self._weights.gradient_sent
        reduced = (2 + sent) * shared
        if self._weights.buffers:
            again = 0 if self._computation.compiled else 8
            reduced += (sent + again) * shared + (4 - again) * (self._weights.shard - self._alone)
        copied = self._rounds * (self._gathers * gathered + reduced + cast * self._linear)
        copied += (self._micro_batches - self._rounds) * ACCUMULATED_COPIES * self._weights.total
        copied += (FIRST_COPIES + (self._micro_batches - 1) * ACCUMULATED_COPIES) * self._alone
        return copied / self._machine.rates.memory

    def _waiting_for_ranks(self) -> float:
        """Seconds of waiting for other ranks of the pipeline, and for what they send."""
        pp = self._sizes.pp
        if pp == 1:
            return 0.0
        layers = [layer.seconds for layer in self._layers]
        ranks = rank_costs(self._parts, pp, layers, self._output_seconds())
        length = step_length(self._parallel, len(self._parts), ranks, self._micro_batches)
        return length - self._share * sum(ranks) + self._passed_on().seconds(self._machine.links)

    def _passed_on(self) -> Traffic:
        """A hidden state and a gradient for each micro-batch and part of the rank's."""
        pp = self._sizes.pp
        states = 2 * self._micro_batches * len(self._parts) / pp if pp > 1 else 0
        return self._group("pp").pass_on(states * self._hidden_bytes / self._sizes.tp)
