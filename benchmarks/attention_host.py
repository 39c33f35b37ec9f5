"""The host's share of MoBA: launches, host time and GPU time of one layer's forward and backward pass.

    python -m benchmarks.attention_host --output benchmarks/results/attention-host-h200.json
    torchrun --nproc-per-node 2 -m benchmarks.attention_host --rows 32K:512/8 --output ...   # all transports
    python -m benchmarks.attention_host --rows 8K:512/3 --profile                            # each launch by name

Shape of Llama-3-8B's attention, bf16: by the attention's own functions, by the differentiable operator, and by the
operator under torch.compile. `rank of 4` is what one of four ranks does with its quarter of the tokens, all-gather;
what the others would send are copies on this GPU. The layout is made once, as for the layers of a step; `first` is the
host's time for the first of these layers. Launches are what the GPU ran: kernels, copies and fills. Host time is that
of a call that does not wait for the GPU, which is idle when it begins; `waited` ends when the GPU is done, `queued` is
the time from call to call when 10 are queued back to back, `kernels` the sum of what the GPU ran.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention_rows import Case, Row, compile_ahead
from benchmarks.context_parallel import Setting, both_passes, strategies
from benchmarks.options import need_gpus
from benchmarks.record import save
from benchmarks.timing import queued
from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.layout import Layout, packed_layout
from moba_train.parallel.context.comm import Communicator, Work
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.world import joined_world

ROWS = ["8K:512/3", "32K:512/3,documents=16x2K", "32K:512/3", "32K:128/8", "64K:128/8"]
RANK_ROWS = ["64K:512/8"]
RANKS = 4
QUEUED = 10
Calls = Iterator[tuple[str, Callable[[Layout], Any], Callable[[], Layout]]]
"""Names, calls on a layout, and what makes a new layout."""


def local_calls(names: list[str]) -> Calls:
    """The local functions, the differentiable operator around them, and this operator compiled, of every row."""
    for name in names:
        row = Row(Case.parse(name), backend="auto")
        for x in (row.q, row.k, row.v):
            x.requires_grad_()
        yield f"{name} functions", partial(both, row), row.layout
        yield f"{name} operator", partial(operator, row, LOCAL_ENGINE), row.layout
        torch.compiler.reset()
        yield (
            f"{name} compiled",
            partial(operator, row, torch.compile(LOCAL_ENGINE.__call__, fullgraph=True)),
            row.layout,
        )


def rank_calls(names: list[str], setting: Setting) -> Calls:
    """One rank's share of every row's tokens, by the engine's functions."""
    strategy = CPStrategy(RANKS, "allgather", "zigzag", RANKS)
    engine = ContextParallel(strategy, AllGather(LoneRank(1, RANKS, setting.device), strategy.slices))
    for name in names:
        case = Case.parse(name)
        sequence = engine.sequence(case.tokens)
        shard = [sequence.shard(x, engine.rank) for x in setting.inputs(case.tokens)]
        call = partial(both_passes, engine, setting.attention(f"{case.block_size}/{case.topk}"), shard)
        yield f"{name} rank of {RANKS}", call, partial(packed_layout, case.lengths(), setting.device)


class LoneRank(Communicator):
    """One of several ranks, without the others: it receives copies of what it sends, in as many launches."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def all_gather(self, *shards_L: Tensor) -> Work:
        """Each tensor, as often as there are ranks."""
        gathered = tuple(x.new_empty(self.size, *x.shape) for x in shards_L)

        def call() -> None:
            for gathered_RLx, shard_L in zip(gathered, shards_L, strict=True):
                gathered_RLx.copy_(shard_L.expand_as(gathered_RLx))

        return self._start("all_gather", call, shards_L, tuple(x.flatten(0, 1) for x in gathered))

    def all_to_all(self, *parts_RL: Tensor) -> Work:
        """The tensors themselves."""
        received = tuple(torch.empty_like(x) for x in parts_RL)

        def call() -> None:
            for received_RL, sent_RL in zip(received, parts_RL, strict=True):
                received_RL.copy_(sent_RL)

        return self._start("all_to_all", call, parts_RL, received)

    def all_to_all_uneven(self, x: Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Tensor:
        """Zeros."""
        return x.new_zeros(sum(received_rows), *x.shape[1:])

    def all_reduce(self, x: Tensor) -> None:
        """As if the others had zeros."""


@torch.no_grad()
def both(row: Row, layout: Layout) -> Any:
    """Forward and backward by the attention's own functions."""
    return both_passes(LOCAL_ENGINE, row.attention, [row.q, row.k, row.v, row.dout], layout)


