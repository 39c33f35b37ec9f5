"""Recipes whose mechanisms cannot work on their layout, model or device are refused with the key to change."""

import pytest

from moba_train.errors import ConfigError
from tests.resolve.refusals import assert_refused, problems
from tests.resolve.test_recipe_warnings import VALIDATION, recipe_warnings
from tests.resolved import check
from tests.small_recipe import Load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["stages.1.parallel={cp: 2, cp_transport: dispatch}", "stages.1.attention.full_layers=[2,3]"],
            "stages[1].parallel.cp_transport: given 'dispatch' in stage 'long', which sends queries to the owners of "
            "the blocks that they select; kind 'full' (layers 2-3) cannot be divided so",
        ),
        (
            ["parallel={cp: 2, cp_slices: 2}", "stages.1.parallel.cp_transport=dispatch"],
            "parallel.cp_slices: given 2 in stage 'long', which cp_transport 'dispatch' does not use",
        ),
    ],
)
def test_a_layout_that_dispatch_cannot_use_is_refused_with_its_key(
    load: Load, overrides: list[str], problem: str
) -> None:
    assert_refused(load(*overrides), problem)


def test_the_reach_of_gradients_is_not_measured_in_a_pipeline(load: Load) -> None:
    with pytest.raises(ConfigError, match="gradient_reach"):
        check(load("parallel.pp=2", "evaluation.gradient_reach={}", "data.validation=[{path: v}]"))


def test_an_implementation_of_adamw_is_refused_for_muon(load: Load) -> None:
    problem = "optim.implementation: given 'deepspeed_cpu', which is for optim.kind: adamw alone, with kind: muon"
    assert_refused(load("optim.kind=muon", "optim.implementation=deepspeed_cpu"), problem)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("precision.compute=fp32", "which computes in 16 bits on CUDA; set precision.compute: bf16"),
        ("model.head_dim=12", "which needs heads of a width of 8, 16, ... or 256 on CUDA; the model's have 12"),
    ],
)
def test_dispatch_is_refused_where_no_kernel_could_attend_on_cuda(load: Load, override: str, text: str) -> None:
    config = load("stages.1.parallel={cp: 2, cp_transport: dispatch}", "stages.1.attention.full_layers=none", override)
    (found,) = problems(config, device="cuda")
    assert found.startswith(f"stages[1].parallel.cp_transport: given 'dispatch' in stage 'long', {text}")
    check(config, device="cpu")


@pytest.mark.parametrize(
    ("options", "layers", "refused"),
    [
        ("", "{}", True),
        ("mode: warmup, ", "{}", False),
        ("train_gate: true, ", "{}", False),
        ("", "{0: {train_gate: true}}", False),
    ],
)
def test_gates_that_do_not_learn_cannot_be_all_that_is_trained(
    load: Load, options: str, layers: str, refused: bool
) -> None:
    config = load(
        f"stages.1.attention={{default: seer, overrides: {layers}, seer: {{{options}block_size: 16, topk: 2}}}}",
        "stages.1.trainable=['blocks.*.attention.seer.*']",
    )
    if not refused:
        check(config)
        return
    with pytest.raises(ConfigError, match=r"stages\[1\]\.trainable: .*those of seer do not learn .*train_gate: true"):
        check(config)


def test_a_checkpoint_of_a_pipeline_is_evaluated_without_one(load: Load) -> None:
    """Problems of training alone do not keep a checkpoint from being evaluated."""
    config = load("parallel.pp=2", "evaluation.gradient_reach={}", "data.validation=[{path: v}]")
    check(config, allow_idle=True, training=False)


def test_nothing_is_said_of_the_loss_masks_of_corpora_that_need_not_exist_yet(load: Load) -> None:
    """`plan --no-data`; `gradient_reach` tells of loss masks that exist."""
    assert recipe_warnings(load(VALIDATION, "evaluation.position_wise.bucket=1K", "evaluation.gradient_reach={}")) == []
