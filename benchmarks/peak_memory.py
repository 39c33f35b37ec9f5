"""What is in GPU memory when a run needs most of it, by the code that allocated it.

    torchrun --nproc-per-node 2 -m benchmarks.peak_memory --model llama3-8b --layers 16 \\
        --row 128K:moba-512-8:full:offload:cp2:warm1:steps1 --output benchmarks/results/peak-memory-128k-h100-x2.json

It trains a few steps of a row of `benchmarks.training`, or until memory ends, while torch records each allocation of
rank 0 with its Python stack. Printed beside it is what `moba-train plan` predicts, part by part. Recording slows the
host down.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.own_rank import own_rank, parse
from benchmarks.record import markdown, save
from benchmarks.trainer_run import planned_here
from benchmarks.training_rows import Row
from moba_train import train
from moba_train.memory.moments import MEMORY_PARTS

_ENTRIES = 2_000_000
"""Allocations that torch keeps; a step of 32 layers has some 30,000."""
_FRAMES = 4
"""Frames of a site that are kept, innermost first."""
_PLACES = {"moba_train/": "", "_fully_shard/": "fsdp/", "torch/optim/": "optim/", "torchinductor": "compiled/"}
"""Parts of a file's path by which a frame tells something, and what stands for all before."""
GIB = 2**30


class Site(NamedTuple):
    """Tensors that one place in the code allocated and that were alive at the peak."""

    frames: str
    size: int
    """Bytes of all of them."""
    tensors: int


def at_peak(trace: Sequence[Mapping[str, Any]]) -> list[Site]:
    """What is alive at the peak of a device's trace (`device_traces` of torch's memory snapshot), the largest first."""
    alive: dict[int, int] = {}
    total = highest = peak = 0
    for index, event in enumerate(trace):
        total += _change(event, alive)
        if total > highest:
            highest, peak = total, index
    sites: dict[str, list[int]] = {}
    places: dict[int, str] = {}
    alive = {}
    for event in trace[: peak + 1]:
        _change(event, alive)
        if event["action"] == "alloc":
            places[event["addr"]] = _place(event.get("frames", ()))
    for address, size in alive.items():
        sites.setdefault(places[address], []).append(size)
    return sorted((Site(place, sum(sizes), len(sizes)) for place, sizes in sites.items()), key=lambda site: -site.size)


def _change(event: Mapping[str, Any], alive: dict[int, int]) -> int:
    """Bytes by which an event changes what is alive, which it is entered in."""
    if event["action"] == "alloc":
        alive[event["addr"]] = event["size"]
        return int(event["size"])
    return -alive.pop(event["addr"], 0) if event["action"] == "free_completed" else 0


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frames that tell something, of our code and of torch's sharding, optimizers and compiled blocks."""
    found = [text for text in map(_told, frames) if text]
    if not found and frames:
        return f"{Path(frames[0]['filename']).name}:{frames[0]['line']}"
    return " < ".join(found[:_FRAMES]) or "unknown"


def _told(frame: Mapping[str, Any]) -> str:
    file = str(frame["filename"])
    for part, standing in _PLACES.items():
        if part in file:
            name = "" if part == "torchinductor" else file.rpartition(part)[2]
            return f"{standing}{name}:{frame['line']} {frame['name']}"
    return ""


def main() -> None:
    measure(*parse(__doc__, Row(warm=1, steps=1)))


def measure(row: Row, arguments: argparse.Namespace) -> None:
    """Train on this rank; rank 0 records, and prints and saves what it found."""
    with own_rank(row, arguments) as here:
        if here.rank == 0:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_ENTRIES)
        ended = ""
        try:
            code = train.main([str(here.recipe), *row.overrides])
            ended = f"status {code}" if code else ""
        except torch.OutOfMemoryError as error:
            ended = str(error)
        if here.rank == 0:
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            planned = planned_here(here.recipe, row.overrides, here.world).memory
            report(trace, asdict(planned), ended, arguments)


def report(
    trace: Sequence[Mapping[str, Any]], planned: Mapping[str, Any], ended: str, arguments: argparse.Namespace
) -> None:
    """Print and save the sites at the peak beside the plan; `ended`: why the run did not end well, if so."""
    sites = at_peak(trace)
    whole = sum(site.size for site in sites)
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    kept = [site._asdict() for site in sites[:60]]
    save(arguments.output, settings, {"peak_bytes": whole, "ended": ended, "predicted": planned, "sites": kept})
    parts = ", ".join(f"{part} {planned[part] / GIB:.2f}" for part in MEMORY_PARTS)
    total = sum(planned[part] for part in MEMORY_PARTS)
    print(f"\n{arguments.row}: {whole / GIB:.2f} GiB at the peak of rank 0{f' ({ended[:200]})' if ended else ''}")
    print(f"predicted: {total / GIB:.2f} ({planned['moment']}: {parts})\n")
    rows = [["GiB", "tensors", "allocated by"]]
    rows += [[f"{site.size / GIB:.2f}", str(site.tensors), site.frames] for site in sites[:40]]
    print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
