"""Predicted time of one optimizer step: computation by measured rates, and what communication it cannot hide.

Every part of the step that a GPU computes takes its operations, or the bytes that it moves in memory, over a measured
rate (rates.py, attention_rates.py). Communication takes its bytes over the bandwidth of the links (parallel/links.py).
What hides it: FSDP's gathers the forward pass of other blocks, its gathers and reductions the backward pass; attention
the part of context parallelism that need not come first. Tensor parallelism without `tp_overlap` and what a pipeline's
ranks pass on are hidden by nothing. Left out: the host's time, which decides where a rank has few tokens, evaluations,
checkpoints, data, and activations on their way to the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.errors import PlanError
from moba_train.memory.activations import StageActivations, stage_activations
from moba_train.memory.devices import H200, Gpu
from moba_train.memory.memory import NO_TRANSPORT, element_bytes, memory_for_buffers
from moba_train.memory.pipeline import pipeline_layers, rank_costs, rank_work, step_length
from moba_train.memory.weights import gathered_bytes, rank_weights
from moba_train.parallel.context.costs import TransportCost, predict_cost
from moba_train.parallel.links import LINKS, LinkedGroup, Links, Traffic, linked_group
from moba_train.parallel.stage_strategy import stage_attention_shape, stage_strategy
from moba_train.tools.plan.layer_time import AttentionFlops, LayerTimes
from moba_train.tools.plan.rates import RATES, Rates

GATHERED_COPIES = 4
"""Bytes that a GPU reads and writes for each weight and gather: bf16, out of the buffer of the gather."""
ACCUMULATED_COPIES = 10
"""Bytes for each gathered weight of a pipeline and each micro-batch after the first: a gradient, bf16, is added to the
sum, float32."""
NORM_BYTES = 4
"""Bytes for each weight of the rank's shard: its gradient, float32, is read for the norms."""
SHARD_COPIES = 6
"""Bytes for each weight of the rank's shard and gather: float32 to bf16."""


class Machine(NamedTuple):
    """What a run is predicted for."""

    gpu: Gpu = H200
    ranks_per_node: int = 8
    links: Links = LINKS
    rates: Rates = RATES
    host_bytes: float | None = None
    """Host memory for the offloaded activations of one GPU; None: not known."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, on an average rank; they add up to the step."""

    products: float
    """Matrix products of the layers."""
    attention: float
    memory: float
    """Element-wise operations of the layers, and FSDP's copies."""
    loss: float
    """Output projection and cross entropy."""
    repeated: float
    """What is computed again in the backward pass."""
    optimizer: float
    fsdp: float
    """Weights and gradients on their way, which nothing hides."""
    tp: float
    """Communication of tensor parallelism that nothing hides."""
    cp: float
    """Communication and copies of context parallelism that attention does not hide."""
    pp: float
    """Waiting for other ranks of the pipeline."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        """Seconds in which the GPU computes nothing."""
        return self.fsdp + self.tp + self.cp + self.pp


@dataclass(frozen=True)
class StageStep:
    """The steps of a stage on a mesh."""

    stage: Stage
    mesh: MeshSizes
    activations: StageActivations
    time: StepTime
    traffic: Mapping[str, Traffic]
    """What a rank receives in a step, by the dimension that it comes from."""

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
        """What a rank receives in a step."""
        return sum(self.traffic.values(), Traffic())


def predict_step(
    config: RunConfig, stage: Stage, sizes: MeshSizes, flops: AttentionFlops, machine: Machine
) -> StageStep:
    """The steps of `stage` on a mesh of these sizes, given the operations of its attentions (`attention_flops`).

    Raises PlanError for what was never measured, ConfigError where activations do not fit the host, and ValueError
    where the configured transport cannot do these sizes.
    """
    if config.precision.compute == "fp32":
        raise PlanError("precision.compute: given fp32, whose steps were never measured; allowed: auto or bf16")
    if config.optim.kind not in machine.rates.update_s:
        raise PlanError(
            f"optim.kind: given {config.optim.kind}, whose update was never measured, so no step with it can be "
            f"predicted; allowed: {', '.join(machine.rates.update_s)}; `moba-train plan RECIPE --gpus N`, without "
            "--nodes, plans the others, too"
        )
    transport = _transport(config, stage, sizes, machine)
    buffers = transport.memory if transport else NO_TRANSPORT
    activations = stage_activations(config, stage, sizes, machine.gpu.memory, machine.host_bytes, buffers)
    cp_nodes = linked_group(sizes, machine.ranks_per_node, "cp").nodes
    times = LayerTimes(config, stage, sizes, flops, transport, cp_nodes, machine.links, machine.rates)
    step = _Step(config, stage, sizes, machine, times, activations)
    return StageStep(stage, sizes, activations, step.time(), step.traffic(transport))


def _transport(config: RunConfig, stage: Stage, sizes: MeshSizes, machine: Machine) -> TransportCost | None:
    """What one layer's context parallelism costs, with the transport that the run will take."""
    if sizes.cp == 1:
        return None
    width = element_bytes(config)
    room = memory_for_buffers(config, stage, sizes, machine.gpu.memory)
    strategy, _ = stage_strategy(config, stage, machine.ranks_per_node, width, room)
    return predict_cost(strategy, stage_attention_shape(config, stage, width))


