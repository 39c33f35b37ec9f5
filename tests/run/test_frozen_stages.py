"""Stages that train a part of the parameters: the rest stays as it is, bit by bit, and runs can be resumed across."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors
from tests.run.trainer_ranks import Ranks, train_traced

STEPS = 2


def stages(*trainable: Any) -> list[dict[str, Any]]:
    """A stage of `STEPS` steps for each."""
    stage = {"seq_len": 64, "tokens": STEPS * 512, "micro_batch_size": 2}
    return [stage | {"name": f"stage-{i}", "trainable": patterns} for i, patterns in enumerate(trainable)]


def prepared(run: Run, *trainable: Any, **keys: Any) -> Run:
    run.recipe["stages"] = stages(*trainable)
    run.recipe["checkpoint"] = {"every": STEPS, "keep_last": 10}
    run.recipe["evaluation"] = {"every": STEPS, "sequences": 2}
    run.recipe["optim"]["weight_decay"] = 0.5
    run.recipe |= keys
    return run


def changed(run: Run, step: int) -> set[str]:
    """Names of the parameters whose weights or optimizer states differ from those `STEPS` steps before."""
    folder = run.run_dir / "checkpoints"
    before, after = (checkpoint_tensors(folder / f"step_{at:08d}") for at in (step - STEPS, step))
    names = {name for name in after if not name.startswith("rng.") and not torch.equal(before[name], after[name])}
    parameters = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    for name in names:
        if name.startswith("optim."):
            assert name.removeprefix("optim.").rpartition(".")[0] in parameters, name
    return parameters


def all_names(run: Run) -> set[str]:
    tensors = checkpoint_tensors(run.newest_checkpoint)
    return {name.removeprefix("model.") for name in tensors if name.startswith("model.")}


PATTERNS = ["blocks.1.attention.*", "norm.weight"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """All, a part (the first block wholly frozen), all again, on two ranks in bf16. Not to be changed."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), corpora)
    ranks.train(prepared(run, "all", PATTERNS, "all", precision={"compute": "bf16"}), 2)
    return run


def test_what_is_frozen_stays_bitwise_with_its_optimizer_state(undisturbed: Run) -> None:
    part = {name for name in all_names(undisturbed) if name.startswith("blocks.1.attention.")} | {"norm.weight"}
    assert len(part) == 5
    assert changed(undisturbed, 2 * STEPS) == part
    assert changed(undisturbed, 3 * STEPS) == all_names(undisturbed), "and what was frozen moves again"


@pytest.mark.parametrize(
    ("taken_over", "stops"), [(0, [STEPS + 1, 2 * STEPS]), (STEPS, [2 * STEPS + 1])], ids=["inside", "across"]
)
def test_resuming_inside_and_across_a_switch_is_bitwise_equal(
    run: Run, undisturbed: Run, ranks: Ranks, taken_over: int, stops: list[int]
) -> None:
    """Inside a stage, at each switch, and with a switch after each of these."""
    prepared(run, "all", PATTERNS, "all", precision={"compute": "bf16"})
    if taken_over:
        run.take_over(undisturbed, taken_over)
    for stop in stops:
        ranks.train(run, 2, "--stop-at-step", str(stop))
    ranks.train(run, 2)
    assert [event["step"] for event in run.records("resume")] == [taken_over, *stops][not taken_over :]
    assert run.losses() == undisturbed.losses()
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)


def test_a_run_may_begin_frozen(run: Run, ranks: Ranks, tmp_path: Path, corpora: Path) -> None:
    """Where FSDP2 is initialized with frozen modules, gradients are later reduced as if it had not been: a run that
    resumes at the switch, and so initializes it with all parameters trainable, gets the same bits. Also where the last
    pass before the switch was an evaluation, which leaves parameters gathered."""
    prepared(run, PATTERNS, "all", precision={"compute": "bf16"})
    run.recipe["checkpoint"]["every"] = 10 * STEPS
    ranks.train(run, 2)
    (tmp_path / "other").mkdir()
    other = prepared(Run(tmp_path / "other", corpora), PATTERNS, "all", precision={"compute": "bf16"})
    ranks.train(other, 2, "--stop-at-step", str(STEPS))
    ranks.train(other, 2)
    assert other.losses() == run.losses()
    assert_same_tensors(other.newest_checkpoint, run.newest_checkpoint)
    assert changed(other, 2 * STEPS) == all_names(other)


def test_frozen_parameters_with_tensor_parallelism_and_recomputed_activations(
    run: Run, ranks: Ranks, tmp_path: Path, corpora: Path
) -> None:
    (tmp_path / "other").mkdir()
    alone = prepared(Run(tmp_path / "other", corpora), PATTERNS, "all", activation_checkpointing="full")
    ranks.train(alone, 1)
    prepared(run, PATTERNS, "all", activation_checkpointing="full", parallel={"tp": 2})
    ranks.train(run, 2)
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-4)
    norms = ([record["grad_norm"] for record in one.records()] for one in (run, alone))
    assert next(norms) == pytest.approx(next(norms), rel=1e-3)


def test_a_spike_among_frozen_parameters_is_dumped_and_rolled_back(run: Run) -> None:
    """A learning rate that breaks the embedding, the only part that is trained."""
    prepared(run, "all", ["embedding.weight"])
    run.recipe["stages"][1] |= {"tokens": 30 * 512, "lr": 1e3, "schedule": {"kind": "constant", "warmup_tokens": 13000}}
    run.recipe["health"] = {"spike": {"window": 8, "reaction": "rollback", "max_skips": 1, "max_rollbacks": 1}}
    run.recipe["checkpoint"] = {"every": 1, "keep_last": 100}
    assert run.train_here() == 2, "going back does not help: the rate is as high as it was"
    assert run.records("rollback")
    (first, *_) = sorted((run.run_dir / "spikes").glob("step_*.json"))
    norms = json.loads(first.read_text())["gradient_norms"]
    assert norms["embedding"] > 0
    assert [layer["norm"] for layer in norms["layers"]] == [0, 0]
    saved = checkpoint_tensors(run.newest_checkpoint)
    begun = checkpoint_tensors(run.run_dir / "checkpoints" / f"step_{STEPS:08d}")
    moved = {name for name in saved if name.startswith("model.") and not torch.equal(saved[name], begun[name])}
    assert moved <= {"model.embedding.weight"}


def test_compiled_blocks_follow_the_switch(run: Run, ranks: Ranks) -> None:
    prepared(run, "all", PATTERNS, compile=True)
    run.recipe["attention"]["full_layers"] = "none"  # one kind, which is compiled once for both layers
    run.use_short_documents()
    ranks.work(train_traced, [str(run.write_recipe())], 1)
    compiled = run.losses()
    part = {name for name in all_names(run) if name.startswith("blocks.1.attention.")} | {"norm.weight"}
    assert changed(run, 2 * STEPS) == part
    shutil.rmtree(run.run_dir)
    run.recipe["compile"] = False
    ranks.train(run, 1)
    assert compiled == pytest.approx(run.losses(), rel=1e-4)
