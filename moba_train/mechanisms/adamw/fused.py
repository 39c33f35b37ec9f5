"""AdamW by NVIDIA's packages: multi-tensor kernels, one launch for many parameters, with the arguments of their
`FusedAdam`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch

from moba_train.config.optim import OptimConfig
from moba_train.environment import import_problem
from moba_train.mechanisms.adamw.kernel import KernelAdamW, Shards

_CHUNK = 1 << 16
"""Elements that a thread block works on, as in both packages."""
_DECOUPLED = 1
"""Mode of the kernels: weight decay as in AdamW."""


class _FusedAdamW(KernelAdamW):
    """AdamW by the function `multi_tensor_adam` of a compiled module."""

    modules: ClassVar[tuple[str, ...]]
    """Modules to import, in order; the last one has the kernel."""
    install: ClassVar[str]

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, config)
        self._kernel: Callable[..., None] = self._load()
        device = next(parameter.device for group in groups for parameter in group["params"])
        # The kernels skip the update where this flag is set, for loss scaling; bf16 needs none.
        self._never_skip = torch.zeros(1, dtype=torch.int32, device=device)

    @classmethod
    def _load(cls) -> Callable[..., None]:
        modules = [import_module(name) for name in cls.modules]
        kernel: Callable[..., None] = modules[-1].multi_tensor_adam
        return kernel

    @classmethod
    def problem(cls, device: str) -> str:
        """Reason why it cannot run on `device`: no GPU, or a package that cannot be imported; empty when it can."""
        if device != "cuda":
            return f"the run trains on {device}, a GPU needed"
        reason = import_problem((module, "__name__") for module in cls.modules[:-1])
        reason = reason or import_problem([(cls.modules[-1], "multi_tensor_adam")])
        return f"{cls.modules[-1]} cannot be used: {reason} ({cls.install})" if reason else ""

    def update(self, shards: Sequence[Shards], step: int, group: dict[str, Any]) -> None:
        """Update parameters and moments in place, by one call of the kernel."""
        parameters, gradients, exp_avgs, exp_avg_sqs = (list(part) for part in zip(*shards, strict=True))
        self._kernel(
            _CHUNK,
            self._never_skip,
            [gradients, parameters, exp_avgs, exp_avg_sqs],
            group["lr"],
            *group["betas"],
            group["eps"],
            step,
            _DECOUPLED,
            1,  # corrects the bias of the moments
            group["weight_decay"],
        )


class ApexAdamW(_FusedAdamW):
    """AdamW by the kernel of `apex.optimizers.FusedAdam`."""

    modules = ("amp_C",)
    install = "build NVIDIA apex from its source with its CUDA extensions, see docs/how-to/optional-packages.md"


class TransformerEngineAdamW(_FusedAdamW):
    """AdamW by the kernel of `transformer_engine.pytorch.optimizers.FusedAdam`."""

    modules = ("transformer_engine.pytorch", "transformer_engine_torch")  # the first loads what the second links to
    install = "pip install --no-build-isolation 'transformer-engine[pytorch]', see docs/how-to/optional-packages.md"
