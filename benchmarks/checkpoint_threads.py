"""What the threads of one rank gain when a checkpoint is saved, verified and loaded.

    TMPDIR=/dev/shm python -m benchmarks.checkpoint_threads --gib 2 --threads 1 2 \\
        --output benchmarks/results/checkpoint-threads-cpu.json

By the code of training, with tensors of random numbers, on a GPU where there is one: writing them to $TMPDIR, with
their hashes and fsync; then, with other tensors, verifying hashes and reading. The code is told that the machine
has two cores for each thread, so that it starts that many.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import markdown, save, spread
from moba_train.checkpoint.files import MOST_THREADS
from moba_train.checkpoint.load import load_checkpoint
from moba_train.checkpoint.manifest import step_name, verify_checkpoint
from moba_train.checkpoint.process_group import SaveGroup
from moba_train.checkpoint.publish import publish
from moba_train.checkpoint.writer import ShardWriter, write_meta

PARTS = ("write", "verify", "read")


def measure(threads: int, tensors: dict[str, Tensor], folder: Path) -> dict[str, float]:
    """Seconds of each part with so many threads, and the number of `files` that hold tensors."""
    took: dict[str, float] = {}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        took[part] = time.perf_counter() - began

    written, step = folder / "written", 1
    written.mkdir()
    copies = {name: tensor.cpu() for name, tensor in tensors.items()}
    cores = range(2 * threads)
    told = {"cpu_count": mock.Mock(return_value=len(cores)), "sched_getaffinity": mock.Mock(return_value=cores)}
    with mock.patch.multiple(os, **told):
        writer = ShardWriter(SaveGroup(dist.new_group(backend="gloo")))
        writer.plan(tensors, copies)
        with timed("write"):
            entries = writer.write(written, copies)
        publish(written, step, entries | write_meta(written, {"good": True}))
        path, loaded = folder / step_name(step), {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        with timed("verify"):
            verify_checkpoint(path)
        with timed("read"):
            load_checkpoint(path, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    return took | {"files": len(list(path.glob("*.safetensors")))}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each number of threads: GiB/s of each part over all repeats."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    many = round(arguments.gib * 2**30 / (arguments.tensor_mib * 2**20))
    tensors = {f"weight.{number}": torch.randn(arguments.tensor_mib * 2**18, device=device) for number in range(many)}
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
    found: dict[int, list[dict[str, float]]] = {threads: [] for threads in arguments.threads}
    for _ in range(arguments.repeats):
        for threads, repeats in found.items():  # by turns: the machine may be busy for a while
            with tempfile.TemporaryDirectory() as folder:
                repeats.append(measure(threads, tensors, Path(folder)))
    return [
        {"threads": threads, "files": repeats[0]["files"], "gib": size}
        | {f"{part}_gib_per_s": spread([size / repeat[part] for repeat in repeats]) for part in PARTS}
        for threads, repeats in found.items()
    ]


def table(results: Sequence[dict[str, Any]]) -> str:
    """GiB/s of each part by threads as a Markdown table; medians."""
    lines = [["GiB/s", *(f"threads: {result['threads']}" for result in results)]]
    for part in PARTS:
        lines.append([part, *(f"{result[f'{part}_gib_per_s']['median']:.2f}" for result in results)])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2, help="size of the checkpoint; a thread takes at least 1 GiB")
    parser.add_argument("--tensor-mib", type=int, default=32, help="size of a tensor")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help=f"of each turn, at most {MOST_THREADS}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if not set(arguments.threads) <= set(range(1, MOST_THREADS + 1)):
        parser.error(f"--threads: {arguments.threads} given, 1 to {MOST_THREADS} allowed")
    torch.set_num_threads(1)  # as torchrun does
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        results = run(arguments)
        dist.destroy_process_group()
    save(arguments.output, {key: value for key, value in vars(arguments).items() if key != "output"}, results)
    print(table(results))


if __name__ == "__main__":
    main()
