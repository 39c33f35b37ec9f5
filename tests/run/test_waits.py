"""How often a step waits for the GPU: once, before the update. A later wait would be one for the update. And how long a
step is: nothing between two steps is left out."""

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moba_train.optim import gradients
from moba_train.run import trainer
from moba_train.run.recovery import Recovery
from moba_train.run.step import StepLosses, StepResult
from moba_train.run.trainer import Trainer
from moba_train.telemetry.telemetry import Telemetry
from tests.run.tiny_run import Run

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy")


class Reads(TorchFunctionMode):
    """Counts by name what makes the host wait for a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in READS:
            self.counts[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_nothing_waits_between_the_update_and_the_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms of two attention kinds. Comparing ranks reads numbers, but none of the GPU's."""
    monkeypatch.setattr(trainer, "COMPARE_EVERY", 1000)
    seen: list[Counter[str]] = []
    reads = Reads()
    applied, log = Recovery.applied, Telemetry.log

    def applied_and_count(self: Any, *given: Any) -> None:
        reads.__enter__()
        applied(self, *given)

    def log_and_end(self: Any, *given: Any) -> None:
        reads.__exit__(None, None, None)
        seen.append(reads.counts.copy())
        log(self, *given)

    monkeypatch.setattr(Recovery, "applied", applied_and_count)
    monkeypatch.setattr(Telemetry, "log", log_and_end)
    assert run.train_here() == 0
    records = run.records("metrics")
    assert len(seen) == len(records) == 12
    assert any("grad_norm_moba" in record for record in records)
    assert seen == [Counter()] * 12


def test_gradients_are_read_once_for_all_norms(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    norm = gradients.foreach_norm

    def norm_and_count(tensors: Any, *given: Any) -> Any:
        read.append(len(tensors))
        return norm(tensors, *given)

    monkeypatch.setattr(gradients, "foreach_norm", norm_and_count)
    assert run.train_here() == 0
    weights = 3 + 9 * run.recipe["model"]["layers"]  # embedding, norm, output; in a block seven products and two norms
    assert read == [weights] * 12
    assert all("grad_norm_full" in record for record in run.records("metrics"))


def test_a_step_begins_where_the_one_before_was_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its time counts what the GPU still had to do for the update before, and the log. Saves and evaluations and the
    beginning of a stage are no part of a step."""
    began: list[float] = []
    logged: list[float] = []
    step, log = Trainer._step, Telemetry.log

    def step_and_note(self: Trainer, *given: Any) -> None:
        began.append(time.perf_counter() - self.clock.elapsed_s)
        step(self, *given)

    def log_and_note(self: Any, *given: Any) -> None:
        log(self, *given)
        logged.append(time.perf_counter())

    monkeypatch.setattr(Trainer, "_step", step_and_note)
    monkeypatch.setattr(Telemetry, "log", log_and_note)
    assert run.train_here() == 0
    assert len(began) == len(logged) == 12
    anew = [number for number in range(2, 13) if began[number - 1] > logged[number - 2]]
    assert anew == [5, 7, 9]  # after the saves of steps 4 and 8, and the evaluation and the end of the stage in step 6


def test_all_numbers_of_a_step_are_read_at_once() -> None:
    losses = StepLosses(torch.device("cpu"))
    losses.loss += 2.5
    losses.auxiliary = torch.tensor([0.0, 0.25, 0.5])
    own: Tensor = torch.tensor(7.0)
    reads = Reads()
    with reads:
        result = StepResult.read(losses, own, torch.tensor(1.5), {"grad_norm_moba": torch.tensor(0.5)})
    assert reads.counts == {"tolist": 1}
    assert result.numbers == {"loss": 2.5, "grad_norm": 1.5}
    assert result.further == {
        "grad_norm_moba": 0.5,
        "auxiliary_loss": 0.75,
        "auxiliary_loss_layer_1": 0.25,
        "auxiliary_loss_layer_2": 0.5,
    }
    losses.auxiliary = None
    assert StepResult.read(losses, own, torch.tensor(float("nan")), {}).further == {}
    assert not StepResult.read(losses, own, torch.tensor(float("nan")), {}).is_finite
