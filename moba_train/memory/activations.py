"""Activations that each layer of a stage keeps for its backward pass, on the GPU or its host, by a recipe's policy."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moba_train.config.mesh import MeshSizes
from moba_train.config.stages import Stage
from moba_train.errors import ConfigError
from moba_train.memory.flops import kept_flops
from moba_train.memory.memory import (
    NO_TRANSPORT,
    MemoryEstimate,
    MemoryPolicy,
    all_weights_stay,
    checkpointing,
    fixed_activations,
)
from moba_train.memory.moments import Memory
from moba_train.parallel.activations import Kept, LayerActivations, describe_activations, sent_to_host
from moba_train.parallel.context.costs import TransportMemory
from moba_train.parallel.fsdp import ModelSetup

FILLED = 0.85
"""Part of a GPU that `budget` fills: less than `USABLE`, because torch waits for the GPU in each step where it finds no
memory. At 0.9 of an H100 of 80 GB it did 4 times in 5 steps (`allocator_retries` of 128K in
benchmarks/results/training-8b-16-layers-offload-h100-x2.json)."""


@dataclass(frozen=True)
class StageActivations:
    """Activations that the layers of a stage keep, and the memory that a step is predicted to take with them."""

    layers: tuple[LayerActivations, ...]
    rank_memory: tuple[Memory, ...]
    """Memory at the step's peak on each rank of a pipeline; without one, a single entry."""
    host_bytes: int
    """Page-locked memory that each GPU takes from its host."""

    @property
    def memory(self) -> Memory:
        """Memory at the step's peak on each GPU; in a pipeline, on those of the rank that needs most."""
        return max(self.rank_memory, key=lambda memory: memory.total)

    @property
    def keeps_everything(self) -> bool:
        """True if nothing is recomputed and nothing waits on the host."""
        return all(layer.kept is Kept.ALL and not layer.on_host for layer in self.layers)

    def describe(self) -> str:
        """Kept activations and predicted memory, in one line."""
        host = f" and {self.host_bytes / 2**30:.1f} GiB of its host" if self.host_bytes else ""
        predicted = f"{self.memory.total / 2**30:.1f} GiB of each GPU{host} (predicted)"
        return f"{describe_activations(self.layers)}: {predicted}"


def stage_activations(
    setup: ModelSetup,
    policy: MemoryPolicy,
    stage: Stage,
    sizes: MeshSizes,
    gpu_bytes: float | None,
    host_bytes: float | None,
    transport: TransportMemory = NO_TRANSPORT,
) -> StageActivations:
    """Activations that the layers keep in `stage`, by the policy.

    gpu_bytes: memory of one GPU; None: not known, then `budget` keeps everything unless the policy limits it
    host_bytes: host memory for the activations of one GPU, for the copy of a save, and for the optimizer's state where
        that is there; None: not known, as much as it takes
    transport: of context parallelism, in the layer that needs most

    `budget` begins with the blocks' inputs and takes further tensors for as long as they fit beside all gradients
    (`MemoryEstimate.reserved`): attention's results first, then what spares most FLOPs for its bytes, in late layers
    before early ones. With `activation_offload`, layers that keep no more than attention's result send it to the host.
    In a pipeline, what all layers take is decided by the rank that needs most, whose time the others would wait for; a
    zero-bubble pipeline keeps everything. `reshard_after_forward: budget` comes after that: of the memory that is left,
    the weights of late layers, which wait least, before early ones.

    Raises ConfigError where a policy that decides by itself what to keep needs more host memory than there is.
    """
    estimate = MemoryEstimate(setup, policy, stage, sizes)
    if policy.host_bytes is not None:
        host_bytes = policy.host_bytes
    elif host_bytes is not None:
        host_bytes = max(0.0, host_bytes - estimate.host_taken)
    limit = FILLED * gpu_bytes if gpu_bytes is not None else None
    if policy.gpu_bytes is not None:
        limit = policy.gpu_bytes
    choice = _Choice(setup, policy, stage, sizes, estimate, limit, host_bytes, transport)
    everything = (LayerActivations(Kept.ALL, weights=all_weights_stay(stage, sizes)),) * setup.shape.layers
    if checkpointing(policy, stage, sizes) != "budget":
        layers = choice.offloaded(fixed_activations(setup.shape.layers, policy, stage, sizes))
    elif choice.fits(everything):
        layers = everything
    else:
        layers = choice.most()
    if stage.parallel.reshard_after_forward == "budget" and sizes.pp == 1:
        layers = choice.with_weights(layers)
    return choice.result(layers)


@dataclass(frozen=True)
class _Step:
    """One layer keeps more than before."""

    layer: int
    kept: Kept
    flops_per_byte: float


