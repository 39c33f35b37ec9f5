"""What is saved comes back bit by bit, on the same and on another number of ranks."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.index import Chunk, PackedTensor, Part, SavedTensor, Sizes
from moba_train.checkpoint.load import load_checkpoint
from moba_train.checkpoint.manifest import verify_checkpoint
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import (
    TrainingTensors,
    load_model,
    load_model_and_optimizer,
)
from moba_train.errors import CheckpointError
from tests.checkpoint.checkpoint_ranks import assert_equal, build, full_values, process_group, run_ranks, train


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    with process_group(tmp_path / "store"):
        yield


def numbers(offsets: Sizes, sizes: Sizes) -> set[Sizes]:
    """Places in a tensor of the numbers of a box."""
    return {*itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True)))}


def test_a_rank_takes_the_chunks_that_its_part_overlaps_out_of_those_that_it_is_sent() -> None:
    dice = random.Random(0)
    for _ in range(200):
        shape = tuple(dice.randint(1, 9) for _ in range(dice.randint(0, 3)))
        cuts = [sorted({0, size, *(dice.randint(0, size) for _ in range(3))}) for size in shape]
        boxes = itertools.product(*(itertools.pairwise(along) for along in cuts))
        chunks = [
            Chunk(dice.choice("ab"), number, tuple(b for b, _ in box), tuple(e - b for b, e in box))
            for number, box in enumerate(boxes)
        ]
        offsets = tuple(dice.randrange(size) for size in shape)
        sizes = tuple(dice.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True))
        packed = PackedTensor.pack(SavedTensor(torch.float32, shape, chunks), {"b": 0, "a": 1})
        found = packed.overlapping(Part("x", torch.float32, shape, offsets, sizes), "ba")
        own = numbers(offsets, sizes)
        expected = [chunk for chunk in chunks if own & numbers(chunk.offsets, chunk.sizes)]
        assert found == SavedTensor(torch.float32, shape, expected)


def save_and_resume(folder: Path, tp: int = 1) -> None:
    """Saves after 3 steps, trains on while the save runs; a fresh start from the checkpoint must do the same 2 steps.
    Leaves the unsharded values next to the checkpoint."""
    model, optimizer = build(seed=0, tp=tp)
    tensors = TrainingTensors(model, optimizer)
    tensors()  # before FSDP's first forward pass, which moves them
    train(model, optimizer, 3)
    at_save = full_values(TrainingTensors(model, optimizer)())
    assert_equal(full_values(tensors()), at_save)
    checkpointer = Checkpointer(folder, Retention(1))
    checkpointer.save(3, tensors(), {"consumed_tokens": 12345})
    checkpointer.before_update()
    train(model, optimizer, 2)
    at_end = full_values(TrainingTensors(model, optimizer)())
    checkpointer.close()
    assert checkpointer.last_error is None

    path = latest_checkpoint(folder)
    assert path is not None
    verify_checkpoint(path)
    model, optimizer = build(seed=1, tp=tp)
    assert load_model_and_optimizer(model, optimizer, path, verify=True) == {"consumed_tokens": 12345}
    assert_equal(full_values(TrainingTensors(model, optimizer)()), at_save)
    train(model, optimizer, 2)
    assert_equal(full_values(TrainingTensors(model, optimizer)()), at_end)
    torch.save(at_save, folder / "expected.pt")


def load_and_compare(folder: Path, tp: int = 1) -> None:
    path = latest_checkpoint(folder)
    assert path is not None
    model, optimizer = build(seed=2, tp=tp)
    load_model_and_optimizer(model, optimizer, path)
    expected = torch.load(folder / "expected.pt")
    assert_equal(full_values(TrainingTensors(model, optimizer)()), expected)


def two_ranks_save_and_load(own: Path, own_tp: Path, others: Path) -> None:
    save_and_resume(own)
    save_and_resume(own_tp, tp=2)
    for folder in (own, own_tp, others):
        for tp in (1, 2):
            load_and_compare(folder, tp)


@pytest.mark.slow
def test_resume_is_bitwise_and_layouts_interchange(tmp_path: Path) -> None:
    with process_group(tmp_path / "store_1"):
        save_and_resume(tmp_path / "saved_by_1")
    folders = [tmp_path / name for name in ("saved_by_2", "saved_by_tp_2", "saved_by_1")]
    run_ranks(2, two_ranks_save_and_load, tmp_path / "store_2", *folders)
    with process_group(tmp_path / "store_3"):
        for folder in folders:
            load_and_compare(folder)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_resume_is_bitwise_over_nccl_and_loads_on_a_cpu(tmp_path: Path) -> None:
    run_ranks(2, save_and_resume, tmp_path / "store_1", tmp_path / "checkpoints", device="cuda")
    with process_group(tmp_path / "store_2"):
        load_and_compare(tmp_path / "checkpoints")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_resume_is_bitwise_on_one_gpu(tmp_path: Path) -> None:
    run_ranks(1, save_and_resume, tmp_path / "store", tmp_path / "checkpoints", device="cuda")


def save_and_look_for_contexts(folder: Path) -> None:
    checkpointer = Checkpointer(folder, Retention(1))
    checkpointer.save(1, {"weight": torch.ones(1000, device="cuda")}, {})
    checkpointer.before_update()
    checkpointer.close()
    assert checkpointer.last_error is None
    gpus = range(torch.cuda.device_count())
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # not in its stubs
    assert [gpu for gpu in gpus if has_context(gpu)] == [dist.get_rank()]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_saves_without_a_context_on_the_gpu_of_another(tmp_path: Path) -> None:
    """To make one takes seconds in which the rank's training thread can launch nothing, and memory on GPU 0."""
    run_ranks(2, save_and_look_for_contexts, tmp_path / "store", tmp_path / "checkpoints", device="cuda")


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path, one_rank: None) -> None:
    results = []
    for save_first in (False, True):
        model, optimizer = build(seed=0)
        if save_first:
            TrainingTensors(model, optimizer)()
        train(model, optimizer, 2)
        results.append(full_values(TrainingTensors(model, optimizer)()))
    assert_equal(*results)


