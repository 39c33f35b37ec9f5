"""How long the Python of a save in the background keeps the training thread of its process from its turns.

    python -m benchmarks.checkpoint_python --output benchmarks/results/checkpoint-python-cpu.json

As many tensors as 32 layers and their AdamW states have, each of a few numbers, so that writing takes no time and
planning and bookkeeping all of it. `save` is torch.distributed.checkpoint's own, `planned` what training uses, after
its first save. While a thread saves, this one gives small operations to torch, as training does. Lost is the time in
which it came to none. In a real save the part called writing is spread over the minutes that the disk takes.
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
from moba_train.checkpoint.planned import PlannedWriter
from moba_train.checkpoint.rank_group import RankGroup
from moba_train.checkpoint.state import local_part

NAMES = ("q", "k", "v", "o", "gate", "up", "down", "attention_norm", "mlp_norm")
STATES = ("model", "exp_avg", "exp_avg_sq", "step")


def many_tensors(layers: int) -> dict[str, Tensor]:
    """Sharded as FSDP2 does it."""
    mesh = init_device_mesh("cpu", (1,))
    return {
        f"{state}.{layer}.{name}": distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
        for state in STATES
        for layer in range(layers)
        for name in NAMES
    }


def operations_per_second(thread: threading.Thread | None, seconds: float = 1.0) -> tuple[float, float]:
    """How many small operations come to their turn while the thread runs (or in so many seconds), and for how long."""
    numbers, began, count = torch.ones(64, 64), time.perf_counter(), 0
    while thread.is_alive() if thread else time.perf_counter() - began < seconds:
        for _ in range(20):
            numbers.mul_(1.0)
        count += 20
    took = time.perf_counter() - began
    return count / took, took


def measure(write: Callable[[Path], None], repeats: int) -> dict[str, Any]:
    alone, writing, beside, lost = [], list[float](), [], []
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
        beside.append(took)
        lost.append(took * (1 - rate / quiet))
    seconds = {"alone_s": alone, "of_it_writing_s": writing, "beside_operations_s": beside, "lost_s": lost}
    return {name: spread(values) for name, values in seconds.items()}


@contextmanager
def timed_writing(seconds: list[float]) -> Iterator[None]:
    """Note how long the calls take that write the tensors."""
    write_data = dcp.FileSystemWriter.write_data

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        written = write_data(*arguments)
        seconds.append(time.perf_counter() - began)
        return written

    with mock.patch.object(dcp.FileSystemWriter, "write_data", timed):
        yield


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
    writer = PlannedWriter(RankGroup(dist.new_group(backend="gloo")))
    writer.plan(tensors, copies)
    ways: dict[str, Callable[[Path], None]] = {
        "save": lambda folder: dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder)),
        "planned": lambda folder: writer.write(folder, tensors, copies),
    }
    results = {name: measure(write, arguments.repeats) for name, write in ways.items()}
    for name, result in results.items():
        print(name, {key: round(value["median"], 3) for key, value in result.items()})
    save(arguments.output, {"layers": arguments.layers, "tensors": len(tensors)}, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
