"""What page-locked memory for the copies of a save takes: ours (moba_train/parallel/offload.py) beside torch's.

    python -m benchmarks.page_locked --model llama3-8b --ranks 4 --output benchmarks/results/page-locked-h200.json

One GPU. Each measurement has a process of its own, because torch keeps such memory: the tensors of one of `--ranks`
ranks, weights and AdamW's moments in float32, and then the rate of copies from the GPU into the largest. One turn is
not counted: a virtual machine may get its memory only when it is first used.
"""

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.trainer_run import model_shape
from moba_train.config.model import ModelConfig
from moba_train.model.transformer import Transformer
from moba_train.parallel.offload import PageLockedMemory

KINDS = ("torch", "ours")
COPIES = 16


def elements_of(model: str, ranks: int) -> list[int]:
    """Elements of each tensor of a checkpoint that one of so many ranks writes."""
    with torch.device("meta"):
        parameters = list(Transformer(ModelConfig.model_validate(model_shape(model))).parameters())
    return [-(-parameter.numel() // ranks) for parameter in parameters for _ in range(3)]


def measure(kind: str, sizes: list[int]) -> dict[str, float]:
    """GiB that are asked for, taken from the machine, seconds, and GB/s of copies from the GPU; in a fresh process."""
    source, memory = torch.zeros(max(sizes), device="cuda"), PageLockedMemory()
    torch.cuda.synchronize()
    before, began = memory_in_use(), time.perf_counter()
    buffers = [
        torch.empty(size, pin_memory=True)
        if kind == "torch"
        else memory.empty(4 * size, source.device).view(torch.float)
        for size in sizes
    ]
    taken_s, taken = time.perf_counter() - began, memory_in_use() - before
    largest = max(buffers, key=Tensor.numel)
    copy(source, largest)
    return {
        "gib": sum(buffer.nbytes for buffer in buffers) / 2**30,
        "taken_gib": taken / 2**30,
        "seconds": taken_s,
        "copy_gb_per_s": COPIES * largest.nbytes / copy(source, largest) / 1e9,
    }


def copy(source: Tensor, target: Tensor) -> float:
    """Seconds of COPIES copies."""
    began = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def memory_in_use() -> int:
    """Bytes of this machine's memory that are not free."""
    numbers = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    return 1024 * (numbers["MemTotal"] - numbers["MemFree"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="a file of configs/models")
    parser.add_argument("--ranks", type=int, default=4, help="that share a checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    need_gpus(parser)
    sizes = elements_of(arguments.model, arguments.ranks)
    turns = [(kind, sizes) for _ in range(arguments.repeats + 1) for kind in KINDS]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(measure, turns, chunksize=1)[len(KINDS) :]
    results = []
    for number, kind in enumerate(KINDS):
        repeats = found[number :: len(KINDS)]
        spreads = {name: spread([repeat[name] for repeat in repeats]) for name in repeats[0] if name != "gib"}
        results.append({"kind": kind, "tensors": len(sizes), "gib": repeats[0]["gib"], **spreads})
    settings = {"model": arguments.model, "ranks": arguments.ranks, "repeats": arguments.repeats}
    save(arguments.output, settings, results)
    print(table(results))


def table(results: list[dict[str, Any]]) -> str:
    """The medians as a Markdown table."""
    lines = [["", "asked for, GiB", "taken, GiB", "seconds", "copies from the GPU, GB/s"]]
    for result in results:
        medians = [result[name]["median"] for name in ("taken_gib", "seconds", "copy_gb_per_s")]
        lines.append([result["kind"], *(f"{value:.1f}" for value in (result["gib"], *medians))])
    return markdown(lines)


if __name__ == "__main__":
    main()
