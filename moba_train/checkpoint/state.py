"""The tensors that a training run consists of: collected for a checkpoint, and restored from one.

Names: `model.<parameter>`, `optim.<parameter>.<state>` (the states that `optim.registry` lists for the optimizer), and
for each rank `rng.<rank>.cpu` and `rng.<rank>.cuda`. Parameter names are those of the plain model, whatever wraps it
(FSDP2, torch.compile, activation checkpointing). Learning rates and other options of the optimizer are the recipe's.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim import Optimizer

from moba_train.checkpoint.load import load_checkpoint
from moba_train.model.adapters import base_parameters
from moba_train.model.build import initialize_weights
from moba_train.model.part import copied_parameters, is_whole
from moba_train.model.transformer import Transformer
from moba_train.optim.gradients import local_part
from moba_train.parallel.float8 import plain
from moba_train.parallel.world import gather_over_ranks


class TrainingTensors:
    """The tensors to save: the model's, the optimizer's and this rank's random state.

    Those of model and optimizer are the live ones. They are collected again only when one was replaced: collecting
    takes 65 ms for 32 layers on a CPU, looking for replaced ones 5 ms. An optimizer that has not stepped yet is given
    the state that it would start from.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._places: set[int] | None = None
        self._tensors: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, Tensor]:
        """The tensors as they are now, by name."""
        if self._places != self._current_places():
            tensors = model_tensors(self._model) | _optimizer_tensors(self._model, self._optimizer)
            copies = tuple(_state_names(copied_parameters(self._model)))
            self._tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(copies)}
            self._places = self._current_places()
        return self._tensors | _rng_tensors()

    def _current_places(self) -> set[int]:
        """Addresses of the values; FSDP moves the shards of parameters in the first forward pass."""
        parameters = (local_part(parameter).data_ptr() for parameter in self._model.parameters())
        states = (id(value) for state in self._optimizer.state.values() for value in state.values())
        return {*parameters, *states}


def parameter_sizes(model: Transformer) -> dict[str, int]:
    """Number of elements of each parameter of the whole model, by name. A collective where ranks have parts of it."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if is_whole(model):
        return sizes
    return {name: size for of_rank in gather_over_ranks(sizes) for name, size in of_rank.items()}


def reset_parameters(model: Transformer, optimizer: Optimizer, prefixes: Collection[str], seed: int) -> None:
    """Give the parameters whose names begin with one of `prefixes` the values and the optimizer state with which they
    begin in a run with this seed."""
    if not prefixes:
        return
    states = _optimizer_tensors(model, optimizer)  # also brings FSDP back to its shards, where an evaluation has been
    initialize_weights(model, seed, prefixes)
    for name, tensor in states.items():
        if name.startswith(tuple(_state_names(prefixes))):
            tensor.zero_()


def load_model_and_optimizer(
    model: nn.Module, optimizer: Optimizer, path: Path, *, unused: Collection[str] = (), verify: bool = False
) -> dict[str, Any]:
    """Restores `TrainingTensors` from the checkpoint `path`, on any number of ranks, and returns the checkpoint's meta.

    Parameters whose names begin with one of the prefixes `unused` may be missing on either side or have another shape
    there; they then stay as they are. The random state is restored if the checkpoint holds one for this rank (and
    device), and left alone otherwise.
    Raises CheckpointError on all ranks if the checkpoint is damaged or does not fit on any of them.
    """
    rng = _rng_tensors()
    tensors = model_tensors(model) | _optimizer_tensors(model, optimizer) | rng
    meta = load_checkpoint(
        path,
        tensors,
        optional=("rng.",),
        reshapable=_state_names(unused),
        elsewhere=_elsewhere(model, tensors),
        verify=verify,
    )
    for name, state in rng.items():
        torch.cuda.set_rng_state(state) if name.endswith(".cuda") else torch.set_rng_state(state)
    return meta


def load_model(
    model: nn.Module,
    path: Path,
    *,
    optional: Collection[str] = (),
    verify: bool = False,
    without: Collection[str] | None = None,
) -> dict[str, Any]:
    """Restores the model alone, for evaluation and generation, and returns the checkpoint's meta.

    Parameters whose names begin with one of the prefixes in `optional` may be missing on either side; the model's then
    stay as they are, and so do those of `without` (see `model_tensors`).
    """
    names = ("optim.", "rng.", *_state_names(optional))
    tensors = model_tensors(model, without)
    return load_checkpoint(path, tensors, optional=names, elsewhere=_elsewhere(model, tensors), verify=verify)


def _elsewhere(model: nn.Module, tensors: Collection[str]) -> set[str]:
    """Names of the tensors that only other ranks of a pipeline have. Called on all ranks together."""
    if not isinstance(model, Transformer) or is_whole(model):
        return set()
    return {name for of_rank in gather_over_ranks([*tensors]) for name in of_rank if name not in tensors}


def _state_names(parameters: Collection[str]) -> list[str]:
    """Names, or beginnings of names, of the tensors of these parameters."""
    return [f"{part}.{name}" for name in parameters for part in ("model", "optim")]


def model_tensors(model: nn.Module, without: Collection[str] | None = None) -> dict[str, Tensor]:
    """The live parameters of `model` by their names in a checkpoint, without these; None: without the base of
    adapters."""
    values: dict[str, Any] = get_model_state_dict(model)
    left_out = base_parameters(model) if without is None else without
    return {f"model.{name}": plain(value) for name, value in values.items() if name not in left_out}


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    fresh = not optimizer.state
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    tensors: dict[str, Tensor] = {}
    for name, value in flat.items():
        if name.startswith("state.") and isinstance(value, Tensor):
            tensors[f"optim.{name.removeprefix('state.')}"] = value
    if fresh:
        # torch has just created the state by a step with zero gradients and learning rate 0, which must not count.
        for tensor in tensors.values():
            tensor.zero_()
    return tensors


def _rng_tensors() -> dict[str, Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states
