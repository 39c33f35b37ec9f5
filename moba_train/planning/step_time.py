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
from moba_train.parallel.context.costs import TransportCost, predict_cost
from moba_train.parallel.links import LINKS, Links, Traffic, linked_group
from moba_train.parallel.stage_strategy import stage_attention_shape, stage_strategy
from moba_train.planning.activations import StageActivations, stage_activations
from moba_train.planning.devices import H200, Gpu
from moba_train.planning.documents import Documents
from moba_train.planning.layer_time import LayerTime, LayerTimes
from moba_train.planning.memory import element_bytes, memory_for_buffers
from moba_train.planning.pipeline import pipeline_layers, rank_costs, rank_work, step_length
from moba_train.planning.rates import RATES, Rates
from moba_train.planning.weights import Weights, gathered_bytes, rank_weights

GATHERED_COPIES = 14
"""Bytes that a GPU reads and writes for each gathered weight: bf16 twice out of the buffer of a gather, and a gradient
into the float32 buffer of its reduction."""
SHARD_COPIES = 12
"""Bytes for each weight of the rank's shard: float32 to bf16, for the gathers of the forward and the backward pass."""


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
        """Of each GPU."""
        return self.stage.batch_tokens / self.mesh.ranks / self.time.seconds

    @property
    def received(self) -> Traffic:
        """What a rank receives in a step."""
        return sum(self.traffic.values(), Traffic())


def predict_step(
    config: RunConfig, stage: Stage, sizes: MeshSizes, documents: Documents, machine: Machine
) -> StageStep:
    """The steps of `stage`, whose sequences hold `documents`, on a mesh of these sizes.

    Raises PlanError for what was never measured, ConfigError where activations do not fit the host, and ValueError
    where the configured transport cannot do these sizes.
    """
    if config.precision.compute == "fp32":
        raise PlanError("precision.compute: given fp32, whose steps were never measured; allowed: auto or bf16")
    transport = _transport(config, stage, sizes, machine)
    buffers = transport.memory_bytes if transport else 0.0
    activations = stage_activations(config, stage, sizes, machine.gpu.memory, machine.host_bytes, buffers)
    cp_nodes = linked_group(sizes, machine.ranks_per_node, "cp").nodes
    times = LayerTimes(config, stage, sizes, documents, transport, cp_nodes, machine.links, machine.rates)
    by_kind = {
        key: times.layer(*key)
        for key in dict.fromkeys(zip(stage.attention, (layer.kept for layer in activations.layers), strict=True))
    }
    layers = [
        by_kind[attention, layer.kept] for attention, layer in zip(stage.attention, activations.layers, strict=True)
    ]
    step = _Step(config, stage, sizes, machine, layers, times.output_seconds())
    waiting, fsdp = step.weights()
    pipeline_s, passed_on = step.pipeline()
    share = step.micro_batches / sizes.pp  # of all layers and micro-batches, a rank's
    tensor = sum(times.tensor_bytes(1, layer.kept) for layer in activations.layers)
    traffic = {
        "fsdp": fsdp,
        "tp": Traffic(node=share * tensor),
        "cp": _received(transport, share * len(layers)),
        "pp": passed_on,
    }
    time = StepTime(
        products=share * sum(layer.products for layer in layers),
        attention=share * sum(layer.attention for layer in layers),
        memory=share * sum(layer.memory for layer in layers) + step.copies(),
        loss=share * times.output_seconds(),
        repeated=share * sum(layer.repeated for layer in layers),
        optimizer=machine.rates.update_s[config.optim.kind] * step.own.shard,
        fsdp=waiting,
        tp=share * sum(layer.tp for layer in layers),
        cp=share * sum(layer.cp for layer in layers),
        pp=pipeline_s,
    )
    return StageStep(stage, sizes, activations, time, traffic)


def _transport(config: RunConfig, stage: Stage, sizes: MeshSizes, machine: Machine) -> TransportCost | None:
    """What one layer's context parallelism costs, with the transport that the run will take."""
    if sizes.cp == 1:
        return None
    width = element_bytes(config)
    room = memory_for_buffers(config, stage, sizes, machine.gpu.memory)
    strategy, _ = stage_strategy(config, stage, machine.ranks_per_node, width, room)
    return predict_cost(strategy, stage_attention_shape(config, stage, width))


