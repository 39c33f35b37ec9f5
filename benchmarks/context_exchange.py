"""What Ulysses' exchange costs, alone and beside attention, by what carries it: whether hiding it would pay.

    torchrun --nproc-per-node 4 -m benchmarks.context_exchange --output benchmarks/results/context-exchange-h200.json

A rank's queries are exchanged several times in a row: by NCCL's all-to-all, by messages in one group (what parallel/
context/comm.py does), and by the GPUs' copy engines (NCCL without thread blocks, between symmetric buffers; multicast
is not needed). Beside them runs the attention to one of a rank's two slices of heads, forward and backward.
`in_slices_ms`: that attention to all of a rank's heads, at once and in two slices, without transfers.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._symmetric_memory import rendezvous

from benchmarks.context_parallel import Setting, both_passes
from benchmarks.options import length, need_gpus
from benchmarks.record import save
from moba_train.attention.local import LocalEngine
from moba_train.attention.protocol import packed_layout
from moba_train.parallel.world import joined_world


def attention(setting: Setting, name: str, tokens: int, slices: int) -> list[Callable[[], object]]:
    """Both passes over a rank's share of the heads, a call for each slice of them."""
    layout, attend = packed_layout([tokens], setting.device), setting.attention(name)
    among = setting.world.size * slices

    def call(seed: int) -> Callable[[], object]:
        inputs = [x[:, : x.shape[1] // among].contiguous() for x in setting.inputs(tokens, seed)]
        return lambda: both_passes(LocalEngine(), attend, inputs, layout)

    return [call(seed) for seed in range(slices)]


def one_after_the_other(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


@dataclass(frozen=True)
class CopyEngines:
    """A group whose transfers take no multiprocessor, and two buffers that it can use."""

    group: dist.ProcessGroup
    pool: torch.cuda.MemPool
    """Of the buffers, which live as long as it does."""
    given: Tensor
    received: Tensor

    def exchange(self) -> None:
        """The r-th part of `given` to rank r."""
        dist.all_to_all_single(self.received, self.given, group=self.group)


def copy_engines(setting: Setting, sent: Tensor) -> CopyEngines:
    """With `sent` in its buffer."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    ranks = list(range(setting.world.size))
    group = dist.new_group(ranks, backend="nccl", pg_options=options, device_id=setting.device)
    dist.barrier(group)
    backend = group._get_backend(setting.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool, symm=True)
    with torch.cuda.use_mem_pool(pool):
        given, received = torch.empty_like(sent), torch.empty_like(sent)
    for buffer in (given, received):
        rendezvous(buffer, group=group.group_name)
    return CopyEngines(group, pool, given.copy_(sent), received)


def exchanges(setting: Setting, sent: Tensor, engines: CopyEngines) -> dict[str, Callable[[], object]]:
    """Ways to send the r-th part of `sent` to rank r, on the current stream."""
    received = torch.empty_like(sent)
    found = {
        "NCCL all-to-all": lambda: dist.all_to_all_single(received, sent),
        "NCCL messages in a group": lambda: setting.peers.all_to_all(sent).wait(),
        "copy engines": engines.exchange,
    }
    for call in found.values():
        call()
    (wanted,) = setting.peers.all_to_all(sent).wait()
    assert torch.equal(wanted, received)
    assert torch.equal(wanted, engines.received)
    return found


def measure(setting: Setting, call: Callable[[], object], times: int, load: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of so many exchanges alone, and of them and the attention beside each other."""
    stream = torch.cuda.Stream(setting.device, priority=-1)

    def exchange() -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(times):
                call()
            return stream.record_event(torch.cuda.Event(enable_timing=True))

    def alone() -> None:
        torch.cuda.current_stream().wait_event(exchange())

    marks: list[tuple[torch.cuda.Event, ...]] = []

    def beside() -> None:
        begin = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        exchanged = exchange()
        load()
        marks.append((begin, exchanged, torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))))
        torch.cuda.current_stream().wait_event(exchanged)

    found: dict[str, Any] = {"alone_ms": setting.slowest(alone), "beside_ms": setting.slowest(beside)}
    for i, name in enumerate(("exchange", "attention"), start=1):
        mine = statistics.median(mark[0].elapsed_time(mark[i]) for mark in marks[-setting.repeats :])
        found[f"{name}_beside_ms"] = max(setting.of_all_ranks(mine))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=length, default=2**18)
    parser.add_argument("--attention", default="512/8", help="BLOCK/TOPK")
    parser.add_argument("--times", type=int, default=8, help="exchanges in a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    with joined_world() as world:
        setting = Setting(world, arguments.repeats)
        by_slices = {slices: attention(setting, arguments.attention, arguments.tokens, slices) for slices in (1, 2)}
        in_slices = {n: setting.slowest(partial(one_after_the_other, calls)) for n, calls in by_slices.items()}
        load = by_slices[2][0]
        attention_ms = setting.slowest(load)
        sent = setting.inputs(arguments.tokens)[0][:, : setting.heads // world.size].contiguous()
        gigabytes = arguments.times * sent.nbytes * (1 - 1 / world.size) / 1e9
        rows = []
        engines = copy_engines(setting, sent)
        for means, call in exchanges(setting, sent, engines).items():
            row = {"means": means, **measure(setting, call, arguments.times, load)}
            rows.append(row | {"gb_per_s": 1000 * gigabytes / row["alone_ms"]["median"]})
            if world.is_main:
                print(
                    f"{means}: {row['alone_ms']['median']:.2f} ms alone ({rows[-1]['gb_per_s']:.0f} GB/s); beside "
                    f"attention {row['exchange_beside_ms']:.2f}, attention {row['attention_beside_ms']:.2f} "
                    f"(alone {attention_ms['median']:.2f}), both {row['beside_ms']['median']:.2f}"
                )
        if world.is_main:
            print(f"attention to all of a rank's heads at once and in two slices: {in_slices}")
            if arguments.output:
                settings = {"ranks": world.size, "tokens": arguments.tokens, "attention": arguments.attention}
                settings |= {"gigabytes_received": gigabytes, "times": arguments.times}
                results = {"exchanges": rows, "attention_ms": attention_ms, "in_slices_ms": in_slices}
                save(arguments.output, settings, results)


if __name__ == "__main__":
    main()
