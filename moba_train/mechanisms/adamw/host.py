"""AdamW by DeepSpeed: the moments live in host memory, and a vectorized CPU kernel makes the update.

Of a step's tensors only gradients and weights travel, in pieces through page-locked buffers: while the host updates one
piece, the next one comes down and the last one goes up. The weights on the GPU stay the only ones, so nothing can
become stale when a checkpoint is loaded. The moments never travel, so they are in ordinary memory.
"""

import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from moba_train.config.optim import OptimConfig
from moba_train.errors import LaunchError
from moba_train.mechanisms.adamw.kernel import KernelAdamW, Shards

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
