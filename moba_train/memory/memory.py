"""Peak memory per GPU by part, in bytes: an estimate for choosing a layout.

A step needs most memory at one of a few moments (moments.py). Each is added up, and the largest counts.

Assumed: FSDP2 with the units of parallel/fsdp.py, fp32 master weights and gradients, all parameters trained, or those
of adapters. Left out: the CUDA context (about 1 GiB), fragmentation and NCCL's buffers, for which `USABLE` leaves room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moba_train.config.mesh import MeshSizes
from moba_train.config.stages import Stage
from moba_train.memory.layer_memory import LayerMemory
from moba_train.memory.moments import Memory, RankMoments
from moba_train.memory.pipeline import rank_work
from moba_train.memory.weights import rank_weights
from moba_train.parallel.activations import Kept, LayerActivations, sent_to_host
from moba_train.parallel.context.costs import TransportMemory
from moba_train.parallel.fsdp import ModelSetup

NO_TRANSPORT = TransportMemory()
USABLE = 0.9
"""Fraction of a GPU's memory that a run can use; the CUDA context, NCCL and fragmentation take the rest."""


@dataclass(frozen=True)
class MemoryPolicy:
    """Choices of a recipe that memory depends on, the same in all its stages."""

    checkpointing: Literal["budget", "none", "selective", "full"]
    """`activation_checkpointing`."""
    offload: bool
    """`activation_offload`."""
    gpu_bytes: float | None
    """Bytes of each GPU that `budget` fills; None: `FILLED` of its memory."""
    host_bytes: float | None
    """Bytes of host memory for each GPU's offloaded activations; None: what is left of the node's."""
    optimizer: str
    """Name of the optimizer."""
    optimizer_on_host: bool
    """True: the optimizer's state is in host memory."""
    saves: bool
    """True: checkpoints are saved, each from a copy of weights and optimizer state in host memory."""


class MemoryEstimate:
    """The memory of the ranks in a stage, by what the layers keep."""

    def __init__(self, setup: ModelSetup, policy: MemoryPolicy, stage: Stage, sizes: MeshSizes) -> None:
        model = setup.shape
        computation = setup.computation
        self._memory = LayerMemory(model, computation, stage, sizes)
        self._ranks = []
        for rank in range(sizes.pp):
            work = rank_work(model, setup.parts, stage, sizes, rank)
            weights = rank_weights(setup.spec, computation, stage.parallel, policy.optimizer, sizes, work)
            moments = RankMoments(
                model,
                computation,
                stage,
                sizes,
                work,
                weights,
                self._memory,
                optimizer_on_host=policy.optimizer_on_host,
                saves=policy.saves,
            )
            self._ranks.append(moments)
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
        and in addition the most that any moment takes without them.

        FSDP reduces gradients on a separate stream, and torch keeps the memory of each stream for it. If that leaves
        too little, torch waits for the GPU and gives back what is free, in each step again.
        """
        moments = [rank.every(layers, transport) for rank in self._ranks]
        return max(
            max(memory.gradients for memory in of_rank) + max(memory.total - memory.gradients for memory in of_rank)
            for of_rank in moments
        )


def checkpointing(policy: MemoryPolicy, stage: Stage, sizes: MeshSizes) -> str:
    """The policy's `checkpointing`, but `none` for the `budget` of a zero-bubble pipeline, which cannot recompute."""
    cannot = sizes.pp > 1 and stage.parallel.pp_schedule == "zero_bubble"
    return "none" if cannot and policy.checkpointing == "budget" else policy.checkpointing


def fixed_activations(
    layers: int, policy: MemoryPolicy, stage: Stage, sizes: MeshSizes
) -> tuple[LayerActivations, ...]:
    """Activations that each of the `layers` keeps on the GPU by a policy that knows no sizes; `budget` counts as
    `full`."""
    kept = {"none": Kept.ALL, "selective": Kept.PRODUCTS}.get(checkpointing(policy, stage, sizes), Kept.ATTENTION)
    return (LayerActivations(kept, weights=all_weights_stay(stage, sizes)),) * layers


def all_weights_stay(stage: Stage, sizes: MeshSizes) -> bool:
    """True if the recipe keeps the gathered weights of all layers; a pipeline does so in any case."""
    return stage.parallel.reshard_after_forward is False and sizes.pp == 1


def memory_for_buffers(
    setup: ModelSetup, policy: MemoryPolicy, stage: Stage, sizes: MeshSizes, gpu_bytes: float
) -> float:
    """Bytes of a GPU's memory that are left for the buffers of context parallelism in `stage`."""
    layers = fixed_activations(setup.shape.layers, policy, stage, sizes)
    if policy.offload:
        layers = sent_to_host(layers)
    return USABLE * gpu_bytes - MemoryEstimate(setup, policy, stage, sizes).peak(layers).total
