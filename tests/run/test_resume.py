"""A run that was stopped, killed or moved to other ranks goes on as if nothing had happened."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moba_train.checkpoint.manifest import read_meta, verify_checkpoint
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.train import main
from tests.forked import forked
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks, run_training, train_traced


def test_stopping_and_resuming_is_bitwise_equal_to_never_stopping(run: Run, ranks: Ranks, finished_run: Run) -> None:
    """Stops in the middle of either stage: weights, optimizer, random state, losses and counters are the same bits."""
    for arguments in (["--stop-at-step", "3"], ["--stop-at-step", "8"], []):
        ranks.train(run, 2, *arguments)
    assert run.losses() == finished_run.losses()
    assert_same_tensors(run.newest_checkpoint, finished_run.newest_checkpoint)
    step, other = (read_meta(one.newest_checkpoint)["progress"] for one in (run, finished_run))
    assert (step["step"], step["starts"], step["stage"]) == (other["step"], other["starts"], other["stage"])
    for record_type, steps in (("stage", (0, 6)), ("resume", (3, 8))):
        places = [(record["step"], record["tokens"]) for record in run.records(record_type)]
        assert places == [(step, 512 * step) for step in steps], "tokens consumed so far, also where it resumes"


def test_a_history_that_was_damaged_meanwhile_is_named_when_the_run_resumes(run: Run) -> None:
    assert run.train_here("--stop-at-step", "3") == 0
    assert run.train_here("--stop-at-step", "4") == 0
    assert run.records("warning") == []
    path = run.run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 2', '"step": 9', 1))
    assert run.train_here("--stop-at-step", "5") == 0
    (warning,) = run.records("warning")
    assert "damaged lines, which are left out: " in warning["message"]
    assert "1 of 4 logged steps are missing; the last one there is 4" in warning["message"]
    assert [record["step"] for record in run.records("metrics")] == [1, 3, 4, 5]


@pytest.mark.gpu
def test_resuming_on_a_gpu_is_bitwise_equal_to_never_stopping(run: Run, tmp_path: Path, corpora: Path) -> None:
    """Full and MoBA layers in bf16: every kernel of the training step gives the same bits again."""
    (tmp_path / "other").mkdir()
    undisturbed = Run(tmp_path / "other", corpora)
    assert undisturbed.train_on_gpu(1)[0] == 0
    for arguments in (["--stop-at-step", "3"], ["--stop-at-step", "8"], []):
        code, output = run.train_on_gpu(1, *arguments)
        assert code == 0, output
    assert run.losses() == undisturbed.losses()
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)


def test_another_world_size_sees_the_same_tokens(run: Run, ranks: Ranks, finished_run: Run) -> None:
    """Half on one rank, half on two: the same loss at every step up to the rounding of sums in another order."""
    ranks.train(run, 1, "--stop-at-step", "5")
    ranks.train(run, 2)
    assert run.losses() == pytest.approx(finished_run.losses(), rel=1e-5)
    assert run.records("validation_loss")[-1]["eval_loss"] == pytest.approx(
        finished_run.records("validation_loss")[-1]["eval_loss"], rel=1e-5
    )


def test_hsdp_and_micro_batches_do_not_change_the_loss(run: Run, ranks: Ranks, finished_run: Run) -> None:
    run.recipe["parallel"] = {"dp_replicate": 2, "dp_shard": 1}
    run.recipe["stages"][0]["micro_batch_size"] = 1
    run.recipe["stages"][1]["micro_batch_size"] = 2
    ranks.train(run, 2, "--stop-at-step", "8")
    assert run.losses() == pytest.approx(finished_run.losses()[:8], rel=1e-5)


def test_recomputed_activations_do_not_change_the_loss(run: Run, ranks: Ranks, finished_run: Run) -> None:
    run.recipe["activation_checkpointing"] = "full"
    ranks.train(run, 1, "--stop-at-step", "8")
    assert run.losses() == pytest.approx(finished_run.losses()[:8], rel=1e-5)


def train_in_four_graphs(recipe: str) -> int:
    """Two kinds of layers, with gradients and without: documents of other lengths compile nothing again."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    code = train_traced(recipe)
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]
    return code