@dataclass
class _Choice:
    """The search of `budget`, and the place of what is kept."""

    setup: ModelSetup
    policy: MemoryPolicy
    stage: Stage
    sizes: MeshSizes
    estimate: MemoryEstimate
    limit: float | None
    host_bytes: float | None
    transport: TransportMemory

    @cached_property
    def _flops(self) -> list[dict[Kept, float]]:
        """`kept_flops` of each layer: a search for the best layout asks for them a hundred thousand times."""
        return [kept_flops(self.setup.shape, self.stage, layer) for layer in range(self.setup.shape.layers)]

    def result(self, layers: tuple[LayerActivations, ...]) -> StageActivations:
        memory = tuple(self.estimate.by_rank(layers, self.transport))
        return StageActivations(layers, memory, self.estimate.host_bytes(layers))

    def fits(self, layers: Sequence[LayerActivations]) -> bool:
        return self.limit is None or self.estimate.reserved(layers, self.transport) <= self.limit

    def with_weights(self, layers: tuple[LayerActivations, ...]) -> tuple[LayerActivations, ...]:
        """The layers with the gathered weights of as many last ones as fit."""

        def last(count: int) -> tuple[LayerActivations, ...]:
            first = len(layers) - count
            return (*layers[:first], *(layer._replace(weights=True) for layer in layers[first:]))

        counts = range(1, len(layers) + 1)
        return last(bisect_left(counts, True, key=lambda count: not self.fits(last(count))))

    def offloaded(self, layers: tuple[LayerActivations, ...]) -> tuple[LayerActivations, ...]:
        """The layers with their activations on the host, if the recipe says so. Raises ConfigError."""
        if not self.policy.offload:
            return layers
        found = sent_to_host(layers)
        needed = self.estimate.host_bytes(found)
        if self.host_bytes is not None and needed > self.host_bytes:
            raise ConfigError(
                [
                    f"activation_offload: stage {self.stage.name} needs {needed / 2**30:.1f} GiB of host memory for "
                    f"each GPU, but {self.host_bytes / 2**30:.1f} GiB are there (memory.host_gib); set "
                    "activation_checkpointing: budget, which sends as much as fits, or raise parallel.cp"
                ]
            )
        return found

    def most(self) -> tuple[LayerActivations, ...]:
        """Activations that `budget` keeps where the GPU does not hold everything."""
        layers = range(self.setup.shape.layers)
        to_attention = [self._step(layer, Kept.INPUT, Kept.ATTENTION, on_host=False) for layer in layers]
        steps = [*_dearest_first(to_attention), *_dearest_first(self._beyond_attention())]
        # Memory grows with every step that is taken, so a bisection finds the last one that fits.
        taken = bisect_left(range(1, len(steps) + 1), True, key=lambda count: not self.fits(self._after(steps[:count])))
        return self._after(steps[:taken])

    def _after(self, steps: Sequence[_Step]) -> tuple[LayerActivations, ...]:
        kept = [Kept.INPUT] * self.setup.shape.layers
        for step in steps:
            kept[step.layer] = step.kept
        return self._placed(kept)

    def _placed(self, kept: Sequence[Kept]) -> tuple[LayerActivations, ...]:
        """The first layers on the host, as far as it has room, if they keep no more than attention's result."""
        layers = []
        room = self.host_bytes if self.host_bytes is not None else float("inf")
        for index, level in enumerate(kept):
            size = self.estimate.kept_bytes(index, level)
            # Not the last layer's, which the backward pass takes first: they would be back at once.
            on_host = self.policy.offload and level <= Kept.ATTENTION and index < len(kept) - 1 and size <= room
            room -= size if on_host else 0
            layers.append(LayerActivations(level, on_host, all_weights_stay(self.stage, self.sizes)))
        return tuple(layers)

    def _beyond_attention(self) -> Iterator[_Step]:
        """Each layer's further steps, always to where the FLOPs spared for a byte are most."""
        for layer in range(self.setup.shape.layers):
            kept = Kept.ATTENTION
            while kept < Kept.ALL:
                on_host = self.policy.offload and kept is Kept.ATTENTION
                further = [self._step(layer, kept, level, on_host) for level in Kept if level > kept]
                best = max(further, key=lambda step: step.flops_per_byte)
                yield best
                kept = best.kept

    def _step(self, layer: int, before: Kept, after: Kept, on_host: bool) -> _Step:
        """on_host: what was kept before took no memory of the GPU."""
        added = self.estimate.kept_bytes(layer, after) - (0 if on_host else self.estimate.kept_bytes(layer, before))
        tokens = self.stage.micro_batch_size * self.stage.seq_len / (self.sizes.cp * self.sizes.tp)  # of a rank
        flops = (self._flops[layer][after] - self._flops[layer][before]) * tokens
        return _Step(layer, after, round(flops / max(added, 1), 3))


def _dearest_first(steps: Iterable[_Step]) -> list[_Step]:
    return sorted(steps, key=lambda step: (-step.flops_per_byte, step.kept, -step.layer))
