"""Training with pipeline parallelism: the same curves as on one rank, and checkpoints for any other layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.tiny_run import Run, assert_like_one_gpu, assert_same_tensors, assert_same_training
from tests.run.trainer_ranks import Ranks

STEPS = 4


def short(run: Run, parallel: dict[str, Any], steps: int = STEPS) -> Run:
    """The tiny run (full attention, then MoBA; packed documents) of four layers, tied, also evaluated by position."""
    run.recipe["parallel"] = parallel
    run.recipe["model"] |= {"layers": 4, "tie_embeddings": True}
    run.recipe["checkpoint"]["every"] = 3
    for stage in run.recipe["stages"]:  # eight micro-batches of 64 tokens in a step, then four of 128
        stage |= {"tokens": steps // 2 * 512, "micro_batch_size": 1}
    run.recipe["evaluation"] |= {"every": 1000, "position_wise": {"bucket": 32, "sequences": 4, "attention": "own"}}
    return run


def curves(run: Run) -> dict[str, Any]:
    """What a user sees of a run, but for times."""
    keys = ("step", "tokens", "loss_tokens", "ranks_with_zero_loss_tokens", "loss", "grad_norm")
    found = {key: [record[key] for record in run.records()] for key in keys}
    found["grad_norm_moba"] = [record["grad_norm_moba"] for record in run.records()[len(found["step"]) // 2 :]]
    found["eval_loss"] = [record["eval_loss"] for record in run.records("validation_loss")]
    found["trailing_loss"] = [record["trailing_loss"] for record in run.records("position_wise")]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> dict[str, Any]:
    run = short(Run(tmp_path_factory.mktemp("alone"), corpora), {})
    ranks.train(run, 1)
    return curves(run)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """A pipeline of two ranks. Not to be changed."""
    run = short(Run(tmp_path_factory.mktemp("pipeline"), corpora), {"pp": 2, "pp_layers": [1, 3]})
    ranks.train(run, 2)
    return run


def test_a_pipeline_trains_as_one_rank(pipeline: Run, alone: dict[str, Any]) -> None:
    assert_same_training(curves(pipeline), alone)
    record = pipeline.records()[-1]
    assert record["tokens_per_s"] == 2 * record["tokens_per_s_per_device"]


def test_resuming_is_bitwise_equal_to_never_stopping(run: Run, pipeline: Run, ranks: Ranks) -> None:
    run.take_over(pipeline, 3)
    ranks.train(short(run, {"pp": 2, "pp_layers": [1, 3]}), 2)
    assert [event["step"] for event in run.records("resume")] == [3]
    assert curves(run) == curves(pipeline)
    assert_same_tensors(run.newest_checkpoint, pipeline.newest_checkpoint)


def test_any_layout_goes_on_from_any_other(run: Run, alone: dict[str, Any], ranks: Ranks) -> None:
    """A step on each of: a pipeline of two, one rank, an interleaved pipeline that shares layers, one of four; with no
    memory for activations, so that all layers are recomputed."""
    run.recipe["memory"] = {"gpu_gib": 1e-9}
    layouts: list[tuple[dict[str, Any], int]] = [
        ({"pp": 2}, 2),
        ({}, 1),
        ({"pp": 2, "pp_schedule": "interleaved_1f1b", "tp": 2}, 4),
        ({"pp": 4}, 4),
    ]
    for step, (parallel, count) in enumerate(layouts, start=1):
        ranks.train(short(run, parallel), count, "--stop-at-step", str(step))
    assert [event["step"] for event in run.records("resume")] == [1, 2, 3]
    assert {tuple(event["kept"]) for event in run.records("activations")} == {("input",) * 4}
    assert_same_training(curves(run), alone)


@pytest.mark.slow
def test_sixteen_ranks_of_two_nodes_with_all_parallelism_train_as_one_rank(run: Run, ranks: Ranks) -> None:
    """A pipeline between nodes; in each of them batches, sequences and layers are shared. A step of each stage."""
    short(run, {}, steps=2).recipe["model"]["layers"] = 2
    run.recipe |= {"evaluation": {}, "checkpoint": {"every": None}}  # slow in sixteen processes on two cores
    del run.recipe["data"]["validation"]
    ranks.train(run, 1)
    alone = curves(run)
    shutil.rmtree(run.run_dir)
    run.recipe["parallel"] = {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}
    sixteen = Ranks()  # processes of its own: other tests want two or four
    try:
        sixteen.train(run, 16, per_node=8)
    finally:
        sixteen.close()
    del alone["ranks_with_zero_loss_tokens"]
    assert len(alone["grad_norm_moba"]) == 1
    assert_same_training(curves(run), alone)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_a_pipeline_of_two_gpus_repeats_bit_by_bit(run: Run, schedule: str) -> None:
    """NCCL, bf16; head width 64, so that the kernels of real training run."""
    short(run, {}).recipe["model"] |= {"hidden_size": 256}
    run.recipe["compile"] = schedule != "zero_bubble"
    assert run.train_on_gpu(1)[0] == 0
    alone = curves(run)
    found = []
    run.recipe["parallel"] = {"pp": 2, "pp_schedule": schedule}
    for stops in ([], [["--stop-at-step", "3"]]):
        shutil.rmtree(run.run_dir)
        for arguments in (*stops, []):
            code, output = run.train_on_gpu(2, *arguments)
            assert code == 0, output
        found.append(curves(run))
    assert found[0] == found[1]
    assert_like_one_gpu(found[0], alone)
    assert found[0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=5e-2)
