"""What would be gained if context parallelism's transfers ran on copy engines beside attention, in place of NCCL.

    torchrun --nproc-per-node 4 -m benchmarks.copy_engines --output benchmarks/results/copy-engines-h200-x4.json

A layer under `cp_transport: allgather` moves every rank's keys and values three times: gathered for the forward and for
the backward pass, and as gradients to their owners. Here three gathers of that size, of one layer of Llama-3-8B's
shape, run alone, before the attention of a rank's own tokens (forward and backward), and beside it, which is the most
that any order of calls could hide. Ways:

    all_gather    NCCL's collective, as the transport takes it: its kernels occupy multiprocessors
    ring          the same by messages between neighbours
    push, pull    copy engines: a stream for each peer copies into, or out of, torch's symmetric memory, between two
                  barriers; without NVLink multicast

All ways must gather the same bits. Times in ms are of the slowest rank.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.context_parallel import HEAD_DIM, KV_HEADS, Setting, both_passes
from benchmarks.options import length, need_gpus
from benchmarks.record import markdown, save
from moba_train.attention.engine import OperatorEngine
from moba_train.attention.layout import packed_layout
from moba_train.parallel.context.comm import Work
from moba_train.parallel.transfers import symmetric_memory
from moba_train.parallel.world import joined_world

TRANSFERS = 3
Gather = Callable[[Tensor], Work]
"""From this rank's rows to all ranks' rows, one after the other."""


class CopyEngines:
    """Gathers by copies between the GPUs' memory; one tensor shape, whose result the next gather overwrites."""

    def __init__(self, group: dist.ProcessGroup, shard: Tensor, push: bool) -> None:
        """A collective. push: ranks write into the others' memory; else they read from it."""
        self._rank, ranks = group.rank(), group.size()
        self._push = push
        size = ranks * shard.numel() * shard.element_size()
        buffer = symmetric_memory(group, shard.device, size, timedelta(minutes=1))
        self._gathered, *theirs = (
            memory.view(shard.dtype).view(ranks, *shard.shape) for memory in (buffer.own, *buffer.theirs.values())
        )
        self._theirs = dict(zip(buffer.theirs, theirs, strict=True))
        self._barrier = buffer.barrier
        self._main = torch.cuda.Stream(priority=-1)
        self._streams = [torch.cuda.Stream(priority=-1) for _ in theirs]

    def __call__(self, shard: Tensor) -> Work:
        """Begin to gather; all ranks' rows [R, ...] are there when the work is waited for."""
        self._main.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._main):
            if not self._push:
                self._gathered[self._rank].copy_(shard)
            self._barrier(0)  # all ranks have read the last result, and what is pulled is there
            if self._push:
                self._gathered[self._rank].copy_(shard)
        for stream, (peer, theirs) in zip(self._streams, self._theirs.items(), strict=True):
            stream.wait_stream(self._main)
            with torch.cuda.stream(stream):
                if self._push:
                    theirs[self._rank].copy_(shard)
                else:
                    self._gathered[peer].copy_(theirs[peer])
        with torch.cuda.stream(self._main):
            for stream in self._streams:
                self._main.wait_stream(stream)
            self._barrier(1)
            return Work((self._gathered,), self._main.record_event(), (shard,))


def measure(setting: Setting, gather: Gather, shard: Tensor, attention: Callable[[], Any]) -> dict[str, Any]:
    """Times of a layer's transfers alone, before attention and beside it."""

    def transfers() -> None:
        for _ in range(TRANSFERS):
            gather(shard).wait()

    def before() -> None:
        transfers()
        attention()

    def beside() -> None:
        """The transfers wait for each other, attention for none of them."""
        works = [gather(shard) for _ in range(TRANSFERS)]
        attention()
        for work in works:
            work.wait()

    found = {name: setting.slowest(call) for name, call in (("alone", transfers), ("before", before))}
    found["beside"] = setting.slowest(beside)
    received = TRANSFERS * (setting.world.size - 1) * shard.numel() * shard.element_size()
    return {"ms": found, "received_gb_per_s": received / found["alone"]["median"] / 1e6}


def table(attention_ms: float, results: dict[str, dict[str, Any]]) -> str:
    """All ways; `lost`: what is not hidden, beside the attention alone."""
    rows = [["way", "transfers alone, ms", "GB/s", "before attention", "beside attention", "lost beside"]]
    for name, result in results.items():
        alone, before, beside = (result["ms"][key]["median"] for key in ("alone", "before", "beside"))
        numbers = [f"{number:.2f}" for number in (alone, before, beside, beside - attention_ms)]
        rows.append([name, numbers[0], f"{result['received_gb_per_s']:.0f}", *numbers[1:]])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=length, default=2**18, help="of all ranks together")
    parser.add_argument("--attention", default="512/8", help="dense or BLOCK/TOPK")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser, int(os.environ.get("LOCAL_WORLD_SIZE", "2")))
    with joined_world() as world:
        setting = Setting(world, arguments.repeats)
        tokens = arguments.tokens // world.size
        inputs = setting.inputs(tokens, seed=world.rank)
        layout, engine = packed_layout([tokens], setting.device), OperatorEngine()
        kind = setting.attention(arguments.attention)
        shard = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device=setting.device).to(setting.dtype)
        ways: dict[str, Gather] = {
            "all_gather": setting.communicator.all_gather,
            "ring": setting.communicator.all_gather_by_ring,
            "push": CopyEngines(setting.group, shard, push=True),
            "pull": CopyEngines(setting.group, shard, push=False),
        }
        expected: Tensor | None = None
        for name, gather in ways.items():
            rows = gather(shard).wait()[0].view(world.size, *shard.shape)
            expected = rows.clone() if expected is None else expected
            if not torch.equal(rows, expected):
                raise SystemExit(f"{name} has gathered other bits than all_gather on rank {world.rank}")

        def attention() -> None:
            both_passes(engine, kind, inputs, layout)

        alone = setting.slowest(attention)
        results = {name: measure(setting, gather, shard, attention) for name, gather in ways.items()}
        again = setting.slowest(attention)
        attention_ms = statistics.mean((alone["median"], again["median"]))
        if world.is_main:
            print(f"attention alone: {attention_ms:.2f} ms\n{table(attention_ms, results)}", flush=True)
            if arguments.output:
                settings = {"ranks": world.size, "tokens": arguments.tokens, "attention": arguments.attention}
                settings |= {"repeats": arguments.repeats, "transfers": TRANSFERS}
                save(arguments.output, settings, {"attention_ms": [alone, again], "ways": results})


if __name__ == "__main__":
    main()
