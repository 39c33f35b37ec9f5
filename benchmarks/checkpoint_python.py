"""How long the Python code of a background save blocks the training thread of its process.

    python -m benchmarks.checkpoint_python --output benchmarks/results/checkpoint-python-cpu.json

The tensors are as many as 32 layers and their AdamW states have, each of a few numbers, so that writing takes no time
and the save plan and bookkeeping take all of it. `save` is torch.distributed.checkpoint's own, `planned` is the one of
training after its first save. While a thread saves, the main thread issues small operations to torch, as training does.
The time in which it issues none is lost. In a real save, writing is spread over the minutes that the disk takes.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.record import save, spread
from moba_train.checkpoint.process_group import SaveGroup
from moba_train.checkpoint.writer import ShardFile, ShardWriter
from moba_train.optim.gradients import local_part

NAMES = ("q", "k", "v", "o", "gate", "up", "down", "attention_norm", "mlp_norm")
STATES = ("model", "exp_avg", "exp_avg_sq", "step")


def many_tensors(layers: int) -> dict[str, Tensor]:
    """Tensors sharded as by FSDP2."""
    mesh = init_device_mesh("cpu", (1,))
    return {
        f"{state}.{layer}.{name}": distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
        for state in STATES
        for layer in range(layers)
        for name in NAMES
    }


def operations_per_second(thread: threading.Thread | None, seconds: float = 1.0) -> tuple[float, float]:
    """(small operations per second while the thread runs or, without one, for `seconds`; the seconds it took)."""
    numbers = torch.ones(64, 64)
    count = 0
    began = time.perf_counter()
    while thread.is_alive() if thread else time.perf_counter() - began < seconds:
        for _ in range(20):
            numbers.mul_(1.0)
        count += 20
    took = time.perf_counter() - began
    return count / took, took


def measure(write: Callable[[Path], None], repeats: int) -> dict[str, Any]:
    """Spreads of the seconds of a save alone and while the main thread computes, and of the time that is lost."""
    alone: list[float] = []
    writing: list[float] = []
    overlapped: list[float] = []
    lost: list[float] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder, timed_writing(writing):
            began = time.perf_counter()
            write(Path(folder))
            alone.append(time.perf_counter() - began)
        quiet, _ = operations_per_second(None)
        with tempfile.TemporaryDirectory() as folder:
            thread = threading.Thread(target=write, args=(Path(folder),))
            thread.start()
            rate, took = operations_per_second(thread)
        overlapped.append(took)
        lost.append(took * (1 - rate / quiet))
    seconds = {"alone_s": alone, "of_it_writing_s": writing, "beside_operations_s": overlapped, "lost_s": lost}
    return {name: spread(values) for name, values in seconds.items()}


@contextmanager
def timed_writing(seconds: list[float]) -> Iterator[None]:
    """Record the seconds of each call that writes the tensors, by torch or by us."""

    def timed(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            written = write(*arguments)
            seconds.append(time.perf_counter() - began)
            return written

        return call

    with (
        mock.patch.object(dcp.FileSystemWriter, "write_data", timed(dcp.FileSystemWriter.write_data)),
        mock.patch.object(ShardFile, "write", timed(ShardFile.write)),
    ):
        yield


def write_planned(writer: ShardWriter, folder: Path, tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
    """Write as a save does after the first."""
    writer.plan(tensors, copies)
    writer.write(folder, copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = many_tensors(arguments.layers)
    copies = {name: local_part(tensor).clone() for name, tensor in tensors.items()}
    writer = ShardWriter(SaveGroup(dist.new_group(backend="gloo")))
    writer.plan(tensors, copies)
    ways: dict[str, Callable[[Path], None]] = {
        "save": lambda folder: dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder)),
        "planned": lambda folder: write_planned(writer, folder, tensors, copies),
    }
    results = {name: measure(write, arguments.repeats) for name, write in ways.items()}
    for name, result in results.items():
        print(name, {key: round(value["median"], 3) for key, value in result.items()})
    save(arguments.output, {"layers": arguments.layers, "tensors": len(tensors)}, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
