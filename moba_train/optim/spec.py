"""Parts of optimization that know no single optimizer: the specification by which one is registered (registry.py), the
learning rate, and the parameters that a stage trains.

The learning rate is a pure function of the tokens consumed, so that resuming needs no scheduler state. A stage names
its parameters by glob patterns, such as `blocks.*.attention.*`. A frozen parameter gets no gradient, and so no
optimizer step, no change of its optimizer state and no weight decay.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from moba_train.config.base import Section
from moba_train.config.optim import OptimConfig, ScheduleConfig
from moba_train.config.stages import Stage
from moba_train.model.adapters import base_parameters
from moba_train.model.feed_forward import MatrixStack

NamedParameters = Sequence[tuple[str, nn.Parameter]]

ADAMW_STATE = {"exp_avg": 4, "exp_avg_sq": 4, "step": 0}
"""State of AdamW, whatever implements it: a run may go on with another implementation."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: how it is built, and the state that it keeps."""

    build: Callable[[nn.Module, OptimConfig, torch.device, dist.ProcessGroup | None], Optimizer]
    """Returns a torch optimizer over all `trained_parameters`. Arguments: the model (under FSDP2 its parameters are
    DTensors), its section of the recipe, the device of the run, and all ranks that hold shards of the model (None: one
    process without a group). Each parameter group of the optimizer has an `lr_factor`, by which the run's learning rate
    is multiplied: with `adamw_groups` that of `optim.lr_factors`; one without them refuses that key in `problems`. A
    parameter without gradient is not stepped and its state stays as it is."""
    state: Mapping[str, int]
    """The state tensors of each parameter, by the names that checkpoints give them, with their bytes for each number of
    the parameter; 0: a single number whatever the parameter's size."""
    matrix_state: Mapping[str, int]
    """The state tensors, as in `state`, of each of the `block_matrices`."""
    problems: Callable[[Any], Iterator[str]] = lambda _config: iter(())
    """Problems of a recipe, a `RunConfig`, with the optimizer, each named by its key."""
    Options: type[Section] | None = None
    """Its section of the recipe, `optim.NAME`; None: it has no keys of its own."""

    def state_bytes(self, matrices: int, others: int) -> int:
        """Bytes of optimizer state. `matrices`, `others`: elements of `block_matrices` and of all other parameters."""
        return matrices * sum(self.matrix_state.values()) + others * sum(self.state.values())


def block_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the linear layers in the blocks, by name: matrices that multiply an input.

    Those of attention kinds count too, and stacks of them (`MatrixStack`), [n, rows, columns]. Embedding, output
    projection, norms, biases, convolutions, positions and other stacks of small matrices are none of them. Each
    projection is a module of its own, so queries, keys, values, gate and up are separate matrices, each with all heads
    or columns.
    """
    linears = {f"{name}.weight" for name, one in model.named_modules() if isinstance(one, nn.Linear | MatrixStack)}
    return {
        name: weight for name, weight in trained_parameters(model) if name in linears and name.startswith("blocks.")
    }


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that an optimizer is built over, by name: all, without the base of adapters."""
    base = base_parameters(model)
    return [(name, parameter) for name, parameter in model.named_parameters() if name not in base]


def learning_rate(schedule: ScheduleConfig, peak: float, tokens: int, span: int) -> float:
    """Learning rate of the step that brings the schedule's own consumed tokens to `tokens`, out of `span`."""
    if tokens < schedule.warmup_tokens:
        return peak * tokens / schedule.warmup_tokens
    low = schedule.min_lr_ratio
    done = min(1.0, (tokens - schedule.warmup_tokens) / max(1, span - schedule.warmup_tokens))
    match schedule.kind:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - (1.0 - low) * done
        case "cosine":
            factor = low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * done))
        case "wsd":  # warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)
            factor = low + (1.0 - low) * min(1.0, max(0, span - tokens) / max(1, schedule.decay_tokens))
    return peak * factor


def stage_learning_rate(stages: Sequence[Stage], index: int, run_schedule: ScheduleConfig, tokens: int) -> float:
    """Learning rate of the step of stage `index` that brings the run to `tokens` consumed tokens.

    A stage with its own schedule starts it from the beginning and spans it over the stage; otherwise the run's schedule
    goes on.

    Schedules count planned tokens: while a stage goes on beyond its `tokens` (`until`), their time stands still, so the
    rate stays what it is at the end of the stage's `tokens`, and later stages have the rates of a run without `until`.
    """
    stage = stages[index]
    own_tokens = min(tokens - stage.first_token, stage.planned_tokens)
    if stage.schedule is not None:
        return learning_rate(stage.schedule, stage.lr, own_tokens, stage.planned_tokens)
    span = stages[-1].planned_first_token + stages[-1].planned_tokens
    return learning_rate(run_schedule, stage.lr, stage.planned_first_token + own_tokens, span)


def is_trainable(name: str, patterns: Sequence[str]) -> bool:
    """True if the parameter `name` matches any of `patterns`; `*` matches any text, dots included."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def set_trainable(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let gradients reach the parameters of `model` whose names match any of `patterns`, and no others; none of the
    base of adapters.

    For a plain model or one under FSDP2, between steps, on all ranks together.
    """
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in fsdp_modules:
        module.reshard()  # an evaluation leaves the outermost one gathered, and the optimizer knows its shards only
    changed = False
    base = base_parameters(model)
    for name, parameter in model.named_parameters():
        trainable = is_trainable(name, patterns) and name not in base
        changed |= parameter.requires_grad != trainable
        parameter.requires_grad_(trainable)
    if changed:
        # FSDP2 hands the flag of a shard on to the gathered parameter at each gather, but reads the dtypes of gradient
        # reduction off the parameters that were trainable when it initialized itself: a module that was frozen then
        # would reduce in bf16. `unshard` initializes again.
        for module in fsdp_modules:
            module.unshard()
            module.reshard()
