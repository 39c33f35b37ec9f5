"""Attention that cannot work is refused, with the key of every mistake."""

from typing import Literal

import pytest

from tests.resolve.refusals import assert_refused, problems
from tests.resolved import check
from tests.small_recipe import Load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["attention.default=mobba"],
            "attention.default: 'mobba' is not a registered attention (did you mean 'moba'?)",
        ),
        (["attention.full_layers=last:9"], "attention.full_layers: 'last:9' asks for 9 layers; the model has 4"),
        (["attention.overrides.7.topk=1"], "attention.overrides: layer ids [7] do not exist"),
        (
            ["attention.overrides.1.block_sise=1"],
            "attention.overrides.1.block_sise: unknown option (did you mean 'block_size'?)",
        ),
        (["attention.overrides.1.topk=0"], "attention.overrides.1.topk: given 0; allowed: integer >= 1"),
        (["attention.overrides.1.kind=[a]"], "attention.overrides.1.kind: ['a'] is not a registered attention"),
        (["stages.1.attention.default=x"], "stages[1].attention.default: 'x' is not a registered attention"),
        (
            ["attention.moba.block_size=16384"],
            "stages[1].attention.moba.block_size: given 16384 in layers 0-2, which does not fit in a sequence of 8192",
        ),
        (
            ["attention.moba.always=[previous, first]"],
            "stages[1].attention.moba.topk: given 2 in layer 1, but 3 blocks are always selected (current",
        ),
        (
            ["attention.overrides={3: {topk: 2}}"],
            "attention.overrides.3.topk: given 2, but layer 3 is 'full' in all stages, which has no such option",
        ),
        (
            ["stages.0.attention.overrides={0: {topk: 2}}"],
            "stages[0].attention.overrides.0.topk: given 2, but layer 0 is 'full' in this stage, which has no",
        ),
        (
            ["attention.moba={backend: triton, block_size: 40}"],
            "stages[1].attention.moba.backend: given 'triton' in layers 0-2, which cannot run: head dim 32, 64 or 128",
        ),
        (
            ["attention.moba={backend: triton, block_size: 40}", "model.head_dim=64"],
            "stages[1].attention.moba.backend: given 'triton' in layers 0-2, which cannot run: block_size 40, a",
        ),
        (
            ["attention.moba={backend: triton, topk: 129, block_size: 64}", "model.head_dim=64"],
            "stages[1].attention.moba.backend: given 'triton' in layers 0, 2, which cannot run: 128 history blocks",
        ),
    ],
)
def test_an_attention_that_cannot_work_is_refused_with_its_key(load: Load, overrides: list[str], problem: str) -> None:
    assert_refused(load(*overrides), problem)


@pytest.mark.parametrize(
    ("override", "backend", "device"),
    [("attention.full.backend=cudnn", "cudnn", "cpu"), ("attention.full.backend=sdpa", "sdpa", "cuda")],
)
def test_a_backend_is_refused_where_the_run_has_no_such_device(
    load: Load, override: str, backend: str, device: str
) -> None:
    others: dict[str, Literal["cpu", "cuda"]] = {"cpu": "cuda", "cuda": "cpu"}
    needed = others[device]
    config = load(override)
    found = problems(config, device=device)
    assert found[0].startswith(
        f"stages[0].attention.full.backend: given {backend!r} in layers 0-3, which runs on {needed}"
    )
    check(config, device=needed)
    check(config)


def test_triton_kernels_are_refused_before_the_first_stage_on_a_cpu(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = load("attention.moba={backend: triton, block_size: 512}", "model.head_dim=64")
    assert "the run trains on cpu, CUDA needed" in problems(config, device="cpu")[0]
    check(config, device="cuda")


def test_every_mistake_in_an_attention_is_reported_with_its_key(load: Load) -> None:
    config = load(
        "attention={default: mob, full_layers: x, overrides: {0: {kind: y, tokp: 1}, 1: {kind: moba, topk: z}, 9: {}}}"
    )
    found = [text.split(":")[0] for text in problems(config) if text.startswith("attention.")]
    keys = ["default", "full_layers", "overrides", "overrides.0.kind", "overrides.0.tokp", "overrides.1.topk"]
    assert found == [f"attention.{key}" for key in keys]


def test_a_stage_that_corrects_the_recipes_attention_has_no_problem(load: Load) -> None:
    config = load("stages.1.attention={moba: {block_size: 8192}}", "stages.0.attention={moba: {block_size: 1024}}")
    assert problems(load("attention.moba.block_size=16384", "stages.0.attention={default: moba}"))
    check(config)
