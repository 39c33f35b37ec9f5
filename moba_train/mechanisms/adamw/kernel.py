"""AdamW by kernels of other packages: what they share. One is a subclass of `KernelAdamW` and an entry point of
the group `moba_train.adamw_kernels`."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moba_train.config.optim import OptimConfig
from moba_train.optim.gradients import local_part


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
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss is returned
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
