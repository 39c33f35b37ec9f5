"""The backend of attention to selected blocks in a stage: the table of kernels is asked for it once, in resolve."""

from typing import Protocol, runtime_checkable

import torch

from moba_train.attention.kernels.table import BackendChoice, Facts, Machine, resolve_backend, this_machine
from moba_train.config.attention import LayerAttention
from moba_train.config.mesh import MeshSizes
from moba_train.config.stages import Stage
from moba_train.errors import ConfigError
from moba_train.memory.devices import Device
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.fsdp import ModelSetup

_TRITON_ELSEWHERE = "3.6.0"
"""Release of Triton that a machine is taken to have on which a run is only planned."""


@runtime_checkable
class _BlockOptions(Protocol):
    """Options of a kind that attends to selected blocks by a backend of the table."""

    backend: str
    block_size: int
    topk: int


def block_backends(
    setup: ModelSetup, stage: Stage, mesh: MeshSizes, strategy: CPStrategy | None, device: Device
) -> dict[LayerAttention, BackendChoice]:
    """The backends of each attention of the stage that attends to selected blocks; other attention takes the fastest
    kernel for each batch. Raises ConfigError if one cannot run that the recipe names.

    Before each call the layers look up their own facts in the same table and take the first backend that can do the
    batch. Those facts differ from these only in the number of rows of a batch.
    """
    model = setup.shape
    tokens = stage.micro_batch_size * stage.seq_len // mesh.cp
    found = {}
    problems = []
    for layer in dict.fromkeys(stage.attention):
        options = layer.options
        if not isinstance(options, _BlockOptions):
            continue
        facts = Facts(
            _machine(device),
            setup.computation.dtype,
            model.head_width,
            block_size=options.block_size,
            history_blocks=options.topk - 1,
            rows=tokens * model.heads // mesh.tp,
            whole=mesh.cp == 1,
            all_keys=strategy is None or strategy.transport != "ring",
        )
        try:
            found[layer] = resolve_backend(f"attention.{layer.kind}.backend", options.backend, facts)
        except ValueError as error:
            problems.append(f"{error} (stage {stage.name!r})")
    if problems:
        raise ConfigError(problems)
    return found


def _machine(device: Device) -> Machine:
    if device.is_here:
        return this_machine(torch.device(device.type))
    capability = device.gpu.capability if device.gpu is not None else None
    return Machine(device.type, capability, _TRITON_ELSEWHERE, packages=frozenset())
