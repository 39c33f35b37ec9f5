"""Context parallelism changes where a sequence lives, not what is trained: the same losses, norms and evaluations."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moba_train.config.parallel import CPLayout
from moba_train.data.batch import collate
from moba_train.data.samples import Sample
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.data_shard import shard_batch
from moba_train.registry import TRANSPORTS
from tests.run.tiny_run import VOCAB, Run, assert_like_one_gpu
from tests.run.trainer_ranks import Ranks, train_traced


def lengthened(run: Run, steps: int) -> Run:
    """The tiny run (full attention, then MoBA and full layers mixed; packed documents) with so many steps, evaluated at
    the end of each stage."""
    for stage, share in zip(run.recipe["stages"], (steps // 2, steps - steps // 2), strict=True):
        stage["tokens"] = share * 512
    run.recipe["evaluation"]["every"] = run.recipe["checkpoint"]["every"] = 1000
    return run


def curves(run: Run) -> dict[str, list[Any]]:
    """What a user sees of a run, but for times."""
    metrics = run.records()
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "loss_tokens")
    return {key: [record[key] for record in metrics] for key in keys} | {
        "eval_loss": [record["eval_loss"] for record in run.records("validation_loss")]
    }


def assert_same_training(got: dict[str, list[Any]], want: dict[str, list[Any]]) -> None:
    for key in ("step", "tokens", "lr", "loss_tokens"):
        assert got[key] == want[key], key
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-3)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-2)
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-3)


STEPS = 3
"""One of the first stage and two of the second, of which the last one has the gradients of the other in its weights."""


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    run = lengthened(Run(tmp_path_factory.mktemp("alone"), corpora), STEPS)
    ranks.train(run, 1)
    return run


def test_two_pairs_of_ranks_that_share_sequences_train_the_same(run: Run, ranks: Ranks, alone: Run) -> None:
    run.recipe["parallel"] = {"cp": 2}
    ranks.train(lengthened(run, STEPS), 4)
    assert_same_training(curves(run), curves(alone))
    devices = [record["tokens_per_s"] / record["tokens_per_s_per_device"] for record in run.records()]
    assert devices == pytest.approx([4] * STEPS)


@pytest.mark.parametrize(
    ("world", "per_node", "parallel"),
    [
        (2, 2, {"cp_transport": "allgather", "cp_layout": "contiguous"}),
        (2, 2, {"cp_transport": "ulysses", "cp_layout": "zigzag"}),
        (4, 2, {"cp_transport": "hierarchical"}),
        (4, 2, {"cp_transport": "ring"}),
    ],
    ids=lambda value: value.get("cp_transport") if isinstance(value, dict) else None,
)
def test_every_transport_trains(
    run: Run, ranks: Ranks, alone: Run, world: int, per_node: int, parallel: dict[str, Any]
) -> None:
    """Only the second stage shares its sequences: the layout of the weights stays as it is."""
    run.recipe["stages"][0]["micro_batch_size"] = 2  # four ranks have no more
    run.recipe["stages"][1]["parallel"] = {"cp": world, **parallel}
    ranks.train(lengthened(run, STEPS), world, per_node=per_node)
    (choice,) = run.records("parallel")
    assert parallel["cp_transport"] in choice["message"]
    assert choice["stage"] == "long"
    assert_same_training(curves(run), curves(alone))


def test_lengths_that_three_ranks_cannot_share_evenly_train_the_same(run: Run, ranks: Ranks) -> None:
    """Shards and samples padded, documents packed best-fit, and the loss by position."""
    run.recipe |= {"batch_tokens": 400, "parallel": {"cp": 3, "cp_layout": "zigzag"}}
    run.recipe["data"]["packing"] = "best_fit"
    run.recipe["evaluation"]["position_wise"] = {"bucket": 50, "sequences": 4}
    run.recipe["stages"] = [{"name": "one", "seq_len": 100, "tokens": 4 * 400, "micro_batch_size": 2}]
    ranks.train(run, 3)
    shared, trailing = curves(run), run.records("position_wise")[0]["trailing_loss"]
    shutil.rmtree(run.run_dir)
    del run.recipe["parallel"]
    ranks.train(run, 1)
    assert_same_training(shared, curves(run))
    assert trailing == pytest.approx(run.records("position_wise")[0]["trailing_loss"], rel=1e-3)


@pytest.mark.parametrize("cp", [1, 2])
def test_padding_is_that_of_the_whole_batch_on_any_ranks(cp: int, run: Run, ranks: Ranks) -> None:
    run.recipe["data"]["packing"] = "best_fit"
    del run.recipe["evaluation"], run.recipe["data"]["validation"]
    run.recipe["stages"] = [{"name": "one", "seq_len": 128, "tokens": 4 * 512}]
    ranks.train(run, 1)
    alone = [record["padding_fraction"] for record in run.records()]
    assert len(set(alone)) > 1
    shutil.rmtree(run.run_dir)
    run.recipe["parallel"] = {"cp": cp}
    ranks.train(run, 4)
    assert [record["padding_fraction"] for record in run.records()] == alone


def test_a_run_goes_on_with_another_cp_and_bitwise_with_the_same(tmp_path: Path, corpora: Path, ranks: Ranks) -> None:
    """Six steps at cp = 2 on two ranks; the last two there again, at cp = 4, and with dp = 2 instead."""

    def six_steps(name: str, parallel: dict[str, Any]) -> Run:
        run = lengthened(Run(tmp_path / name, corpora), 6)
        run.folder.mkdir()
        run.recipe["checkpoint"]["every"] = 4
        run.recipe["parallel"] = parallel
        return run

    shared = {"cp": 2, "cp_transport": "allgather"}
    undisturbed = six_steps("undisturbed", shared)
    ranks.train(undisturbed, 2)
    for name, world, parallel in (("again", 2, shared), ("cp 4", 4, {"cp": 4}), ("dp 2", 2, {})):
        run = six_steps(name, parallel)
        run.take_over(undisturbed, 4)
        ranks.train(run, world)
        assert_same_training(curves(run), curves(undisturbed))
        assert parallel != shared or curves(run) == curves(undisturbed)


def test_compiled_recomputed_accumulated_and_shared(run: Run, ranks: Ranks) -> None:
    """The stage that has both kinds of layers."""
    run.use_short_documents()
    run.recipe["stages"] = [run.recipe["stages"][1] | {"tokens": 3 * 512}]
    ranks.train(run, 1)
    alone = run.losses()
    shutil.rmtree(run.run_dir)
    parallel = {"cp": 2, "cp_layout": "zigzag"}  # contiguous shards would have whole documents
    run.recipe |= {"compile": True, "activation_checkpointing": "full", "parallel": parallel}
    ranks.work(train_traced, [str(run.write_recipe())], 2)
    assert run.losses() == pytest.approx(alone, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "hierarchical"])
def test_two_gpus_share_sequences_and_repeat_bit_by_bit(run: Run, transport: str) -> None:
    """NCCL, bf16; head width 64, so that the kernels of real training run."""
    run.recipe["model"] |= {"hidden_size": 256}
    if transport == "dispatch":
        run.recipe["attention"]["full_layers"] = "none"
        run.recipe["stages"][0].pop("attention")
    assert run.train_on_gpu(1)[0] == 0
    alone = curves(run)
    shared = []
    for _ in range(2):
        shutil.rmtree(run.run_dir)
        run.recipe["parallel"] = {"cp": 2, "cp_transport": transport}
        code, output = run.train_on_gpu(2)
        assert code == 0, output
        shared.append(curves(run))
    assert shared[0] == shared[1]
    assert_like_one_gpu(shared[0], alone)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shards_hold_every_token_once_with_its_own_position_label_and_loss(kind: CPLayout, count: int) -> None:
    """A sparse loss mask, and token 0, which is also what padding is made of, among the real tokens."""
    rng = np.random.default_rng(0)
    weights = np.zeros(13, dtype=np.float32)
    weights[[2, 3]] = 1, 0.5
    sample = Sample(rng.integers(VOCAB, size=13) * (np.arange(13) % 3), np.arange(13), weights, [6, 7], [])
    batch = collate([sample])
    sequence = SequenceLayout.split(13, count, kind)
    shards = [shard_batch(batch, sequence, rank) for rank in range(count)]
    for name in ("tokens", "labels", "positions"):
        whole = sequence.to_packed(torch.cat([getattr(shard, name) for shard in shards]))
        assert torch.equal(whole, getattr(batch, name)), name
    assert sum(shard.loss_weight_sum for shard in shards) == batch.loss_weight_sum == 1.5
    labels, _, loss_weights = (torch.cat(parts) for parts in zip(*(shard.loss_on for shard in shards), strict=True))
    kept = loss_weights > 0
    assert sorted(zip(labels[kept].tolist(), loss_weights[kept].tolist(), strict=True)) == [(2, 1.0), (3, 0.5)]
    assert all(len(shard.loss_index) >= 1 and shard.layout is batch.layout for shard in shards)
    assert any(shard.loss_tokens == 0 for shard in shards) or count == 1
