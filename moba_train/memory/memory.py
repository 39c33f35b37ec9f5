"""Peak memory per GPU by part, in bytes: an estimate for choosing a layout.

A step needs most memory at one of a few moments (moments.py). Each is added up, and the largest counts.

Assumed: FSDP2 with the units of parallel/fsdp.py, fp32 master weights and gradients, all parameters trained. Left out:
the CUDA context (about 1 GiB), fragmentation and NCCL's buffers, for which `USABLE` leaves room.
"""

from collections.abc import Sequence

import torch

from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.memory.layer_memory import LayerMemory
from moba_train.memory.moments import Memory, RankMoments
from moba_train.memory.pipeline import checkpointing_policy, rank_work
from moba_train.memory.weights import rank_weights
from moba_train.parallel.activations import Kept, LayerActivations, sent_to_host
from moba_train.parallel.context.costs import TransportMemory

NO_TRANSPORT = TransportMemory()
USABLE = 0.9
"""Fraction of a GPU's memory that a run can use; the CUDA context, NCCL and fragmentation take the rest."""


def element_bytes(config: RunConfig) -> int:
    """Bytes of one element in the compute dtype of the layers, on a GPU."""
    return 4 if config.precision.compute == "fp32" else 2


class MemoryEstimate:
    """The memory of the ranks in a stage, by what the layers keep."""

    def __init__(self, config: RunConfig, stage: Stage, sizes: MeshSizes) -> None:
        width = element_bytes(config)
        works = [rank_work(config, stage, sizes, rank) for rank in range(sizes.pp)]
        weights = [rank_weights(config, sizes, width, work) for work in works]
        self._memory = LayerMemory(config, stage, sizes, width)
        self._ranks = [
            RankMoments(config, stage, sizes, work, of_rank, self._memory, width)
            for work, of_rank in zip(works, weights, strict=True)
        ]
        self.host_taken = max(rank.host_taken for rank in self._ranks)
        """Bytes of host memory that the optimizer's state and the copy of a save take for each GPU."""

    def kept_bytes(self, layer: int, kept: Kept) -> int:
        """Bytes of one micro-batch that a layer keeps from its forward pass to its backward pass, wherever that is."""
        return self._memory.kept(layer, kept)

    def host_bytes(self, layers: Sequence[LayerActivations]) -> int:
        """Bytes of host memory that the layers' activations take, without pipeline parallelism."""
        return sum(self._memory.sent(index, layer) for index, layer in enumerate(layers))

    def peak(self, layers: Sequence[LayerActivations], transport: TransportMemory = NO_TRANSPORT) -> Memory:
        """GPU memory at the moment of a step that needs most, on the rank of a pipeline that needs most.

        layers: of the whole model. transport: of context parallelism, in the layer that needs most.
        """
        return max(self.by_rank(layers, transport), key=lambda memory: memory.total)

    def by_rank(self, layers: Sequence[LayerActivations], transport: TransportMemory = NO_TRANSPORT) -> list[Memory]:
        """`peak` of each rank of a pipeline, first layers first; of the only one without pipeline parallelism."""
        moments = [rank.every(layers, transport) for rank in self._ranks]
        return [max(of_rank, key=lambda memory: memory.total) for of_rank in moments]

    def reserved(self, layers: Sequence[LayerActivations], transport: TransportMemory = NO_TRANSPORT) -> int:
        """GPU memory with which a step never waits for more, on the rank of a pipeline that needs most: all gradients,
        and beside them what else the moment takes that takes most.

        FSDP reduces gradients on a stream of its own, and torch keeps the memory of each stream for it. Where that
        leaves too little, torch waits for the GPU and gives back what is free, in each step again.
        """
        moments = [rank.every(layers, transport) for rank in self._ranks]
        return max(
            max(memory.gradients for memory in of_rank) + max(memory.total - memory.gradients for memory in of_rank)
            for of_rank in moments
        )


def fixed_activations(config: RunConfig, sizes: MeshSizes) -> tuple[LayerActivations, ...]:
    """What the layers keep on the GPU by a policy that knows no sizes; `budget` counts as `full`."""
    kept = {"none": Kept.ALL, "selective": Kept.PRODUCTS}.get(checkpointing_policy(config, sizes), Kept.ATTENTION)
    return (LayerActivations(kept, weights=all_weights_stay(config, sizes)),) * config.model.layers


def all_weights_stay(config: RunConfig, sizes: MeshSizes) -> bool:
    """Whether the recipe keeps the gathered weights of all layers; a pipeline does so in any case."""
    return config.parallel.reshard_after_forward is False and sizes.pp == 1


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
