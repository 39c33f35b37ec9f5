"""A save that is planned once writes what torch's own `save` does, and is planned anew when the tensors are others."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from moba_train.checkpoint.planned import PlannedWriter
from moba_train.checkpoint.rank_group import RankGroup, SaveFailedError
from moba_train.optim.gradients import local_part
from tests.checkpoint.checkpoint_ranks import process_group, run_ranks


def tensors(rows: int) -> dict[str, Tensor]:
    """Sharded over the ranks, the same on all, and one of each rank's own."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    return {
        "sharded": distribute_tensor(torch.arange(rows * 3.0).view(rows, 3), mesh, [Shard(0)]),
        "same": torch.full((4,), 7.0),
        f"own.{rank}": torch.full((rank + 1,), float(rank)),
    }


def written(writer: PlannedWriter, folder: Path, values: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    writer.write(folder, values, {name: local_part(value).clone() for name, value in values.items()})


def contents(folder: Path, ranks: int, rows: int) -> dict[str, Tensor]:
    """Everything, read back by one process."""
    found = {"sharded": torch.empty(rows, 3), "same": torch.empty(4)}
    found |= {f"own.{rank}": torch.empty(rank + 1) for rank in range(ranks)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return found


def write_four(folder: Path, plans: Path) -> None:
    """Write equal tensors twice, then a longer one, then one that only rank 0 has; and each with torch's `save`."""
    writer, made = PlannedWriter(RankGroup(dist.new_group(backend="gloo"))), []
    create = dcp.DefaultSavePlanner.create_local_plan

    def counted(planner: dcp.DefaultSavePlanner) -> object:
        made.append(1)
        return create(planner)

    dcp.DefaultSavePlanner.create_local_plan = counted
    counts = []
    for number, rows in enumerate((5, 5, 9, 9)):
        values = tensors(rows)
        values["sharded"] += number
        if number == 3 and dist.get_rank() == 0:
            values["new"] = torch.ones(1)
        written(writer, folder / f"ours{number}", values)
        counts.append(len(made))
        made.clear()
        dcp.save(values, storage_writer=dcp.FileSystemWriter(folder / f"torch{number}"))
        made.clear()
    dcp.DefaultSavePlanner.create_local_plan = create
    (plans / str(dist.get_rank())).write_text(str(counts))


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_writes_what_torch_does_and_plans_when_tensors_change(tmp_path: Path, ranks: int) -> None:
    (plans := tmp_path / "plans").mkdir()
    run_ranks(ranks, write_four, tmp_path / "store", tmp_path, plans)
    assert {file.read_text() for file in plans.iterdir()} == {"[1, 0, 1, 1]"}
    for number, rows in enumerate((5, 5, 9, 9)):
        ours, theirs = (contents(tmp_path / f"{kind}{number}", ranks, rows) for kind in ("ours", "torch"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert torch.equal(ours["sharded"], torch.arange(rows * 3.0).view(rows, 3) + number)
        names = [sorted(file.name for file in (tmp_path / f"{kind}{number}").iterdir()) for kind in ("ours", "torch")]
        assert names[0] == names[1]
    new = {"new": torch.empty(1)}
    dcp.load(new, storage_reader=dcp.FileSystemReader(tmp_path / "ours3"), no_dist=True)
    assert new["new"] == 1


def fail_once(folder: Path) -> None:
    """Rank 1 cannot write its file; afterwards it can."""
    writer, values = PlannedWriter(RankGroup(dist.new_group(backend="gloo"))), tensors(6)
    for number in (0, 1):
        obstacle = folder / f"try{number}" / "__1_0.distcp"
        if dist.get_rank() == 0 and number == 0:
            obstacle.mkdir(parents=True)
        dist.barrier()
        if number == 0:
            with pytest.raises(SaveFailedError, match="rank 1: IsADirectoryError"):
                written(writer, folder / "try0", values)
        else:
            written(writer, folder / "try1", values)


def test_what_fails_on_one_rank_fails_on_all_and_the_next_save_is_whole(tmp_path: Path) -> None:
    run_ranks(2, fail_once, tmp_path / "store", tmp_path)
    assert torch.equal(contents(tmp_path / "try1", 2, 6)["sharded"], torch.arange(18.0).view(6, 3))


def test_an_error_of_one_rank_is_told_with_its_rank(tmp_path: Path) -> None:
    with process_group(tmp_path / "store"):
        ranks = RankGroup(dist.new_group(backend="gloo"))
        with pytest.raises(SaveFailedError, match=r"rank 0: ZeroDivisionError"):
            ranks.on_every_rank(lambda: 1 // 0)
        assert ranks.on_every_rank(lambda: "large") == "large"
        assert ranks.scatter_from_rank_0(ranks.gather_to_rank_0("mine")) == "mine"
