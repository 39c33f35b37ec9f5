"""A save that is planned once writes every number of every tensor once, and is planned again when tensors change."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from moba_train.checkpoint.index import DTYPES, Part, index_json
from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.manifest import FileEntry
from moba_train.checkpoint.process_group import SaveFailedError, SaveGroup
from moba_train.checkpoint.publish import publish
from moba_train.checkpoint.writer import ShardFile, ShardWriter, build_index, write_checkpoint
from moba_train.optim.gradients import local_part
from tests.checkpoint.checkpoint_ranks import process_group, run_ranks


def tensors(rows: int) -> dict[str, Tensor]:
    """Sharded over the ranks, the same on all (a DTensor and a plain one), empty, and one of each rank's own."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    return {
        "sharded": distribute_tensor(torch.arange(rows * 3.0).view(rows, 3), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(8, dtype=torch.bfloat16).view(2, 4), mesh, [Shard(1)]),
        "replicated": distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]),
        "same": torch.full((4,), 7.0),
        "empty": torch.empty(0, 3),
        f"own.{rank}": torch.full((rank + 1,), rank, dtype=torch.uint8),
    }


def written(group: SaveGroup, writer: ShardWriter, folder: Path, values: dict[str, Tensor]) -> None:
    """A published checkpoint without a meta."""
    copies = {name: local_part(value).clone() for name, value in values.items()}
    writer.plan(values, copies)
    folder.mkdir(exist_ok=True)

    def publish_here(entries: list[dict[str, FileEntry]]) -> None:
        publish(folder, 1, {name: entry for own in entries for name, entry in own.items()}).rename(folder)

    group.agree(lambda: writer.write(folder, copies), publish_here)
    dist.barrier()


def write_four(folder: Path, plans: Path) -> None:
    """Write equal tensors twice, then a longer one, then one that only rank 0 has."""
    group = SaveGroup(dist.new_group(backend="gloo"))
    writer = ShardWriter(group)
    scatter, made, counts = group.scatter, [], []

    def counted(values: list[list[Part]]) -> list[Part]:
        made.append(1)
        return scatter(values)

    group.scatter = counted  # type: ignore[method-assign,assignment]  # called once for each save plan
    for number, rows in enumerate((5, 5, 9, 9)):
        values = tensors(rows)
        values["sharded"] += number
        if number == 3 and dist.get_rank() == 0:
            values["new"] = torch.ones(1)
        written(group, writer, folder / f"save{number}", values)
        counts.append(len(made))
        made.clear()
    (plans / str(dist.get_rank())).write_text(str(counts))


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_number_is_written_once_and_a_save_is_planned_when_tensors_change(tmp_path: Path, ranks: int) -> None:
    (plans := tmp_path / "plans").mkdir()
    run_ranks(ranks, write_four, tmp_path / "store", tmp_path, plans)
    assert {file.read_text() for file in plans.iterdir()} == {"[1, 0, 1, 1]"}
    for number, rows in enumerate((5, 5, 9, 9)):
        path = tmp_path / f"save{number}"
        reader = CheckpointReader(path)
        expected = {
            "sharded": torch.arange(rows * 3.0).view(rows, 3) + number,
            "columns": torch.arange(8, dtype=torch.bfloat16).view(2, 4),
            "replicated": torch.tensor(3.0),
            "same": torch.full((4,), 7.0),
            "empty": torch.empty(0, 3),
        }
        expected |= {f"own.{rank}": torch.full((rank + 1,), rank, dtype=torch.uint8) for rank in range(ranks)}
        expected |= {"new": torch.ones(1)} if number == 3 else {}
        assert reader.tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(reader.read(name), value), name
        stored = sum(tensor.nbytes for file in path.glob("*.safetensors") for tensor in load_file(file).values())
        assert stored == sum(value.nbytes for value in expected.values())
    shares = [sum(value.nbytes for value in load_file(file).values()) for file in path.glob("*.safetensors")]
    assert max(shares) - min(shares) <= 40, "what all ranks have is written by the one that writes least"


