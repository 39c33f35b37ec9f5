"""Gradient reach while a model trains: equal on every layout, and no bit of training changes."""

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.load import load_config
from moba_train.config.mesh import mesh_sizes
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loss_mask import mask_prefix
from moba_train.evals.evaluation import EvaluationContext, with_full
from moba_train.mechanisms.probes.gradient_reach import GradientReach
from moba_train.memory.memory import fixed_activations
from moba_train.parallel.activations import set_activations
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.world import joined_world
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.saved_recipe import with_overrides
from tests.evals.setting import built
from tests.resolved import shard_of, sharded_of, stages_of
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks

LAYOUTS = [
    ["parallel={cp: 2, cp_transport: allgather, cp_layout: zigzag}"],
    ["parallel={cp: 2, cp_transport: ulysses}", "stages.0.seq_len=126", "batch_tokens=504"],
    ["parallel={tp: 2}", "activation_checkpointing=full"],
    ["parallel={}"],
]
"""Layouts of two ranks; in the last one each reads two of five sequences at a time."""


@pytest.fixture
def masked(run: Run, corpora: Path, tmp_path: Path) -> Run:
    """The tiny run with one stage of MoBA and full layers, on documents whose last three tokens carry loss."""
    for name in ("one", "two", "valid"):
        for end in ("bin", "idx"):
            shutil.copy(corpora / f"{name}.{end}", tmp_path)
        with IndexedDatasetWriter(mask_prefix(str(tmp_path / name)), np.uint8) as masks:
            for length in IndexedDataset(str(tmp_path / name)).document_lengths:
                masks.add_document(np.arange(length) >= length - 3)
    for source in (*run.recipe["data"]["train"], *run.recipe["data"]["validation"]):
        source["path"] = str(tmp_path / Path(source["path"]).name)
    run.recipe["data"]["long_conversations"] = "split"
    run.recipe["stages"] = [run.recipe["stages"][1]]
    run.recipe["evaluation"] = {"sequences": 2, "gradient_reach": {"sequences": 5}}
    return run


def measured(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """The result of an evaluation on the ranks of this process group."""
    with joined_world(timedelta(seconds=60)) as world:
        config = with_overrides(load_config(recipe), overrides)
        (stage,) = stages_of(config)
        sizes = mesh_sizes(stage.parallel, world.size)
        dims = ParallelDims(sizes, world)
        model = sharded_of(config, dims)
        run = resolve_unchecked(config)
        activations = fixed_activations(config.model.layers, run.memory, stage, dims.sizes)
        set_activations(model, activations, world.device)
        shard = shard_of(config, stage, dims)
        if shard.engine is not None:
            model.set_engines([shard.engine] * config.model.layers)
        context = EvaluationContext(model, stage, shard, world.device, with_full(stage.attention))
        result = built(GradientReach, config).run(context)
        assert all(parameter.grad is None for parameter in model.parameters())
        return {"numbers": result.numbers, "data": result.data}


def write_measured(recipe: str, output: str) -> None:
    """What a rank does."""
    found = [measured(recipe, overrides) for overrides in LAYOUTS]
    Path(output).write_text(json.dumps(found))


def test_two_ranks_measure_what_one_does(masked: Run, ranks: Ranks, tmp_path: Path) -> None:
    recipe = masked.write_recipe()
    ranks.work(write_measured, (str(recipe), str(tmp_path / "found.json")), 2)
    by_one_rank: dict[tuple[str, ...], dict[str, Any]] = {}
    for overrides, found in zip(LAYOUTS, json.loads((tmp_path / "found.json").read_text()), strict=True):
        changes = tuple(overrides[1:])
        if changes not in by_one_rank:
            by_one_rank[changes] = measured(str(recipe), ["parallel={}", *changes])
        alone = by_one_rank[changes]
        assert found["numbers"] == pytest.approx(alone["numbers"], abs=0.01), overrides
        found_layers = found["data"].pop("layers")
        for name, layers in alone["data"]["layers"].items():
            for got, want in zip(found_layers[name], layers, strict=True):
                for key, values in want.items():
                    wanted = pytest.approx(values, abs=0.02 if key in ("reach", "reached") else 1e-7, rel=1e-3)
                    assert got[key] == wanted, (overrides, name, key)
        assert {**found["data"], "layers": alone["data"]["layers"]} == alone["data"]


def test_training_is_bitwise_what_it_is_without(masked: Run, tmp_path: Path) -> None:
    """Measured before the first step and after each, with frozen embeddings and recomputed activations."""
    masked.recipe["activation_checkpointing"] = "full"
    masked.recipe["stages"][0] |= {"tokens": 2 * 512, "trainable": ["blocks.*", "norm.*", "output.*"]}
    masked.recipe["evaluation"] = {"every": 1, "sequences": 2, "at_start": True, "gradient_reach": {"sequences": 2}}
    assert masked.train_here() == 0
    found = masked.records("gradient_reach")
    assert {len(record["gradient_reach_layers"]["layers"]["moba"]) for record in found} == {2}
    assert [record["step"] for record in found] == [0, 1, 2]
    assert all(0 < record["gradient_reach"] <= record["gradient_reach_full"] == 1 for record in found)
    losses = masked.losses()
    shutil.move(masked.run_dir, tmp_path / "with")
    masked.recipe["evaluation"]["gradient_reach"] = None
    assert masked.train_here() == 0
    assert masked.losses() == losses
    assert_same_tensors(masked.newest_checkpoint, tmp_path / "with" / "checkpoints" / masked.newest_checkpoint.name)
