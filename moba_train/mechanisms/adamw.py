"""AdamW by kernels of other packages: implementations for `optim.implementation`.

`KernelAdamW` has what they share: torch's state, this rank's shards, one step count for each parameter.

- NVIDIA's packages: multi-tensor kernels, one launch for many parameters, with the arguments of their `FusedAdam`.
- DeepSpeed: the moments live in host memory, and a vectorized CPU kernel makes the update. Of a step's tensors only
  gradients and weights travel, in pieces through page-locked buffers: while the host updates one piece, the next one
  comes down and the last one goes up. The weights on the GPU stay the only ones, so nothing can become stale when a
  checkpoint is loaded. The moments never travel, so they are in ordinary memory.
"""

import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moba_train.config.optim import OptimConfig
from moba_train.environment import import_problem
from moba_train.errors import LaunchError
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


PIECE = 1 << 25
"""Elements that travel at once, 128 MiB of weights and as many of gradients."""
_SLOTS = 3
"""Pieces under way: one comes down, one is updated, one goes up."""


class HostAdamW(KernelAdamW):
    """AdamW by DeepSpeedCPUAdam, for parameters on a GPU (or, in the same way, on the CPU)."""

    state_device = torch.device("cpu")

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, config)
        self._adam = _deepspeed_adam(config)
        self._device = next(parameter.device for group in groups for parameter in group["params"])
        self._copies: _Copies | None = None

    @classmethod
    def problem(cls, device: str) -> str:
        """Reason why it cannot run: DeepSpeed is not installed; empty when it is. Whether its kernel can be compiled
        shows when the optimizer is made."""
        if find_spec("deepspeed") is None:
            return "the package deepspeed is not installed (pip install deepspeed ninja)"
        return ""

    def update(self, shards: Sequence[Shards], step: int, group: dict[str, Any]) -> None:
        """Update parameters and moments in place: the parameters on their way through host memory."""
        self._reset_step(group)
        if self._copies is None:
            self._copies = _Copies(self._device)
        for piece in self._copies.through_host([piece for shard in shards for piece in _pieces(shard)]):
            self._call(step, group, piece)

    def _reset_step(self, group: dict[str, Any]) -> None:
        """Make the next call depend on its step alone. The kernel multiplies the powers of beta up from step to step,
        and a run that resumes would round them otherwise; after a step 0 it computes them from the step."""
        nothing = torch.empty(0)
        self._call(0, group, Shards(nothing, nothing, nothing, nothing))

    def _call(self, step: int, group: dict[str, Any], shards: Shards) -> None:
        adam = self._adam
        options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], True)
        adam.ds_opt_adam.adam_update(adam.opt_id, step, *options, *shards)


def _deepspeed_adam(config: OptimConfig) -> Any:
    """DeepSpeedCPUAdam without parameters of its own. Its C++ code is compiled at first use, which takes minutes; torch
    keeps the result."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam([torch.zeros(1)], lr=config.lr, betas=config.betas, eps=config.eps, adamw_mode=True)
    except Exception as error:  # whatever its builder, the compiler or the loader raises
        cause = error.__cause__ or error
        missing = [
            name
            for name, is_there in (
                ("deepspeed (pip install deepspeed)", find_spec("deepspeed") is not None),
                ("ninja (pip install ninja)", shutil.which("ninja") is not None),
                ("a C++ compiler (g++)", shutil.which("g++") is not None),
            )
            if not is_there
        ]
        why = f"missing: {', '.join(missing)}" if missing else f"{type(cause).__name__}: {str(cause).strip()[-600:]}"
        raise LaunchError(
            f"optim.implementation: given 'deepspeed_cpu', but DeepSpeed's cpu_adam cannot be built or loaded; {why}. "
            "See docs/how-to/optional-packages.md, or set implementation: torch"
        ) from error


def _pieces(shards: Shards) -> Iterator[Shards]:
    """The flattened shards, `PIECE` elements at a time."""
    flat = [part.view(-1) for part in shards]
    for first in range(0, flat[0].numel(), PIECE):
        yield Shards(*(part[first : first + PIECE] for part in flat))


class _Slot:
    """Host buffers for one piece on its way, and the ends of its copies."""

    def __init__(self, device: torch.device, elements: int) -> None:
        pinned = device.type == "cuda"
        self.parameter = torch.empty(elements, pin_memory=pinned)
        self.gradient = torch.empty(elements, pin_memory=pinned)
        event = torch.get_device_module(device).Event
        self.down = event()
        self.up = event()


class _Copies:
    """Streams that bring pieces to the host and back. On a CPU the copies are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._down = self._module.Stream()
        self._up = self._module.Stream()
        self._slots: list[_Slot] = []

    def through_host(self, pieces: list[Shards]) -> Iterator[Shards]:
        """Each piece with its weights and gradients in host memory, to be updated before the next one is asked for; the
        weights are then copied back. The current stream waits for the last of these copies."""
        self._reserve(max(piece.parameter.numel() for piece in pieces))
        current = self._module.current_stream()
        for stream in (self._down, self._up):
            stream.wait_stream(current)
        self._fetch(pieces, 0)
        for index, piece in enumerate(pieces):
            self._fetch(pieces, index + 1)
            slot = self._slots[index % _SLOTS]
            # The host itself computes next, so it must wait, unlike for the copy back.
            slot.down.synchronize()
            on_host = piece._replace(parameter=_fit(slot.parameter, piece), gradient=_fit(slot.gradient, piece))
            yield on_host
            with self._module.stream(self._up):
                piece.parameter.copy_(on_host.parameter, non_blocking=True)
                slot.up.record(self._up)
        # The next forward pass must not read weights that are still on their way up.
        current.wait_stream(self._up)

    def _fetch(self, pieces: list[Shards], index: int) -> None:
        """Begin to bring a piece down, once the one before it in its slot has gone up."""
        if index >= len(pieces):
            return
        piece = pieces[index]
        slot = self._slots[index % _SLOTS]
        with self._module.stream(self._down):
            slot.up.wait(self._down)
            _fit(slot.parameter, piece).copy_(piece.parameter, non_blocking=True)
            _fit(slot.gradient, piece).copy_(piece.gradient, non_blocking=True)
            slot.down.record(self._down)

    def _reserve(self, elements: int) -> None:
        if not self._slots or self._slots[0].parameter.numel() < elements:
            self._slots = [_Slot(self._device, elements) for _ in range(_SLOTS)]


def _fit(buffer: Tensor, piece: Shards) -> Tensor:
    return buffer[: piece.parameter.numel()]
