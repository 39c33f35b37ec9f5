"""Process groups and a small FSDP2 model for the checkpoint tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.forked import run_processes


@contextmanager
def process_group(store: Path, rank: int = 0, world_size: int = 1, device: str = "cpu") -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable[..., None], store: Path, *args: Any, device: str = "cpu") -> None:
    """Runs `function(*args)` on `world_size` ranks in processes of their own; the first failure is raised."""
    run_processes(_run_rank, (world_size, function, store, device, args), world_size, device)


def _run_rank(
    rank: int, world_size: int, function: Callable[..., None], store: Path, device: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    with process_group(store, rank, world_size, device):
        function(*args)


def build(seed: int, tp: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model; 7 and 5 divide by no number of ranks, so that shards are uneven. With `tp` > 1 the columns of
    the first layer and the rows of the second are cut over so many ranks, and FSDP shards their parts over the rest."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 5), nn.LayerNorm(5)).to(own_device())
    mesh = init_device_mesh(own_device(), (dist.get_world_size() // tp, tp), mesh_dim_names=("shard", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=own_device() == "cuda")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Its batches come from the global random state."""
    for _ in range(steps):
        model(torch.randn(4, 8, device=own_device())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def own_device() -> str:
    """Where this rank's tensors belong."""
    return {"gloo": "cpu", "nccl": "cuda"}[dist.get_backend()]


def full_values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the unsharded values, without the per-rank random state."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to("cpu", copy=True)
        for name, tensor in tensors.items()
        if not name.startswith("rng.")
    }


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
