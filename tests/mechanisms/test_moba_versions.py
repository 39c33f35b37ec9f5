"""One model with MoBA's versions side by side: trained on two ranks, resumed, evaluated; not exported."""

from pathlib import Path

import pytest

from moba_train.config.load import load_config
from moba_train.errors import ConfigError
from moba_train.tools.cli import app
from tests.commands import run_app
from tests.resolved import check, plan_of
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

LAYERS = {
    0: {"kind": "moba", "key_conv": 3},
    1: {"kind": "moba_v05", "block_size": 16},
    2: {"kind": "moba_v1", "block_size": 16, "merge": "gate"},
}


def with_versions(run: Run, cp: int) -> Run:
    """Full attention, then a stage with a version in each layer."""
    run.recipe["model"]["layers"] = 3
    run.recipe["stages"][0]["tokens"] = 512
    run.recipe["stages"][1]["tokens"] = 3 * 512
    run.recipe["stages"][1]["attention"] = {"full_layers": "none", "overrides": LAYERS}
    run.recipe["parallel"] = {"cp": cp}
    run.recipe["checkpoint"]["keep_last"] = 10
    run.recipe["checkpoint"]["every"] = 1
    run.recipe["evaluation"]["gate_probe"] = {"queries": 16}
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """On two ranks that share every sequence. Not to be changed."""
    run = with_versions(Run(tmp_path_factory.mktemp("versions"), corpora), cp=2)
    ranks.train(run, 2)
    return run


def test_two_ranks_train_as_one_and_what_begins_as_zeros_learns(finished: Run, run: Run) -> None:
    assert with_versions(run, cp=1).train_here() == 0
    assert finished.losses() == pytest.approx(run.losses(), rel=1e-3)
    before, after = (
        checkpoint_tensors(path)
        for path in (finished.run_dir / "checkpoints" / "step_00000001", finished.newest_checkpoint)
    )
    for name in ("0.attention.moba.weight", "1.attention.moba_v05.o_proj.weight"):
        assert not before[f"model.blocks.{name}"].any()
        assert after[f"model.blocks.{name}"].any()


def test_it_resumes_bitwise(finished: Run, run: Run, ranks: Ranks) -> None:
    with_versions(run, cp=2).take_over(finished, 2)
    ranks.train(run, 2)
    assert run.losses() == finished.losses()
    assert_same_tensors(run.newest_checkpoint, finished.newest_checkpoint)


def test_its_plan_evaluation_and_export(finished: Run, tmp_path: Path) -> None:
    plan = plan_of(load_config(finished.write_recipe()), 2)
    cross = 32 + 32 * (32 + 2 * 16) + 32 * 32
    assert plan.parameters.attention_kinds == 16 * 3 + cross
    tensors = checkpoint_tensors(finished.newest_checkpoint)
    assert plan.parameters.total == sum(x.numel() for name, x in tensors.items() if name.startswith("model."))
    result = run_app(app, "eval", finished.run_dir)
    result = run_app(app, "convert", "moba-to-hf", finished.run_dir, tmp_path / "out", code=2)
    assert "kind 'moba' has 48 parameters in a layer" in result.output
    assert f"kind 'moba_v05' has {cross} parameters in a layer" in result.output


def test_what_a_stage_cannot_do_is_named(run: Run) -> None:
    with_versions(run, cp=2)
    run.recipe["parallel"] |= {"cp": 4, "cp_transport": "ring"}
    ring = r"parallel\.cp_transport: in stage 'long': 'ring' attends .*; use allgather, ulysses"
    with pytest.raises(ConfigError, match=ring):
        check(load_config(run.write_recipe()), ranks=4, ranks_per_node=2)
    run.recipe["parallel"] = {"tp": 2}
    with pytest.raises(ConfigError, match=r"parallel\.tp: given 2, but kind 'moba_v05'"):
        check(load_config(run.write_recipe()))


@pytest.mark.parametrize("first", [0, 5])
def test_the_convolution_is_that_of_all_stages(run: Run, first: int) -> None:
    """The model has one, made for the first stage with the kind."""
    with_versions(run, cp=1)
    convolution = {"kind": "moba", "key_conv": first}
    run.recipe["stages"][0]["attention"] = {"full_layers": "none", "overrides": {0: convolution}}
    with pytest.raises(ConfigError, match=r"stages\[1\]\.attention\.moba: gives layer 0 parameters weight \[16, 3\]"):
        check(load_config(run.write_recipe()))