def assert_equal_uncompiled(run: Run, ranks: Ranks, train: Callable[..., int]) -> None:
    """The second stage, by `train` with compiled blocks and without."""
    run.recipe["stages"] = [run.recipe["stages"][1] | {"tokens": 1024}]
    run.recipe["compile"] = True
    ranks.work(train, [str(run.write_recipe())], 1)
    compiled = run.losses()
    shutil.rmtree(run.run_dir)
    run.recipe["compile"] = False
    ranks.train(run, 1)
    assert compiled == pytest.approx(run.losses(), rel=1e-4)


def test_blocks_are_compiled_once_a_kind(run: Run, ranks: Ranks) -> None:
    """More blocks than torch compiles the same code for, of both kinds in one stage, with gradients and without."""
    run.recipe["model"]["layers"] = 10
    run.use_short_documents()
    run.recipe["data"]["validation"] = run.recipe["data"]["train"]
    run.recipe["evaluation"]["sequences"] = 4  # two micro-batches
    assert_equal_uncompiled(run, ranks, train_in_four_graphs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_blocks_do_not_change_the_loss(run: Run, ranks: Ranks) -> None:
    """By the code of the C++ compiler, which takes seconds for each pass of a kind where nothing is cached: one
    block, without the validation's pass. Attention is an operator, the same code in all kinds."""
    run.recipe["model"]["layers"] = 1
    run.recipe["attention"]["full_layers"] = "none"
    run.use_short_documents()
    assert_equal_uncompiled(run, ranks, run_training)


def test_training_learns_and_evaluates(finished_run: Run) -> None:
    losses = finished_run.losses()
    assert losses[-1] < losses[0] - 0.5
    evaluations = [record["eval_loss"] for record in finished_run.records("validation_loss")]
    assert len(evaluations) == 2
    assert evaluations[1] < evaluations[0]


def test_sigterm_saves_and_exits_cleanly(run: Run) -> None:
    run.recipe["stages"][1]["tokens"] = "10M"
    process = run.start(1)
    wait_for_step(run, 5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    saved = latest_checkpoint(run.run_dir / "checkpoints")
    assert saved is not None
    assert read_meta(saved)["progress"]["step"] == run.records()[-1]["step"]


def test_a_finished_run_stays_as_it_is(ranks: Ranks, finished_run: Run) -> None:
    before = latest_checkpoint(finished_run.run_dir / "checkpoints")
    ranks.train(finished_run, 2)
    assert latest_checkpoint(finished_run.run_dir / "checkpoints") == before


def train_alone(recipe: str) -> None:
    """On the CPU, until it is killed."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    main([recipe])


def trained(run: Run) -> int:
    """Steps in the log, with those that a resumed run repeats."""
    return len(run.records()) if (run.run_dir / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_ten_kills_lose_nothing_that_was_published(run: Run, finished_run: Run) -> None:
    """SIGKILL at random moments, saves included, one to three steps after each start: every checkpoint that was ever
    published stays valid, progress never goes backwards, and the run at last ends where an undisturbed one ends."""
    run.recipe["checkpoint"]["every"] = 1
    recipe, rng, steps = str(run.write_recipe()), random.Random(0), [0]
    for _ in range(10):
        process = forked().Process(target=train_alone, args=(recipe,))
        wanted = trained(run) + rng.randint(1, 3)
        process.start()
        while process.is_alive() and trained(run) < wanted:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.join()
        newest = latest_checkpoint(run.run_dir / "checkpoints")
        if newest is not None:
            verify_checkpoint(newest)
            steps.append(read_meta(newest)["progress"]["step"])
    assert steps == sorted(steps)
    assert len(set(steps)) > 3, "no kill fell between two checkpoints: the test has lost its point"
    assert run.train_here() == 0
    assert run.losses() == pytest.approx(finished_run.losses(), rel=1e-5)
    assert not list((run.run_dir / "checkpoints").glob(".tmp-*"))


def wait_for_step(run: Run, step: int, timeout: float = 60) -> None:
    """Returns once the run has logged `step`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if Path(run.run_dir / "metrics.jsonl").exists() and any(r["step"] >= step for r in run.records()):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached in {timeout} s")
