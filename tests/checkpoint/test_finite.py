"""A save finds NaN and infinite values on any rank, says so in the meta, and never costs the last finite checkpoint."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moba_train.checkpoint.checkpointer import MOST_NAMED, Checkpointer
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import is_finite, is_good, latest_checkpoint
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.staging import FiniteCheck
from moba_train.checkpoint.state import TrainingTensors
from moba_train.optim.gradients import local_part
from tests.checkpoint.checkpoint_ranks import build, process_group, run_ranks, train
from tests.checkpoint.test_publish import steps


def test_nan_and_infinity_are_found_and_nothing_else(device: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    sound = {
        "largest": torch.full((4,), torch.finfo(torch.float32).max),
        "largest half": torch.full((4,), 65504.0, dtype=torch.float16),
        "double": torch.full((4,), 1e300, dtype=torch.float64),
        "empty": torch.empty(0),
        "bytes": torch.full((4,), 255, dtype=torch.uint8),
        "number": torch.tensor(1.0),
    }
    broken = {
        "nan": torch.tensor([1.0, nan, 2.0]),
        "transposed": torch.tensor([[1.0, 2.0], [nan, 3.0]]).t(),
        "bfloat16": torch.tensor([-inf], dtype=torch.bfloat16),
        "infinite": torch.tensor([0.0] * 1000 + [inf]),
    }
    tensors = {name: tensor.to(device) for name, tensor in (sound | broken).items()}
    tensors["on the host"] = torch.tensor([nan])
    check = FiniteCheck(tensors)
    if device.type == "cuda":
        torch.cuda.synchronize()
    found, seconds = check.result({name: tensor.cpu() for name, tensor in tensors.items()})
    assert found == [*broken, "on the host"]
    assert seconds > 0


def save_with_nan_on_rank_1(folder: Path) -> None:
    model, optimizer = build(seed=0)
    train(model, optimizer, 1)
    tensors = TrainingTensors(model, optimizer)
    checkpointer = Checkpointer(folder, Retention(1))
    checkpointer.save(1, tensors(), {"good": True})
    checkpointer.wait()
    if dist.get_rank() == 1:
        local_part(tensors()["optim.0.weight.exp_avg"])[0, 0] = torch.nan
    for step in (2, 3):
        checkpointer.save(step, tensors(), {"good": True})
        checkpointer.wait()
        assert checkpointer.last_saved is not None
        assert checkpointer.last_saved.not_finite == ["optim.0.weight.exp_avg"]
    checkpointer.close()


def test_nan_in_one_rank_s_optimizer_state_costs_the_mark_and_no_finite_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_ranks(2, save_with_nan_on_rank_1, tmp_path / "store", folder)
    assert steps(folder) == [1, 3]
    assert read_meta(folder / "step_00000001") == {"good": True}
    assert read_meta(folder / "step_00000003") == {"good": False, "not_finite": ["optim.0.weight.exp_avg"]}
    assert latest_checkpoint(folder, is_good) == latest_checkpoint(folder, is_finite) == folder / "step_00000001"


@pytest.mark.parametrize("good", [True, False])
def test_the_newest_finite_checkpoint_stays_though_no_spike_free_one_was_ever_saved(tmp_path: Path, good: bool) -> None:
    with process_group(tmp_path / "store"):
        checkpointer = Checkpointer(tmp_path / "checkpoints", Retention(1))
        for step, value in ((1, 0.0), (2, 0.0), (3, torch.nan), (4, torch.nan)):
            checkpointer.save(step, {f"weight.{i}": torch.tensor([value]) for i in range(30)}, {"good": good})
        checkpointer.close()
    assert steps(tmp_path / "checkpoints") == [2, 4]
    assert len(read_meta(tmp_path / "checkpoints" / "step_00000004")["not_finite"]) == MOST_NAMED