def test_tensors_that_were_replaced_are_collected_again(one_rank: None) -> None:
    """As FSDP replaces parameters in the first forward pass, and loading the states of an optimizer."""
    model, optimizer = build(seed=0)
    train(model, optimizer, 1)
    tensors = TrainingTensors(model, optimizer)
    tensors()
    parameter = next(model.parameters())
    with torch.no_grad():
        parameter.data = parameter.data + 1
    assert full_values(tensors())["model.0.weight"].equal(full_values({"": parameter})[""])
    optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"] + 1
    moment = full_values({"": optimizer.state[parameter]["exp_avg"]})[""]
    assert full_values(tensors())["optim.0.weight.exp_avg"].equal(moment)


@pytest.mark.parametrize("reserved", [False, True])
def test_later_updates_do_not_reach_the_saved_copy(
    tmp_path: Path, one_rank: None, device: torch.device, reserved: bool
) -> None:
    """Twice, because the second save reuses the memory of the first. The copy is still under way when `save` returns:
    it is large, on a GPU the work before it is long, and the update comes at once."""
    size = 20_000_000 if device.type == "cpu" else 200_000_000
    weight, meta = torch.zeros(size, device=device), {"step": 0}
    checkpointer = Checkpointer(tmp_path / "checkpoints", Retention(2))
    if reserved:
        checkpointer.reserve({"weight": weight})
    for step in (1, 2):
        weight.fill_(step)
        meta["step"] = step
        checkpointer.save(step, {"weight": weight}, meta)
        checkpointer.before_update()
        weight.fill_(-1)
        meta["step"] = -1
    checkpointer.close()
    assert checkpointer.last_saved is not None
    assert checkpointer.last_saved[0] == 2
    for step in (1, 2):
        assert load_checkpoint(tmp_path / "checkpoints" / f"step_{step:08d}", {"weight": weight}) == {"step": step}
        assert torch.equal(weight, torch.full_like(weight, step))


def test_the_model_alone_loads_without_a_process_group(tmp_path: Path) -> None:
    with process_group(tmp_path / "store"):
        save_and_resume(tmp_path / "checkpoints")
    path = latest_checkpoint(tmp_path / "checkpoints")
    assert path is not None
    model = nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 5), nn.LayerNorm(5))
    load_model(model, path)
    expected = torch.load(tmp_path / "checkpoints" / "expected.pt")
    assert_equal(dict(model.state_dict()), {name: expected[f"model.{name}"] for name in model.state_dict()})


def test_misfits_are_named(tmp_path: Path, one_rank: None) -> None:
    checkpointer = Checkpointer(tmp_path, Retention(1))
    checkpointer.save(1, {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4)}, {})
    checkpointer.close()
    path = tmp_path / "step_00000001"

    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, {"a": torch.zeros(5), "b": torch.zeros(3, dtype=torch.bfloat16), "d": torch.zeros(1)})
    for text in (
        "a: saved as [2] float32, to be loaded as [5] float32",
        "b: saved as [3] float32, to be loaded as [3] bfloat16",
        "c: in the checkpoint",
        "d: not in the checkpoint",
    ):
        assert text in str(error.value)


def test_a_corrupted_shard_is_an_error_with_and_without_verify(tmp_path: Path, one_rank: None) -> None:
    checkpointer = Checkpointer(tmp_path, Retention(1))
    checkpointer.save(1, {"a": torch.zeros(2)}, {})
    checkpointer.close()
    path = tmp_path / "step_00000001"
    shard = path / "rank_0_0.safetensors"
    shard.write_bytes(bytes(shard.stat().st_size))

    for verify in (True, False):
        with pytest.raises(CheckpointError, match=r"rank_0_0\.safetensors: its SHA-256"):
            load_checkpoint(path, {"a": torch.zeros(2)}, verify=verify)
