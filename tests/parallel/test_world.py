"""What ranks tell each other on the host, which GPU a rank takes, and variables that the user has set."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moba_train.errors import LaunchError
from moba_train.parallel import world
from moba_train.parallel.world import (
    any_rank,
    broadcast,
    environment_defaults,
    gather_over_ranks,
    sum_over_ranks,
)
from tests.forked import run_processes


def tell_each_other(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 3), rank=rank, world_size=3)
    assert broadcast(f"from {rank}") == "from 0"
    assert sum_over_ranks([rank, 2**40 + 1]) == [3, 3 * (2**40 + 1)]
    assert gather_over_ranks({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert [any_rank(rank in who) for who in ((), (1,), (0, 2))] == [False, True, True]
    dist.destroy_process_group()


def test_ranks_agree_on_values_of_the_host(tmp_path: Path) -> None:
    run_processes(tell_each_other, (tmp_path,), 3)


def test_variables_that_are_set_already_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOBA_SET", "by the user")
    monkeypatch.delenv("MOBA_NOT_SET", raising=False)
    with environment_defaults({"MOBA_SET": "by us", "MOBA_NOT_SET": "by us"}):
        assert (os.environ["MOBA_SET"], os.environ["MOBA_NOT_SET"]) == ("by the user", "by us")
    assert os.environ["MOBA_SET"] == "by the user"
    assert "MOBA_NOT_SET" not in os.environ


def test_each_rank_of_a_node_has_a_gpu_of_its_own_or_the_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(world, "grow_segments", lambda: None)
    assert [world._device(rank, 2) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert taken == [0, 1]
    with pytest.raises(LaunchError, match="3 ranks given, this node has 2 GPUs"):
        world._device(0, 3)
