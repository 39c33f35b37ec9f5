"""Runs into which faults are put at given steps, as they occur in practice: into a batch, a gradient, a rank."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.model.loss import LossSums
from moba_train.model.transformer import Transformer
from moba_train.parallel.pipeline.model import PipelineModel
from moba_train.run.trainer import Trainer
from tests.run.tiny_run import VOCAB, Run

Fault = Callable[[Tensor], Tensor]
"""From the loss sum of a micro-batch to another one."""


def scaled_gradient(loss: Tensor) -> Tensor:
    """`loss` with a gradient 1,000 times as large."""
    return 1000 * loss - 999 * loss.detach()


def overflow(loss: Tensor) -> Tensor:
    """What float16 makes of a number beyond 65504."""
    return loss * torch.tensor(1e5).half()


def not_a_number(loss: Tensor) -> Tensor:
    return loss * torch.nan


def gradient_not_a_number(loss: Tensor) -> Tensor:
    """`loss`, whose gradient is lost on its way back."""
    loss = loss.clone()
    loss.register_hook(lambda gradient: gradient * torch.nan)
    return loss


def once_on_rank_1(fault: Fault) -> Fault:
    """`fault` in the first micro-batch that rank 1 meets."""
    left = [fault]
    return lambda loss: left.pop()(loss) if left and torch.distributed.get_rank() == 1 else loss


def not_a_number_on_rank_1(loss: Tensor) -> Tensor:
    return not_a_number(loss) if torch.distributed.get_rank() == 1 else loss


def inject(
    monkeypatch: pytest.MonkeyPatch, faults: Mapping[int, Fault], poisoned: tuple[int, ...] = ()
) -> list[tuple[int, bool]]:
    """In these steps, the loss of every micro-batch passes through its fault, or all labels are noise.

    Returns a list that fills with (step, whether it changed any tensor of model or optimizer).
    """
    train_step = Trainer._step
    loss = Transformer.loss
    run_part = PipelineModel.run_part
    now: list[int] = [0]
    changed: list[tuple[int, bool]] = []

    def step(trainer: Trainer, stage: Stage, batches: list[Batch]) -> None:
        now[0] = trainer.progress.step + 1
        if now[0] in poisoned:
            noise = torch.Generator().manual_seed(now[0])
            for batch in batches:
                batch.labels.random_(VOCAB, generator=noise)
        before = _state(trainer)
        train_step(trainer, stage, batches)
        after = _state(trainer)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        changed.append((trainer.progress.step, not same))

    def faulty(sums: LossSums) -> LossSums:
        if now[0] in faults and torch.is_grad_enabled():
            return sums._replace(loss=faults[now[0]](sums.loss))
        return sums

    def faulty_loss(model: Transformer, *arguments: Any) -> LossSums:
        return faulty(loss(model, *arguments))

    def faulty_part(model: PipelineModel, *arguments: Any) -> tuple[Tensor, LossSums]:
        x_TD, sums = run_part(model, *arguments)
        return x_TD, faulty(sums)

    monkeypatch.setattr(Trainer, "_step", step)
    monkeypatch.setattr(Transformer, "loss", faulty_loss)
    monkeypatch.setattr(PipelineModel, "run_part", faulty_part)
    return changed


def _state(trainer: Trainer) -> list[Tensor]:
    """Copies of this rank's shards of weights and optimizer state."""
    states = [value for state in trainer.learner.optimizer.state.values() for value in state.values()]
    tensors = [*trainer.learner.model.parameters(), *states]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone() for tensor in tensors]


def steady(run: Run, reaction: str, steps: int = 40, **spike: Any) -> Run:
    """The tiny run made longer, in one stage of full and MoBA layers, with a checkpoint after every fourth step."""
    run.recipe["stages"] = [run.recipe["stages"][1] | {"tokens": steps * 512, "micro_batch_size": 2}]
    run.recipe["health"] = {"spike": {"reaction": reaction, "window": 16, **spike}}
    run.recipe["evaluation"]["every"] = 1000
    run.recipe["optim"] = {"lr": 0.003, "schedule": {"warmup_tokens": 4000}}
    return run


FAULTS = {22: scaled_gradient, 26: overflow, 30: not_a_number}
"""By step: the faults of the run `skipping` (conftest.py)."""
POISONED = 36
"""The step in which its labels are noise."""
STEPS = 40
"""Its steps."""
