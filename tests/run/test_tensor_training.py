"""Training with tensor parallelism: the same curves as on one rank, and checkpoints for any other layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.tiny_run import Run, assert_like_one_gpu, assert_same_tensors, assert_same_training, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

STEPS = 4


def short(run: Run, parallel: dict[str, Any]) -> Run:
    """The tiny run (full attention, then MoBA; packed documents), of one layer, also evaluated by position."""
    run.recipe["parallel"] = parallel
    run.recipe["model"]["layers"], run.recipe["attention"]["full_layers"] = 1, "none"
    run.recipe["checkpoint"]["every"] = 3
    for stage in run.recipe["stages"]:
        stage |= {"tokens": STEPS // 2 * 512, "micro_batch_size": 2}
    run.recipe["evaluation"] |= {"every": 1000, "position_wise": {"bucket": 32, "sequences": 4}}
    return run


def curves(run: Run) -> dict[str, Any]:
    """What a user sees of a run, but for times."""
    keys = ("step", "tokens", "loss_tokens", "loss", "grad_norm")
    found = {key: [record[key] for record in run.records()] for key in keys}
    found["eval_loss"] = [record["eval_loss"] for record in run.records("validation_loss")]
    positions = [record["position_wise"]["curves"] for record in run.records("position_wise")]
    for stage, name in ((0, "full"), (1, "moba"), (1, "full")):
        found[f"by position, stage {stage}, {name}"] = positions[stage][name]["mean"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> dict[str, Any]:
    run = short(Run(tmp_path_factory.mktemp("alone"), corpora), {})
    ranks.train(run, 1)
    return curves(run)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """Two ranks that share the layers. Not to be changed."""
    run = short(Run(tmp_path_factory.mktemp("shared"), corpora), {"tp": 2})
    ranks.train(run, 2)
    return run


@pytest.fixture
def half(run: Run, shared: Run) -> Run:
    """A copy of the shared run as it was after three of four steps."""
    shutil.copytree(shared.run_dir, run.run_dir)
    shutil.rmtree(run.run_dir / "checkpoints" / "step_00000004")
    return run


def test_two_ranks_that_share_the_layers_train_as_one(shared: Run, alone: dict[str, Any]) -> None:
    assert_same_training(curves(shared), alone)
    assert shared.records()[-1]["tokens_per_s"] == 2 * shared.records()[-1]["tokens_per_s_per_device"]


def test_four_ranks_go_on_where_one_stopped(run: Run, alone: dict[str, Any], ranks: Ranks) -> None:
    """A step on one rank, one on (dp_shard 2, tp 2), then the second stage on (cp 2, tp 2); recomputed activations."""
    short(run, {}).recipe["activation_checkpointing"] = "full"
    ranks.train(run, 1, "--stop-at-step", "1")
    run.recipe["parallel"] = {"tp": 2}
    run.recipe["stages"][1]["parallel"] = {"cp": 2}
    ranks.train(run, 4)
    assert_same_training(curves(run), alone)
    assert [choice["step"] for choice in run.records("parallel")] == [2]


def test_resuming_is_bitwise_equal_to_never_stopping(half: Run, shared: Run, ranks: Ranks) -> None:
    ranks.train(short(half, {"tp": 2}), 2)
    assert [event["step"] for event in half.records("resume")] == [3]
    assert curves(half) == curves(shared)
    assert_same_tensors(half.newest_checkpoint, shared.newest_checkpoint)


def test_one_rank_goes_on_where_two_stopped(half: Run, shared: Run, alone: dict[str, Any], ranks: Ranks) -> None:
    ranks.train(short(half, {}), 1)
    assert [event["step"] for event in half.records("resume")] == [3]
    assert_same_training(curves(half), alone)
    ours, theirs = (checkpoint_tensors(run.newest_checkpoint) for run in (half, shared))
    names = {name for name in ours if not name.startswith("rng.")}  # each rank has its own
    assert names == {name for name in theirs if not name.startswith("rng.")}
    for name in names:
        tensor = ours[name]
        assert (theirs[name] - tensor).abs().max() <= 1e-2 * tensor.abs().max(), name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", [False, True])
def test_two_gpus_share_the_layers_and_repeat_bit_by_bit(run: Run, compiled: bool) -> None:
    """NCCL, bf16; head width 64, so that the kernels of real training run."""
    short(run, {}).recipe["model"] |= {"hidden_size": 256}
    run.recipe["compile"] = compiled
    assert run.train_on_gpu(1)[0] == 0
    alone = curves(run)
    shared = []
    run.recipe["parallel"] = {"tp": 2}
    for stops in ([], [["--stop-at-step", "3"]]):
        shutil.rmtree(run.run_dir)
        for arguments in (*stops, []):
            code, output = run.train_on_gpu(2, *arguments)
            assert code == 0, output
        shared.append(curves(run))
    assert shared[0] == shared[1]
    assert_like_one_gpu(shared[0], alone)
    assert shared[0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=5e-2)
