"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with weight decay on matrices only, by one of several
implementations. All keep the same state, so a run may go on with another one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from moba_train.config.optim import AdamWImplementation, OptimConfig
from moba_train.optim.adamw_cpu import HostAdamW
from moba_train.optim.adamw_fused import ApexAdamW, TransformerEngineAdamW
from moba_train.optim.kernel_adamw import KernelAdamW
from moba_train.optim.local import local_part
from moba_train.optim.spec import ADAMW_STATE, NamedParameters, OptimizerSpec

IMPLEMENTATIONS: dict[AdamWImplementation, type[KernelAdamW]] = {
    "apex": ApexAdamW,
    "transformer_engine": TransformerEngineAdamW,
    "deepspeed_cpu": HostAdamW,
}
"""Those that are kernels of other packages; `torch` is torch's own optimizer."""


def implementation_problem(config: OptimConfig, device: str | None) -> str:
    """Why `optim.implementation` cannot run on `device` ("cuda", "cpu"; None: not known); empty when it can."""
    if config.implementation == "torch" or device is None:
        return ""
    return IMPLEMENTATIONS[config.implementation].problem(device)


def adamw_groups(parameters: NamedParameters, config: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups with weight decay (matrices) and without (norms, biases)."""
    matrices = [parameter for _, parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for _, parameter in parameters if parameter.dim() < 2]
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
            listed[:] = map(local_part, listed)
        return has_complex


def build_torch_adamw(groups: list[dict[str, Any]], config: OptimConfig, device: torch.device) -> AdamW:
    """torch's AdamW over parameter groups."""
    fused = True if device.type == "cuda" else None
    return TorchAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _build(model: nn.Module, config: OptimConfig, device: torch.device, _group: dist.ProcessGroup | None) -> Optimizer:
    groups = adamw_groups(list(model.named_parameters()), config)
    if config.implementation == "torch":
        return build_torch_adamw(groups, config, device)
    return IMPLEMENTATIONS[config.implementation](groups, config)


ADAMW = OptimizerSpec(_build, state=ADAMW_STATE, matrix_state=ADAMW_STATE)
