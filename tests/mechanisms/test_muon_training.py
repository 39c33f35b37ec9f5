"""Muon on ranks: the same update however weights are sharded, bitwise resume, other layouts, frozen parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from moba_train.config.load import load_config
from moba_train.config.mesh import mesh_sizes
from moba_train.optim.registry import build_optimizer, set_learning_rate
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.world import joined_world
from tests.gradients import full_tensor
from tests.resolved import sharded_of, stages_of
from tests.run.tiny_run import Run, assert_like_one_gpu, assert_same_tensors, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "4 shards": (4, {}),
    "2 shards x tp 2": (4, {"tp": 2}),
    "2 replicas x 2 shards": (4, {"dp_replicate": 2}),
}


def update_on_ranks(recipe: str, out: str) -> None:
    """Three steps with gradients that are drawn, not computed; rank 0 saves weights and state, whole. In the second
    step a layer has no gradients."""
    with joined_world() as world:
        config = load_config(recipe)
        dims = ParallelDims(mesh_sizes(stages_of(config)[0].parallel, world.size), world)
        model = sharded_of(config, dims)
        optimizer = build_optimizer(model, config.optim, world.device, dims.layers_group)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            for name, parameter in model.named_parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                assert isinstance(parameter, DTensor)
                mesh, placements = parameter.device_mesh, parameter.placements
                frozen = step == 1 and name.startswith("blocks.0.")
                parameter.grad = None if frozen else distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            set_learning_rate(optimizer, 0.01 * (step + 1))
            optimizer.step()
        tensors = {}
        for name, parameter in model.named_parameters():
            tensors[name] = full_tensor(parameter)
            for key, value in optimizer.state[parameter].items():
                tensors[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
        if world.is_main:
            torch.save(tensors, out)


def updated(run: Run, ranks: Ranks, size: int, parallel: dict[str, Any], out: Path) -> dict[str, torch.Tensor]:
    """What `update_on_ranks` leaves. The sizes are odd: the 9 rows of o_proj on 4 ranks are 3, 3, 3 and 0."""
    run.recipe["parallel"] = parallel
    run.recipe["model"] |= {"vocab_size": 66, "hidden_size": 9, "intermediate_size": 38, "head_dim": 2}
    run.recipe["optim"] = {"kind": "muon", "weight_decay": 0.2}
    ranks.work(update_on_ranks, [str(run.write_recipe()), str(out)], size)
    tensors: dict[str, torch.Tensor] = torch.load(out)
    return tensors


def test_the_update_does_not_depend_on_the_layout(run: Run, ranks: Ranks, tmp_path: Path) -> None:
    """Bit by bit: a matrix is orthogonalized whole, on one rank, in float32."""
    alone = updated(run, ranks, 1, {}, tmp_path / "alone")
    assert sum(name.endswith(".momentum_buffer") for name in alone) == 2 * 7
    for layout, (size, parallel) in LAYOUTS.items():
        shared = updated(run, ranks, size, parallel, tmp_path / layout)
        assert shared.keys() == alone.keys()
        assert [name for name in alone if not torch.equal(shared[name], alone[name])] == [], layout


def muon(run: Run, **parallel: int) -> Run:
    run.recipe["optim"] |= {"kind": "muon"}
    run.recipe["parallel"] = parallel
    run.recipe["checkpoint"]["keep_last"] = 10
    for stage in run.recipe["stages"]:
        stage["micro_batch_size"] = 2
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """On two ranks. Not to be changed."""
    run = muon(Run(tmp_path_factory.mktemp("muon"), corpora))
    ranks.train(run, 2)
    return run


def test_resuming_is_bitwise_and_state_has_global_names(finished: Run, run: Run, ranks: Ranks) -> None:
    muon(run).take_over(finished, 8)
    ranks.train(run, 2)
    assert run.losses() == finished.losses()
    assert_same_tensors(run.newest_checkpoint, finished.newest_checkpoint)
    tensors = checkpoint_tensors(run.newest_checkpoint)
    gate = "blocks.1.feed_forward.gate_proj.weight"
    assert tensors[f"optim.{gate}.momentum_buffer"].shape == tensors[f"model.{gate}"].shape == (64, 32)
    assert f"optim.{gate}.exp_avg" not in tensors
    assert {"optim.output.weight.exp_avg", "optim.norm.weight.step"} <= tensors.keys()


@pytest.mark.parametrize(("ranks_", "parallel"), [(1, {}), (2, {"tp": 2})], ids=["1", "tp"])
def test_other_layouts_train_alike_and_go_on_from_each_others_checkpoints(
    finished: Run, run: Run, ranks: Ranks, ranks_: int, parallel: dict[str, int]
) -> None:
    muon(run, **parallel).take_over(finished, 8)
    ranks.train(run, ranks_)
    assert run.losses() == pytest.approx(finished.losses(), rel=1e-3)


def test_frozen_matrices_stay_with_their_momentum(run: Run, ranks: Ranks) -> None:
    muon(run).recipe["checkpoint"]["every"] = 2
    for stage in run.recipe["stages"]:
        stage["tokens"] = 2 * 512
    run.recipe["stages"][1]["trainable"] = ["blocks.1.attention.*", "embedding.weight"]
    ranks.train(run, 2)
    folder = run.run_dir / "checkpoints"
    before, after = (checkpoint_tensors(folder / f"step_{step:08d}") for step in (2, 4))
    moved = {name for name in after if not torch.equal(before[name], after[name]) and not name.startswith("rng.")}
    trained = [f"blocks.1.attention.{part}_proj.weight" for part in "qkvo"]
    assert moved == {
        *(f"model.{name}" for name in [*trained, "embedding.weight"]),
        *(f"optim.{name}.momentum_buffer" for name in trained),
        *(f"optim.embedding.weight.{state}" for state in ("exp_avg", "exp_avg_sq", "step")),
    }


def test_it_learns_as_well_as_adamw(finished: Run, finished_run: Run) -> None:
    """With AdamW's learning rate: the RMS of its updates is AdamW's."""
    assert finished.losses()[-1] < 1.02 * finished_run.losses()[-1]


def test_matrices_gathered_in_fp8(run: Run, ranks: Ranks, finished: Run) -> None:
    pytest.importorskip("torchao")
    run.recipe["precision"] = {"linear": "fp8", "compute": "bf16", "fp8": {"emulate": True}}
    ranks.train(muon(run), 2, "--stop-at-step", "3")
    assert run.losses() == pytest.approx(finished.losses()[:3], rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("parallel", [{}, {"tp": 2}], ids=["dp", "tp"])
def test_two_gpus_train_as_one(run: Run, tmp_path: Path, corpora: Path, parallel: dict[str, int]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    (tmp_path / "alone").mkdir()
    alone = muon(Run(tmp_path / "alone", corpora))
    for one, ranks_ in ((alone, 1), (muon(run, **parallel), 2)):
        one.recipe["model"]["hidden_size"] = 256  # heads of width 64, so that the kernels of real training run
        code, output = one.train_on_gpu(ranks_)
        assert code == 0, output
    shared, single = (
        {key: [record[key] for record in one.records()] for key in ("loss", "grad_norm", "loss_tokens")}
        for one in (run, alone)
    )
    assert_like_one_gpu(shared, single)
