"""Layers that keep a state: training on one device and on ranks that share a sequence or, but `lightning`, heads."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moba_train.attention.registry import KINDS
from moba_train.config.load import load_config
from moba_train.config.model import ModelConfig
from moba_train.errors import ConfigError
from moba_train.mechanisms.linear import kda
from moba_train.model.build import build_model
from moba_train.tools.convert.hf_export import layer_problem
from tests.conformance.layouts import SIZES, Case
from tests.conformance.running import worker
from tests.resolved import check, plan_of, spec_of
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

HIDDEN, HEADS, KV_HEADS, WIDTH = 32, 4, 2, 8
LIGHTNING = HIDDEN * HEADS * WIDTH + HEADS * WIDTH
KDA = (
    4 * (HEADS + 2 * KV_HEADS) * WIDTH
    + 2 * (HIDDEN * WIDTH + WIDTH * HEADS * WIDTH)
    + HIDDEN * HEADS
    + HEADS
    + HEADS * WIDTH
    + WIDTH
)


def with_kinds(run: Run, first: str, second: str, **parallel: Any) -> Run:
    """A step with full attention, then three with these kinds in the two layers."""
    overrides = {0: {"kind": first}, 1: {"kind": second}}
    run.recipe["stages"][1]["attention"] = {"full_layers": "none", "overrides": overrides}
    for stage, steps in zip(run.recipe["stages"], (1, 3), strict=True):
        stage["tokens"] = steps * 512
    run.recipe["parallel"] = parallel
    run.recipe["checkpoint"] = {"every": 1, "keep_last": 10}
    del run.recipe["evaluation"], run.recipe["data"]["validation"]
    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """On one rank. Not to be changed."""
    run = with_kinds(Run(tmp_path_factory.mktemp("linear"), corpora), "kda", "lightning")
    assert run.train_here() == 0
    return run


def test_states_pass_between_ranks(run: Run, alone: Run, ranks: Ranks) -> None:
    """In the zigzag layout, whose ranks hold two ranges of tokens each."""
    ranks.train(with_kinds(run, "kda", "lightning", cp=2, cp_transport="ring", cp_layout="zigzag"), 2)
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-3)
    assert run.losses()[-1] < run.losses()[0]


def test_they_train_and_resume_bitwise(run: Run, alone: Run) -> None:
    with_kinds(run, "kda", "lightning").take_over(alone, 2)
    assert run.train_here() == 0
    assert_same_tensors(run.newest_checkpoint, alone.newest_checkpoint)
    before = checkpoint_tensors(alone.run_dir / "checkpoints" / "step_00000001")
    after = checkpoint_tensors(alone.newest_checkpoint)
    names = [name for name in before if name.startswith("model.") and (".kda." in name or ".lightning." in name)]
    assert len(names) == 11 + 2
    assert not any(torch.equal(before[name], after[name]) for name in names)


def test_plans_count_their_parameters_exactly(run: Run) -> None:
    config = load_config(with_kinds(run, "kda", "lightning").write_recipe())
    plan = plan_of(config, 1)
    with torch.device("meta"):
        model = build_model(spec_of(config))
    assert plan.parameters.attention_kinds == LIGHTNING + KDA
    assert plan.parameters.total == sum(parameter.numel() for parameter in model.parameters())


def test_tensor_parallelism_is_refused_by_its_key(run: Run) -> None:
    config = load_config(with_kinds(run, "full", "lightning", tp=2).write_recipe())
    with pytest.raises(ConfigError, match=r"parallel\.tp: given 2, but kind 'lightning'"):
        check(config)
    with_bare_layer(run, tp=2).recipe["attention"]["gdn"]["heads"] = {"keys": 3, "values": 6, "width": 4}
    said = r"attention\.gdn\.heads\.keys: given 3 in layers? 0, which parallel\.tp 2 does not divide; allowed: 1, 3"
    with pytest.raises(ConfigError, match=said):
        check(load_config(run.write_recipe()))


def test_ranks_divide_the_heads_and_one_goes_on(tmp_path: Path, corpora: Path, ranks: Ranks) -> None:
    """Three of four steps on two ranks, whose checkpoint one rank reads."""
    runs = [Run(tmp_path / name, corpora) for name in ("alone", "shared")]
    for run in runs:
        run.folder.mkdir()
        with_kinds(run, "kda", "gdn")
    alone, shared = runs
    ranks.train(alone, 1)
    shared.recipe["parallel"] = {"tp": 2}
    ranks.train(shared, 2, "--stop-at-step", "3")
    shared.recipe["parallel"] = {}
    ranks.train(shared, 1)
    assert shared.losses() == pytest.approx(alone.losses(), rel=1e-4)
    norms = [[record["grad_norm"] for record in run.records()] for run in runs]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def part_by_part(lines: list[str], output: str) -> None:
    with patch.object(kda, "most_rows", lambda channels: 9):
        worker(lines, None, output)


def test_ranks_compute_their_heads_part_by_part_as_one_device_does_at_once(ranks: Ranks, tmp_path: Path) -> None:
    """Parts that are recomputed in the backward pass have the rank's parameters."""
    case = Case(5, dict.fromkeys(SIZES, 1) | {"tp": 2}, [("kda", {}), ("gdn", {})], documents="few")
    ranks.work(part_by_part, ([case.line()], str(tmp_path / "problems.json")), 2)
    assert json.loads((tmp_path / "problems.json").read_text()) == [[]]