def operator(row: Row, engine: Callable[..., tuple[Tensor, Tensor]], layout: Layout) -> Any:
    """Forward and backward by the differentiable operator."""
    out, _ = engine(row.q, row.k, row.v, row.attention, layout)
    return torch.autograd.grad(out, (row.q, row.k, row.v), row.dout)


def sharded_calls(names: list[str], setting: Setting, transports: list[str]) -> Calls:
    """Every transport on every row's tokens; one document."""
    for name in names:
        case = Case.parse(name)
        attention = setting.attention(f"{case.block_size}/{case.topk}")
        for strategy in strategies(setting, transports, ["zigzag"], setting.world.size, [setting.world.size], [1]):
            engine = setting.engine(strategy)
            sequence = engine.sequence(case.tokens)
            shard = [sequence.shard(x, engine.rank) for x in setting.inputs(case.tokens)]
            call = partial(both_passes, engine, attention, shard)
            make = partial(packed_layout, case.lengths(), setting.device)
            yield f"{name} {strategy.transport} x{setting.world.size}", call, make


def wait() -> None:
    """Until all ranks' GPUs are idle."""
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
        torch.cuda.synchronize()


def host_ms(call: Callable[[], Any], repeats: int, waited: bool = False) -> float:
    """Median milliseconds until `call` returns, or until the GPU is done."""
    times = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        result = call()
        if waited:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
        del result
    return statistics.median(times)


def launches(call: Callable[[], Any]) -> tuple[Counter[str], dict[str, float]]:
    """How often each kernel, copy or fill ran in one call, and its milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):  # the first profile of a process misses launches
        wait()
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times: Counter[str] = Counter()
    for event in events:
        times[event.name] += event.device_time_total / 1000
    return Counter(event.name for event in events), dict(times)


def measure(call: Callable[[Layout], Any], make: Callable[[], Layout], repeats: int) -> dict[str, Any]:
    """All numbers of one call."""
    layout = make()
    for _ in range(3):
        call(layout)
    layouts = [make() for _ in range(5)]
    first = statistics.median(host_ms(partial(call, new), 1) for new in layouts)
    counts, times = launches(lambda: call(layout))
    return {
        "launches": sum(counts.values()),
        "host_ms": host_ms(lambda: call(layout), repeats),
        "first_ms": first,
        "waited_ms": host_ms(lambda: call(layout), repeats, waited=True),
        "queued_ms": statistics.median(queued(lambda: call(layout), QUEUED)),
        "kernels_ms": sum(times.values()),
        "by_name": {name: [counts[name], times[name]] for name in sorted(counts, key=lambda name: -times[name])},
    }


def show_profile(call: Callable[[], Any], found: dict[str, Any]) -> None:
    """Each launch by name, and where the host's time goes."""
    for name, (count, ms) in found["by_name"].items():
        print(f"    {count:4} x {1000 * ms / count:8.1f} us  {name[:110]}")
    profile = cProfile.Profile()
    wait()
    profile.enable()
    for _ in range(10):
        call()
    profile.disable()
    wait()
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, help="as benchmarks.attention takes them")
    parser.add_argument("--rank-rows", nargs="*", default=RANK_ROWS, help=f"rows of which one of {RANKS} ranks is run")
    parser.add_argument("--transports", nargs="+", default=["allgather", "ring", "ulysses"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="every launch by name, and the host's functions")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    with joined_world() as world:
        shared = world.size > 1
        if not shared:
            compile_ahead([Case.parse(name) for name in (*arguments.rows, *arguments.rank_rows)])
        setting = Setting(world, arguments.repeats)
        if shared:
            calls = sharded_calls(arguments.rows, setting, arguments.transports)
        else:
            calls = chain(local_calls(arguments.rows), rank_calls(arguments.rank_rows, setting))
        results = []
        for name, call, make in calls:
            found = measure(call, make, arguments.repeats)
            results.append({"call": name, **found})
            if world.is_main and arguments.output:
                save(arguments.output, {"repeats": arguments.repeats, "ranks": world.size}, results)
            if not world.is_main:
                if arguments.profile:
                    layout = make()
                    for _ in range(10):
                        call(layout)
                    wait()
                continue
            keys = ("host_ms", "first_ms", "waited_ms", "queued_ms", "kernels_ms")
            numbers = ", ".join(f"{key.removesuffix('_ms')} {found[key]:.2f}" for key in keys)
            print(f"{name}: {found['launches']} launches; ms: {numbers}", flush=True)
            if arguments.profile:
                layout = make()
                show_profile(partial(call, layout), found)


if __name__ == "__main__":
    main()