def _received(transport: TransportCost | None, layers: float) -> Traffic:
    return Traffic(transport.node_bytes, transport.network_bytes).times(layers) if transport else Traffic()


class _Step:
    """What the layers' times do not know: FSDP, and the ranks of a pipeline."""

    def __init__(
        self,
        config: RunConfig,
        stage: Stage,
        sizes: MeshSizes,
        machine: Machine,
        layers: list[LayerTime],
        output_s: float,
    ) -> None:
        self._config = config
        self._stage = stage
        self._sizes = sizes
        self._machine = machine
        self._layers = layers
        self._output_s = output_s
        self.micro_batches = stage.batch_sequences // (stage.micro_batch_size * sizes.dp)
        self._parts = pipeline_layers(config)
        last = rank_work(config, stage, sizes, sizes.pp - 1)
        self._blocks = len(last.layers)
        self.own: Weights = rank_weights(config, sizes, element_bytes(config), last)
        """The weights of the rank with the output projection."""
        # A pipeline holds its weights and gradients for the whole step (parallel/pipeline/schedule.py).
        self._rounds = self.micro_batches if sizes.pp == 1 else 1

    def weights(self) -> tuple[float, Traffic]:
        """FSDP: the seconds that nothing hides, and what a rank receives."""
        width = element_bytes(self._config)
        links = self._machine.links
        shards = linked_group(self._sizes, self._machine.ranks_per_node, "dp_shard", "cp")
        copies = linked_group(self._sizes, self._machine.ranks_per_node, "dp_replicate")
        block, ends, blocks = self.own.block, self.own.ends, self._blocks
        gather_s = shards.gather_seconds(gathered_bytes(self._config, width) * block, links)
        ends_gather_s = shards.gather_seconds(width * ends, links)
        reduce_s, ends_reduce_s = (
            shards.gather_seconds(4 * count, links) + 2 * copies.gather_seconds(4 * count / shards.ranks, links)
            for count in (block, ends)
        )
        forward_s = sum(layer.forward for layer in self._layers) / self._sizes.pp
        backward_s = sum(layer.backward for layer in self._layers) / self._sizes.pp
        again_s = gather_s if self._sizes.pp == 1 else 0.0
        waiting = ends_gather_s + gather_s + max(0.0, (blocks - 1) * gather_s - forward_s)
        waiting += max(0.0, blocks * again_s + (blocks - 1) * reduce_s - backward_s) + reduce_s + ends_reduce_s

        gathers = 2 if self._sizes.pp == 1 else 1
        gathered = gathers * blocks * gathered_bytes(self._config, width) * block + width * ends
        reduced = 4 * (blocks * block + ends)
        traffic = shards.gather(gathered + reduced) + copies.gather(reduced / shards.ranks).times(2)
        return self._rounds * waiting, traffic.times(self._rounds)

    def copies(self) -> float:
        """Seconds of FSDP's copies in the GPU's own memory."""
        copied = GATHERED_COPIES * self.own.total + SHARD_COPIES * self.own.shard
        return self._rounds * copied / self._machine.rates.memory

    def pipeline(self) -> tuple[float, Traffic]:
        """Seconds of waiting for other ranks of the pipeline and for what they send, and what a rank receives."""
        pp = self._sizes.pp
        if pp == 1:
            return 0.0, Traffic()
        ranks = rank_costs(self._parts, pp, [layer.seconds for layer in self._layers], self._output_s)
        length = step_length(self._config.parallel, len(self._parts), ranks, self.micro_batches)
        tokens = self._stage.micro_batch_size * self._stage.seq_len / (self._sizes.cp * self._sizes.tp)
        hidden = tokens * self._config.model.hidden_size * element_bytes(self._config)
        group = linked_group(self._sizes, self._machine.ranks_per_node, "pp")
        # A hidden state and a gradient for each micro-batch and part of the rank's.
        traffic = group.pass_on(2 * hidden * self.micro_batches * len(self._parts) / pp)
        computed = self.micro_batches * sum(ranks) / pp
        return length - computed + traffic.seconds(self._machine.links), traffic