def with_bare_layer(run: Run, **parallel: Any) -> Run:
    """The first layer has the projections of Gated DeltaNet alone, whose heads are not the model's."""
    run.recipe["model"] |= {"bare_layers": [0], "qk_norm": True, "gate_layers": "all"}
    run.recipe["attention"] |= {"full_layers": "none", "gdn": {"heads": {"keys": 2, "values": 6, "width": 4}}}
    run.recipe["batch_tokens"] = 128
    run.recipe["optim"]["schedule"]["warmup_tokens"] = 128
    del run.recipe["stages"][1:]
    run.recipe["stages"][0] |= {
        "attention": {"overrides": {0: {"kind": "gdn"}}},
        "tokens": 256,
        "micro_batch_size": 2,
    }
    run.recipe["parallel"] = parallel
    return run


def test_a_layer_with_the_projections_of_its_kind_alone_trains_on_ranks_as_on_one(
    tmp_path: Path, corpora: Path, ranks: Ranks
) -> None:
    alone = with_bare_layer(Run(tmp_path, corpora))
    assert alone.train_here() == 0
    names = {
        name for name in checkpoint_tensors(alone.newest_checkpoint) if name.startswith("model.blocks.0.attention.")
    }
    assert names
    assert all(name.startswith("model.blocks.0.attention.gdn.") for name in names)
    config = load_config(alone.write_recipe())
    with torch.device("meta"):
        model = build_model(spec_of(config))
    assert plan_of(config, 1).parameters.total == sum(weight.numel() for weight in model.parameters())
    for size in ("cp", "tp"):
        (tmp_path / size).mkdir()
        run = with_bare_layer(Run(tmp_path / size, corpora), **{size: 2})
        ranks.train(run, 2)
        assert run.losses() == pytest.approx(alone.losses(), rel=1e-3), size


@pytest.mark.parametrize(
    ("bare", "kind", "said"),
    [
        ([1], "gdn", r"does not name layer 0, where kind 'gdn' of stage '\w+' has projections of its own"),
        ([0, 1], "gdn", r"names layer 1, where kind '\w+' of stage '\w+' needs its projections; .* gdn with heads"),
        ([5], "gdn", r"layer ids \[5\] do not exist"),
    ],
)
def test_layers_and_kinds_must_agree_on_projections(bare: list[int], kind: str, said: str, run: Run) -> None:
    with_bare_layer(run).recipe["model"]["bare_layers"] = bare
    with pytest.raises(ConfigError, match=rf"model\.bare_layers: {said}"):
        check(load_config(run.write_recipe()))


@pytest.mark.parametrize("kind", ["lightning", "kda"])
def test_exports_are_refused_for_what_they_would_lose(kind: str) -> None:
    model = ModelConfig(
        vocab_size=50, hidden_size=HIDDEN, intermediate_size=48, layers=2, heads=HEADS, kv_heads=KV_HEADS
    )
    count = {"lightning": LIGHTNING, "kda": KDA}[kind]
    layer = KINDS[kind](KINDS[kind].Options(), WIDTH)
    assert layer_problem(layer, model).startswith(f"kind '{kind}' has {count} parameters in a layer")