def fail_once(folder: Path) -> None:
    """Rank 1 cannot write its file; afterwards it can."""
    group = SaveGroup(dist.new_group(backend="gloo"))
    writer, values = ShardWriter(group), tensors(6)
    if dist.get_rank() == 0:
        (folder / "try0" / "rank_1_0.safetensors").mkdir(parents=True)
    dist.barrier()
    with pytest.raises(SaveFailedError, match=r"rank 1: (IsADirectory|FileExists)Error"):
        written(group, writer, folder / "try0", values)
    written(group, writer, folder / "try1", values)


def test_what_fails_on_one_rank_fails_on_all_and_the_next_save_is_whole(tmp_path: Path) -> None:
    run_ranks(2, fail_once, tmp_path / "store", tmp_path)
    assert torch.equal(CheckpointReader(tmp_path / "try1").read("sharded"), torch.arange(18.0).view(6, 3))


def plan_what_does_not_fit(_: Path) -> None:
    """Ranks give other shapes for one name; one gives only a part of a tensor; one has a type that no file can hold."""
    group = SaveGroup(dist.new_group(backend="gloo"))
    rank = dist.get_rank()
    for value, problem in (
        (torch.ones(2 + rank), "a is .* on one rank and .* on another"),
        (torch.ones(2, dtype=torch.complex64), "a is torch.complex64; allowed: torch.float64"),
    ):
        with pytest.raises(SaveFailedError, match=problem):
            ShardWriter(group).plan({"a": value}, {"a": value})


def test_tensors_that_cannot_be_stored_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, plan_what_does_not_fit, tmp_path / "store", tmp_path)
    rest = Part("a", torch.float32, (4,), (0,), (3,))
    with pytest.raises(ValueError, match=r"'a' of shape \[4\]: its chunks do not cover it exactly once"):
        build_index([ShardFile.from_parts("rank_0_0.safetensors", [rest])])


def test_an_error_of_one_rank_is_told_with_its_rank(tmp_path: Path) -> None:
    with process_group(tmp_path / "store"):
        group = SaveGroup(dist.new_group(backend="gloo"))
        with pytest.raises(SaveFailedError, match=r"rank 0: ZeroDivisionError"):
            group.run(lambda: 1 // 0)
        assert group.run(lambda: "large") == "large"
        assert group.scatter(group.gather("mine")) == "mine"


@given(st.lists(st.tuples(st.sampled_from([*DTYPES.values()]), st.lists(st.integers(1, 3), max_size=3)), max_size=8))
def test_any_tensors_are_read_back_by_us_and_by_the_library(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[torch.dtype, list[int]]]
) -> None:
    """Of all types, also beside narrower ones of an odd number of bytes."""
    values = {f"tensor {number}": torch.randint(0, 2, shape).to(dtype) for number, (dtype, shape) in enumerate(entries)}
    folder = tmp_path_factory.mktemp("any") / "temporary"
    folder.mkdir()
    parts = [Part.from_whole(name, value) for name, value in values.items()]
    file = ShardFile.from_parts("rank_0_0.safetensors", parts)
    path = publish(folder, 1, write_checkpoint(folder, [file], lambda part: values[part.name], {"x": 1}))
    theirs = load_file(path / file.name)
    reader = CheckpointReader(path)
    assert theirs.keys() == reader.tensors.keys() == values.keys()
    for name, value in values.items():
        for found in (theirs[name], reader.read(name)):
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert torch.equal(found.double(), value.double())


def test_an_index_takes_fewer_bytes_than_the_headers_of_the_files() -> None:
    """So the files are a limit for it, however many tensors and ranks there are and however short their names."""
    parts = [Part(str(number), torch.uint8, (500,), (rank,), (1,)) for number in range(100) for rank in range(500)]
    files = [ShardFile.from_parts(f"rank_{rank}_0.safetensors", parts[rank::500]) for rank in range(500)]
    assert 2**21 < len(index_json(build_index(files))) < sum(len(file.header) for file in files)
