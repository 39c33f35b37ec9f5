"""Weights that ranks copy into each other's memory: FSDP trains the same bits as with its own gather.

Files in shared memory stand in for the memory of GPUs that reach each other; streams and copy engines run on GPUs only
(tests/training/test_fsdp_units.py).
"""

import os
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import run_processes
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moba_train.parallel.weight_gather import BUFFERS, CopyEngineGather, SharedBuffer, unit_bytes

WIDTHS = [5, 7, 4, 9, 6, 8]


class SharedFiles:
    """Makes buffers of files in `folder`, and counts what is done with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self.sizes: list[int] = []
        self.barriers: list[int] = []

    def __call__(self, group: dist.ProcessGroup, _device: torch.device, size: int, _: timedelta) -> SharedBuffer:
        """A buffer, filled with ones, which are no sensible weights."""
        number = next(self._numbers)
        files = [str(self._folder / f"{number} of {rank}") for rank in range(group.size())]
        own = torch.from_file(files[group.rank()], shared=True, size=size, dtype=torch.uint8).fill_(255)
        dist.barrier(group)
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        theirs = {rank: torch.from_file(files[rank], shared=True, size=size, dtype=torch.uint8) for rank in others}
        self.sizes.append(size)

        def barrier(which: int) -> None:
            self.barriers.append(which)
            dist.barrier(group)

        return SharedBuffer(own, theirs, barrier)


def train(folder: Path | None, dtype: torch.dtype, reshard: bool) -> tuple[list[Tensor], SharedFiles | None]:
    """Losses and this rank's weights of a few steps, two micro-batches each, and of passes without gradients between;
    `folder`: where copied weights travel, None: by FSDP's own gather."""
    torch.manual_seed(1)
    layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in zip(WIDTHS, [*WIDTHS[1:], 3], strict=True)]
    model = nn.Sequential(*layers, nn.Linear(3, 2))
    group = dist.group.WORLD
    assert group is not None
    files = SharedFiles(folder) if folder else None
    size = max(unit_bytes(layer, group.size(), dtype) for layer in layers)
    gather = CopyEngineGather(group, torch.device("cpu"), size, timedelta(minutes=1), files) if files else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (*layers, model):
        fully_shard(unit, mp_policy=policy, reshard_after_forward=reshard)
        unit.set_force_sum_reduction_for_comms(True)
        if gather is not None and unit is not model:
            unit.set_custom_all_gather(gather)
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
    return found + [weight.detach().to_local() for weight in model.parameters()], files


def compare(rank: int, ranks: int, folder: Path, dtype: torch.dtype, reshard: bool) -> None:
    """Called on every rank."""
    os.environ |= {"MASTER_ADDR": "localhost"}
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    expected, _ = train(None, dtype, reshard)
    copied, files = train(folder, dtype, reshard)
    assert files is not None
    for one, other in zip(expected, copied, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
    assert len(files.sizes) == BUFFERS
    assert files.barriers[:2] == [0, 1]
    gathers = len(files.barriers) // 2
    assert gathers == len(WIDTHS) * 3 * (2 * 2 + 1 if reshard else 2)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "dtype", "reshard"),
    [(2, torch.float32, True), (3, torch.bfloat16, True), (2, torch.bfloat16, False)],
)
def test_fsdp_trains_the_same_bits(ranks: int, dtype: torch.dtype, reshard: bool, tmp_path: Path) -> None:
    run_processes(compare, (ranks, tmp_path, dtype, reshard), ranks)


def test_units_have_equal_parts_on_all_ranks() -> None:
    unit = nn.Linear(4, 7, device="meta")
    assert unit_bytes(unit, 2, torch.bfloat16) == (8 * 4 + 8) * 2
    assert unit_bytes(unit, 3, torch.float32) == (9 * 4 + 9) * 4
    assert unit_bytes(unit, 1, torch.float32) == (7 * 4 + 7) * 4


def test_weights_that_are_gathered_in_fp8_take_a_byte() -> None:
    float8 = pytest.importorskip("torchao.float8")
    unit = nn.Sequential(nn.Linear(16, 32, bias=False), nn.LayerNorm(16, bias=False))
    float8.convert_to_float8_training(
        unit, config=float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    )
    assert unit_bytes(unit, 2, torch.bfloat16) == 32 * 16 + 16 * 2
