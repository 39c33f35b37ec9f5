"""Runs whose AdamW is another package's: the same losses, and checkpoints that any implementation goes on from."""

from copy import deepcopy
from typing import Any

import pytest

from moba_train.mechanisms import adamw as adamw_cpu
from moba_train.mechanisms.adamw import HostAdamW
from moba_train.optim.adamw import IMPLEMENTATIONS
from tests.adam_stand_ins import StandInAdam
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's kernel, or where it is not installed one with its interface."""
    if HostAdamW.problem("cpu"):
        options: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 0.0, "adamw_mode": True}
        monkeypatch.setattr(adamw_cpu, "_deepspeed_adam", lambda _: StandInAdam([], **options))
        monkeypatch.setattr(HostAdamW, "problem", lambda _: "")


def test_state_in_host_memory_resumes_bitwise_and_torch_goes_on_from_it(
    run: Run, finished_run: Run, on_host: None
) -> None:
    run.recipe["checkpoint"]["keep_last"] = 10
    implementation = "optim.implementation=deepspeed_cpu"
    assert run.train_here(implementation) == 0
    assert run.losses() == pytest.approx(finished_run.losses(), rel=1e-4)
    whole = deepcopy(run)
    assert checkpoint_tensors(whole.newest_checkpoint).keys() >= {
        "optim.norm.weight.step",
        "optim.norm.weight.exp_avg_sq",
    }

    run.recipe["run_dir"] = str(run.folder / "resumed")
    run.take_over(whole, 8)
    assert run.train_here(implementation) == 0
    assert run.losses() == whole.losses()
    assert_same_tensors(run.newest_checkpoint, whole.newest_checkpoint)

    run.recipe["run_dir"] = str(run.folder / "mixed")
    run.take_over(whole, 4)
    assert run.train_here() == 0
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_run_on_a_gpu_learns_as_with_torch(run: Run, implementation: str) -> None:
    if reason := IMPLEMENTATIONS[implementation].problem("cuda"):
        pytest.skip(reason)
    run.recipe["model"]["hidden_size"] = 256  # heads of width 64, so that the kernels of real training run
    assert run.train_here() == 0
    losses = run.losses()
    run.recipe["run_dir"] = str(run.folder / "other")
    assert run.train_here(f"optim.implementation={implementation}") == 0
    assert run.losses() == pytest.approx(losses, rel=2e-2)
