"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with weight decay on matrices only, by torch or by a kernel of
another package (`mechanisms/adamw/kernel.py`). All keep the same state, so a run may go on with another one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from moba_train.config.optim import OptimConfig
from moba_train.optim.gradients import local_part
from moba_train.optim.spec import ADAMW_STATE, NamedParameters, OptimizerSpec, is_trainable, trained_parameters
from moba_train.registry import ADAMW_KERNELS


def implementation_problem(config: OptimConfig, device: str | None) -> str:
    """Reason why `optim.implementation` cannot run on `device` ("cuda", "cpu"; None: not known); empty when it can."""
    if config.implementation == "torch" or device is None:
        return ""
    return str(ADAMW_KERNELS[config.implementation].problem(device))


def keeps_state_on_host(config: OptimConfig) -> bool:
    """True if the moments are in host memory."""
    return config.implementation != "torch" and str(ADAMW_KERNELS[config.implementation].state_device) == "cpu"


def adamw_groups(parameters: NamedParameters, config: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups with weight decay (matrices) and without (norms, biases), for each factor of `lr_factors`."""
    found: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for name, value in parameters:
        factors = (factor for pattern, factor in config.lr_factors.items() if is_trainable(name, [pattern]))
        decays = value.dim() >= 2 and not name.endswith(".bias")
        found.setdefault((next(factors, 1.0), decays), []).append(value)
    return [
        {"params": group, "weight_decay": config.weight_decay * decays, "lr_factor": factor}
        for (factor, decays), group in found.items()
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
    return TorchAdamW(groups, config.lr, config.betas, config.eps, fused=device.type == "cuda" or None)


def _build(model: nn.Module, config: OptimConfig, device: torch.device, _group: dist.ProcessGroup | None) -> Optimizer:
    groups = adamw_groups(trained_parameters(model), config)
    if config.implementation == "torch":
        return build_torch_adamw(groups, config, device)
    optimizer: Optimizer = ADAMW_KERNELS[config.implementation](groups, config)
    return optimizer


ADAMW = OptimizerSpec(_build, state=ADAMW_STATE, matrix_state=ADAMW_STATE)
