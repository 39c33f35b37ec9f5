"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with weight decay on matrices only, by torch or by a kernel.

All keep the same state, so a run may go on with another one. `KernelAdamW` has what kernels of other packages
share: torch's state, this rank's shards, one step count for each parameter. Such a kernel is one subclass of it and one
entry point of the group `moba_train.adamw_kernels`.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from moba_train.config.optim import OptimConfig
from moba_train.optim.gradients import local_part
from moba_train.optim.spec import ADAMW_STATE, NamedParameters, OptimizerSpec, trained_parameters
from moba_train.registry import ADAMW_KERNELS


class Shards(NamedTuple):
    """This rank's shards of one parameter, float32, of one shape."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class KernelAdamW(Optimizer):
    """AdamW with the state of torch.optim.AdamW, updated by a kernel.

    The packages' own optimizer classes know no DTensors and keep one step count for a whole parameter group, so that
    parameters that were frozen for a while would be corrected as if they had been trained. Their kernels take the step
    as an argument.
    """

    state_device: torch.device | None = None
    """Device of the moments; None: that of the parameters."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})

    @classmethod
    @abstractmethod
    def problem(cls, device: str) -> str:
        """Reason why it cannot run on `device`, "cuda" or "cpu", in words for an error message; empty when it can."""

    @abstractmethod
    def update(self, shards: Sequence[Shards], step: int, group: dict[str, Any]) -> None:
        """Update parameters and moments in place: step `step`, counted from 1, with the options of `group`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            # One launch for each step count: parameters that were frozen for a while are fewer steps old, and their
            # bias correction differs.
            by_step: dict[int, list[Shards]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                state["step"] += 1
                parts = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                shards = Shards(*map(local_part, parts))
                if shards.parameter.numel():
                    by_step.setdefault(int(state["step"]), []).append(shards)
            for step, found in by_step.items():
                self.update(found, step, group)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            assert parameter.grad is not None
            # On the CPU, so that reading it waits for no GPU.
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter.grad, device=self.state_device)
        return state


def implementation_problem(config: OptimConfig, device: str | None) -> str:
    """Reason why `optim.implementation` cannot run on `device` ("cuda", "cpu"; None: not known); empty when it can."""
    if config.implementation == "torch" or device is None:
        return ""
    problem: str = ADAMW_KERNELS[config.implementation].problem(device)
    return problem


def keeps_state_on_host(config: OptimConfig) -> bool:
    """True if the moments are in host memory."""
    device = None if config.implementation == "torch" else ADAMW_KERNELS[config.implementation].state_device
    return device is not None and bool(device.type == "cpu")


def adamw_groups(parameters: NamedParameters, config: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups with weight decay (matrices) and without (norms, biases)."""
    matrices = [value for name, value in parameters if value.dim() >= 2 and not name.endswith(".bias")]
    vectors = [value for name, value in parameters if value.dim() < 2 or name.endswith(".bias")]
    return [
        {"params": matrices, "weight_decay": config.weight_decay, "lr_factor": 1.0},
        {"params": vectors, "weight_decay": 0.0, "lr_factor": 1.0},
    ]


class TorchAdamW(AdamW):
    """torch's AdamW, given this rank's parts of sharded tensors.

    Every operation is elementwise, so the bits are those of DTensors. DTensor would first derive how the result of each
    operation is sharded, which takes seconds of the first step on a mesh of three dimensions.
    """

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        """Fill the lists that a step works on: parameters, gradients, moments (three, one unused), step counts."""
        has_complex: bool = super()._init_group(group, *tensors)
        for listed in tensors:
            # In place: torch's own step works on these list objects.
            listed[:] = map(local_part, listed)
        return has_complex


def build_torch_adamw(groups: list[dict[str, Any]], config: OptimConfig, device: torch.device) -> AdamW:
    """torch's AdamW over parameter groups."""
    # 1B parameters take 12.9 to 13.5 ms, by apex 14.7, by Transformer Engine 12.6, by DeepSpeed in host memory 1,093
    # (benchmarks/measured/packages.md).
    fused = True if device.type == "cuda" else None
    return TorchAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _build(model: nn.Module, config: OptimConfig, device: torch.device, _group: dist.ProcessGroup | None) -> Optimizer:
    groups = adamw_groups(trained_parameters(model), config)
    if config.implementation == "torch":
        return build_torch_adamw(groups, config, device)
    optimizer: Optimizer = ADAMW_KERNELS[config.implementation](groups, config)
    return optimizer


ADAMW = OptimizerSpec(_build, state=ADAMW_STATE, matrix_state=ADAMW_STATE)
