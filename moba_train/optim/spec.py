"""What an optimizer must say about itself to be registered (`optim.registry`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from moba_train.config.optim import OptimConfig

NamedParameters = Sequence[tuple[str, nn.Parameter]]

ADAMW_STATE = {"exp_avg": 4, "exp_avg_sq": 4, "step": 0}
"""State of AdamW, whatever implements it: a run may go on with another implementation."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: how it is built, and the state that it keeps."""

    build: Callable[[nn.Module, OptimConfig, torch.device, dist.ProcessGroup | None], Optimizer]
    """From the model (under FSDP2 its parameters are DTensors), its section of the recipe, the device of the run and
    all ranks that hold shards of the model (None: one process without a group) to a torch optimizer over all
    parameters. Each of its parameter groups has an `lr_factor`: its learning rate is that of the run times this factor.
    A parameter without gradient is not stepped and its state stays as it is."""
    state: Mapping[str, int]
    """The state tensors of each parameter, by the names that checkpoints give them, with their bytes for each number of
    the parameter; 0: a single number whatever the parameter's size."""
    matrix_state: Mapping[str, int]
    """The state tensors, as in `state`, of each of the `block_matrices`."""

    def state_bytes(self, matrices: int, others: int) -> int:
        """Bytes of optimizer state for so many numbers in `block_matrices` and in all other parameters."""
        return matrices * sum(self.matrix_state.values()) + others * sum(self.state.values())


def block_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the linear layers in the blocks, by name: matrices that multiply an input.

    Those of attention kinds count too. Embedding, output projection, norms, biases, convolutions, positions and stacks
    of small matrices are none of them. Each projection is a module of its own, so queries, keys, values, gate and up
    are separate matrices, each with all heads or columns.
    """
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: weight for name, weight in model.named_parameters() if name in linears and name.startswith("blocks.")}