class _Step:
    """Layers, output projection, FSDP and pipeline, put together."""

    def __init__(
        self,
        config: RunConfig,
        stage: Stage,
        sizes: MeshSizes,
        machine: Machine,
        times: LayerTimes,
        activations: StageActivations,
    ) -> None:
        self._config = config
        self._sizes = sizes
        self._machine = machine
        self._kept = [layer.kept for layer in activations.layers]
        self._times = times
        by_kind = {key: times.layer(*key) for key in dict.fromkeys(zip(stage.attention, self._kept, strict=True))}
        self._layers = [by_kind[key] for key in zip(stage.attention, self._kept, strict=True)]
        self._micro_batches = stage.batch_sequences // (stage.micro_batch_size * sizes.dp)
        self._share = self._micro_batches / sizes.pp
        """Micro-batches of all layers that make a rank's work."""
        self._parts = pipeline_layers(config)
        last = rank_work(config, stage, sizes, sizes.pp - 1)
        self._blocks = len(last.layers)
        self._weights = rank_weights(config, sizes, element_bytes(config), last)  # of the rank with the output
        self._in_blocks = sum(self._weights.blocks.values())
        # A pipeline holds its weights and gradients for the whole step (parallel/pipeline/schedule.py).
        self._rounds = self._micro_batches if sizes.pp == 1 else 1
        stay = sum(layer.weights for layer in activations.layers)
        self._gathers = 2 - stay / len(activations.layers) if sizes.pp == 1 else 1.0
        """How often FSDP gathers a block's weights for one micro-batch, or a pipeline for all of them; on average.

        Once for the forward pass, and again for the backward pass where they were freed between.
        """

    def time(self) -> StepTime:
        """Seconds by part."""

        def layers(part: str) -> float:
            return self._share * sum(getattr(layer, part) for layer in self._layers)

        rates = self._machine.rates
        return StepTime(
            products=layers("products"),
            attention=layers("attention"),
            memory=layers("memory") + self._copies(),
            loss=self._share * self._times.output_seconds(),
            repeated=layers("repeated"),
            optimizer=(rates.update_s[self._config.optim.kind] + NORM_BYTES / rates.memory) * self._weights.shard,
            fsdp=self._rounds * self._waiting_for_weights(),
            tp=layers("tp") + self._share * self._times.output_tensor_bytes() / self._machine.links.node,
            cp=layers("cp"),
            pp=self._waiting_for_ranks(),
        )

    def traffic(self, transport: TransportCost | None) -> dict[str, Traffic]:
        """What a rank receives, by the dimension that it comes from; transport: of one layer under context
        parallelism."""
        context = Traffic(transport.node_bytes, transport.network_bytes) if transport else Traffic()
        blocks = map(self._times.tensor_bytes, self._kept)
        return {
            "fsdp": self._weights_traffic().times(self._rounds),
            "tp": Traffic(node=self._share * (sum(blocks) + self._times.output_tensor_bytes())),
            "cp": context.times(self._share * len(self._layers)),
            "pp": self._passed_on(),
        }

    def _group(self, *dimensions: str) -> LinkedGroup:
        return linked_group(self._sizes, self._machine.ranks_per_node, *dimensions)

    def _waiting_for_weights(self) -> float:
        """Seconds of a round of FSDP that no block's computation hides: the first gather and the last reduction, those
        of its outermost unit, and what takes longer than the passes of the other blocks."""
        links, blocks = self._machine.links, self._blocks
        shards, copies = self._group("dp_shard", "cp"), self._group("dp_replicate")
        block, outer = self._in_blocks / blocks, self._weights.outer
        head = self._weights.ends - outer
        width = element_bytes(self._config)
        gather_s = shards.gather_seconds(gathered_bytes(self._config, width) * block, links)
        outer_gather_s, head_gather_s = (shards.gather_seconds(width * count, links) for count in (outer, head))
        reduce_s, outer_reduce_s, head_reduce_s = (
            shards.gather_seconds(self._weights.gradient_sent * count, links)
            + 2 * copies.gather_seconds(4 * count / shards.ranks, links)
            for count in (block, outer, head)
        )
        forward_s = sum(layer.forward for layer in self._layers) / self._sizes.pp
        backward_s = sum(layer.backward for layer in self._layers) / self._sizes.pp
        again_s = (self._gathers - 1) * gather_s
        longer_s = max(0.0, (blocks - 1) * gather_s + head_gather_s - forward_s)
        longer_s += max(0.0, blocks * again_s + head_reduce_s + (blocks - 1) * reduce_s - backward_s)
        return outer_gather_s + gather_s + longer_s + reduce_s + outer_reduce_s

    def _weights_traffic(self) -> Traffic:
        """What a rank receives in a round of FSDP."""
        shards, copies = self._group("dp_shard", "cp"), self._group("dp_replicate")
        in_blocks, ends = self._in_blocks, self._weights.ends
        width = element_bytes(self._config)
        gathered = self._gathers * gathered_bytes(self._config, width) * in_blocks + width * ends
        reduced = in_blocks + ends
        own = 4 * reduced / shards.ranks
        return shards.gather(gathered + self._weights.gradient_sent * reduced) + copies.gather(own).times(2)

    def _copies(self) -> float:
        """Seconds of FSDP's copies in the GPU's own memory, and of what it casts to FP8."""
        cast = self._machine.rates.float8_weight_bytes if self._config.precision.linear == "fp8" else 0.0
        gathered = GATHERED_COPIES * self._weights.total + SHARD_COPIES * self._weights.shard
        # Gradients, bf16, into the buffer of their reduction; those that are exchanged are then added up, by compiled
        # code in one pass, else one by one.
        sent = self._weights.gradient_sent
        reduced = (2 + sent) * self._weights.total
        if self._weights.exchanged:
            again = 0 if self._config.compile else 8
            reduced += (sent + again) * self._weights.total + (4 - again) * self._weights.shard
        copied = self._rounds * (self._gathers * gathered + reduced + cast * self._in_blocks)
        copied += (self._micro_batches - self._rounds) * ACCUMULATED_COPIES * self._weights.total
        return copied / self._machine.rates.memory

    def _waiting_for_ranks(self) -> float:
        """Seconds of waiting for other ranks of the pipeline, and for what they send."""
        pp = self._sizes.pp
        if pp == 1:
            return 0.0
        layers = [layer.seconds for layer in self._layers]
        ranks = rank_costs(self._parts, pp, layers, self._times.output_seconds())
        length = step_length(self._config.parallel, len(self._parts), ranks, self._micro_batches)
        return length - self._share * sum(ranks) + self._passed_on().seconds(self._machine.links)

    def _passed_on(self) -> Traffic:
        """A hidden state and a gradient for each micro-batch and part of the rank's."""
        pp = self._sizes.pp
        states = 2 * self._micro_batches * len(self._parts) / pp if pp > 1 else 0
        return self._group("pp").pass_on(states * self._times.hidden_bytes / self._sizes.tp)
