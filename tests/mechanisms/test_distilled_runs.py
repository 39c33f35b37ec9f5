"""Two stages of a distilled gate: it warms up under full attention while the base is frozen, then the layers attend to
the blocks that it selects. On the CPU, from the recipe to the log."""

from pathlib import Path

import pytest
import torch

from moba_train.config.load import load_config
from moba_train.model.build import build_model
from tests.resolved import plan_of, spec_of
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors

FIRST, STEPS, LAST = 6, 30, 3
"""Steps with full attention, of the warm-up and of sparse attention, in batches of 512 tokens."""


def distilled_run(run: Run, kind: str) -> Run:
    """Full attention, the warm-up, then sparse attention with everything trained."""
    options = {"block_size": 8, "topk": 3}
    run.recipe["model"]["init_std"] = 0.3  # attention that is worth learning, without training it for long
    run.recipe["attention"] = {"default": kind, "full_layers": "none", kind: options}
    first, last = run.recipe["stages"]
    first["tokens"], last["tokens"] = FIRST * 512, LAST * 512
    warm_up = {
        "name": "warmup",
        "seq_len": 128,
        "tokens": STEPS * 512,
        "lr": 0.03,
        "attention": {kind: {"mode": "warmup"}},
        "trainable": [f"*.attention.{kind}.*"],
    }
    last |= {"name": "sparse", "rope": None, "lr": 0.001, "attention": {kind: {"mode": "sparse"}}}
    run.recipe["stages"] = [first, warm_up, {key: value for key, value in last.items() if value is not None}]
    run.recipe["evaluation"] |= {"every": 10, "gate_probe": {"queries": 64, "sequences": 4}, "at_start": True}
    run.recipe["checkpoint"] = {"every": 12, "keep_last": 10}
    return run


@pytest.fixture(scope="module", params=["seer", "msa"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path, kind: str) -> Run:
    """Not to be changed."""
    run = distilled_run(Run(tmp_path_factory.mktemp(kind), corpora), kind)
    assert run.train_here() == 0
    return run


def test_the_auxiliary_loss_of_each_layer_falls_in_the_warm_up(finished: Run, kind: str) -> None:
    records = finished.records()
    assert "auxiliary_loss" not in records[FIRST - 1]
    warm_up = records[FIRST : FIRST + STEPS]
    for layer in range(2):
        values = [record[f"auxiliary_loss_layer_{layer}"] for record in warm_up]
        assert sum(values[-3:]) < 0.9 * sum(values[:3])
    assert ("auxiliary_loss" in records[-1]) == (kind == "msa")  # seer's gate is left alone then


def test_the_overlap_with_the_blocks_of_largest_mass_rises_in_the_log(finished: Run) -> None:
    probes = [record for record in finished.records("gate_probe") if record["stage"] == "warmup"]
    assert probes[0]["step"] == FIRST  # at the stage's start
    assert [layer["layer"] for layer in probes[0]["gate_probe"]["layers"]] == [0, 1]
    assert probes[-1]["block_recall"] > probes[0]["block_recall"] + 0.02
    assert probes[-1]["mass_recall"] > probes[0]["mass_recall"]
    assert any(record["stage"] == "sparse" for record in finished.records("gate_probe"))


def test_the_warm_up_changes_nothing_but_the_gate(finished: Run, kind: str) -> None:
    before, after = (checkpoint_tensors(finished.run_dir / "checkpoints" / f"step_{step:08d}") for step in (12, 36))
    changed = {name for name, tensor in after.items() if name in before and not torch.equal(tensor, before[name])}
    weights = {name for name in changed if name.startswith("model.")}
    assert weights
    assert all(f".attention.{kind}." in name for name in weights)
    last = checkpoint_tensors(finished.newest_checkpoint)
    assert not torch.equal(last["model.embedding.weight"], after["model.embedding.weight"])
    still = all(torch.equal(last[name], after[name]) for name in weights)
    assert still == (kind == "seer")


def test_both_stages_resume_bitwise(finished: Run, kind: str, run: Run) -> None:
    """A kill inside the warm-up and a stop inside the sparse stage."""
    distilled_run(run, kind).take_over(finished, 24)
    assert run.train_here("--stop-at-step", str(FIRST + STEPS + 1)) == 0
    assert run.train_here() == 0
    assert run.losses() == finished.losses()
    assert_same_tensors(run.newest_checkpoint, finished.newest_checkpoint)


def test_the_plan_counts_the_gates_parameters_exactly(finished: Run) -> None:
    config = load_config(finished.run_dir / "config.yaml")
    plan = plan_of(config, 1)
    with torch.device("meta"):
        model = build_model(spec_of(config))
    own = [p.numel() for name, p in model.named_parameters() if ".attention.seer." in name or ".attention.msa." in name]
    assert plan.parameters.attention_kinds == sum(own) > 0
    assert plan.parameters.total == sum(parameter.numel() for parameter in model.parameters())
