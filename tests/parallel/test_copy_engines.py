"""Weights and gradients that ranks copy into each other's memory: FSDP trains the same bits as with its own transfers.

Files in shared memory stand in for the memory of GPUs that reach each other; streams and copy engines run on GPUs only
(tests/run/test_fsdp_units.py).
"""

import os
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from moba_train.parallel.transfers import (
    GATHER_BUFFERS,
    CopyEngineGather,
    CopyEngineReduceScatter,
    SharedBuffer,
    gathered_bytes,
)
from tests.forked import run_processes

WIDTHS = [5, 7, 4, 9, 6, 8]
BUFFER = 128
"""Bytes that the gradients of some layers exceed."""


class SharedFiles:
    """Makes buffers of files in `folder`, and counts what is done with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self.barriers: list[list[int]] = []
        """For each buffer made, the arguments of all calls of its `barrier`, in order."""

    def __call__(self, group: dist.ProcessGroup, _device: torch.device, size: int, _: timedelta) -> SharedBuffer:
        """A buffer, filled with ones, which are no sensible weights."""
        number = next(self._numbers)
        files = [str(self._folder / f"{number} of {rank}") for rank in range(group.size())]
        own = torch.from_file(files[group.rank()], shared=True, size=size, dtype=torch.uint8).fill_(255)
        dist.barrier(group)
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        theirs = {rank: torch.from_file(files[rank], shared=True, size=size, dtype=torch.uint8) for rank in others}
        barriers: list[int] = []
        self.barriers.append(barriers)

        def barrier(which: int) -> None:
            barriers.append(which)
            dist.barrier(group)

        return SharedBuffer(own, theirs, barrier)


def train(
    folder: Path | None, dtype: torch.dtype, reshard: bool, sums: bool
) -> tuple[list[Tensor], SharedFiles | None]:
    """Losses and this rank's weights of a few steps, two micro-batches each, and of passes without gradients between;
    `folder`: where copied weights travel and, with `sums`, gradients; None: by FSDP's own transfers."""
    torch.manual_seed(1)
    layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in zip(WIDTHS, [*WIDTHS[1:], 3], strict=True)]
    model = nn.Sequential(*layers, nn.Linear(3, 2))
    group = dist.group.WORLD
    assert group is not None
    ranks, cpu, minute = group.size(), torch.device("cpu"), timedelta(minutes=1)
    files = SharedFiles(folder) if folder else None
    if files:
        gather = CopyEngineGather(group, cpu, max(gathered_bytes(x, ranks, dtype) for x in layers), minute, files)
        reduce_scatter = CopyEngineReduceScatter(group, cpu, dtype, minute, files, size=BUFFER)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (*layers, model):
        sharded: Any = fully_shard(unit, mp_policy=policy, reshard_after_forward=reshard)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if files and unit is not model:
            sharded.set_custom_all_gather(gather)
        if files and sums:
            sharded.set_custom_reduce_scatter(reduce_scatter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Tensor] = []
    for step in range(3):
        for part in range(2):
            torch.manual_seed(10 * step + part + 100 * dist.get_rank())
            loss = model(torch.randn(11, WIDTHS[0])).square().sum()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if reshard:  # else its weights would stay, for the next step too
            with torch.no_grad():
                found.append(model(torch.ones(1, WIDTHS[0])))
    for weight in model.parameters():
        assert isinstance(weight, DTensor)
        found.append(weight.to_local().detach())
    return found, files


def join(rank: int, ranks: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "localhost"}
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)


def compare(rank: int, ranks: int, folder: Path, dtype: torch.dtype, reshard: bool, sums: bool) -> None:
    """Called on every rank."""
    join(rank, ranks, folder)
    expected, _ = train(None, dtype, reshard, sums)
    copied, files = train(folder, dtype, reshard, sums)
    assert files is not None
    for one, other in zip(expected, copied, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
    assert len(files.barriers) == GATHER_BUFFERS + 1
    transfers = [len(barriers) // 2 for barriers in files.barriers]
    assert files.barriers == [[0, 1] * number for number in transfers]
    assert sum(transfers[:-1]) == len(WIDTHS) * 3 * (2 * 2 + 1 if reshard else 2)
    assert max(transfers[:-1]) - min(transfers[:-1]) <= 1, "buffers take turns"
    units = zip(WIDTHS, [*WIDTHS[1:], 3], strict=True)
    rooms = BUFFER // (ranks * dtype.itemsize)
    parts = [-(-fan_out // ranks) * (fan_in + 1) for fan_in, fan_out in [*units, (3, 2)]]
    assert transfers[-1] == (3 * 2 * sum(-(-part // rooms) for part in parts) if sums else 0)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "dtype", "reshard", "sums"),
    [
        (2, torch.float32, True, True),
        (2, torch.bfloat16, False, True),
        (3, torch.bfloat16, True, False),  # gloo adds up the gradients of three ranks in another order
    ],
)
def test_fsdp_trains_the_same_bits(ranks: int, dtype: torch.dtype, reshard: bool, sums: bool, tmp_path: Path) -> None:
    run_processes(compare, (ranks, tmp_path, dtype, reshard, sums), ranks)


def add_up(rank: int, ranks: int, folder: Path, dtype: torch.dtype) -> None:
    """Called on every rank: more gradients than the buffer has room for at once, and fewer."""
    join(rank, ranks, folder)
    group = dist.group.WORLD
    assert group is not None
    files = SharedFiles(folder)
    cpu = torch.device("cpu")
    minute = timedelta(minutes=1)
    ways = [
        CopyEngineReduceScatter(group, cpu, dtype, minute, files, BUFFER, compiled=compiled)
        for compiled in (False, *[rank == 0] * (dtype == torch.bfloat16))  # seconds for each rank
    ]
    for reduce_scatter in ways:
        for length in (50, 7):
            torch.manual_seed(length)
            gradients = torch.randn(ranks, ranks * length).to(dtype)
            sent = reduce_scatter.allocate((ranks * length,), dtype=torch.float32, device=cpu).copy_(gradients[rank])
            result = reduce_scatter.allocate((length,), dtype=torch.float32, device=cpu)
            reduce_scatter(result, sent, group, dist.ReduceOp.SUM)
            expected = torch.zeros(length)
            for gradient in gradients[:, rank * length : (rank + 1) * length]:
                expected += gradient.float()
            assert sent.dtype == dtype
            assert torch.equal(result, expected)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_travel_in_their_dtype_and_are_added_up_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also by compiled code, in the order of ranks."""
    run_processes(add_up, (3, tmp_path, dtype), 3)


def test_units_have_equal_parts_on_all_ranks() -> None:
    unit = nn.Linear(4, 7, device="meta")
    assert gathered_bytes(unit, 2, torch.bfloat16) == (8 * 4 + 8) * 2
    assert gathered_bytes(unit, 3, torch.float32) == (9 * 4 + 9) * 4
    assert gathered_bytes(unit, 1, torch.float32) == (7 * 4 + 7) * 4


def test_weights_that_are_gathered_in_fp8_take_a_byte() -> None:
    float8 = pytest.importorskip("torchao.float8")
    unit = nn.Sequential(nn.Linear(16, 32, bias=False), nn.LayerNorm(16, bias=False))
    float8.convert_to_float8_training(
        unit, config=float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    )
    assert gathered_bytes(unit, 2, torch.bfloat16) == 32 * 16 + 16 * 2
