"""Does an attention sink slow ranks down? MoBA over a sharded sequence, with queries routed to prescribed blocks.

    torchrun --nproc-per-node 4 -m benchmarks.context_skew --output benchmarks/results/context-skew-h200.json

Routing: with `sink` all queries select the first blocks, with `uniform` any, with `local` those just before them.
Busy time is the time of a rank's attention, from the first to the last kernel of every call. Limits: max/mean <= 1.10
over ranks, and sink/uniform <= 1.15 for the step time. `ring:2` has two buffers: with four ranks or more it attends to
one chunk after the other. `lockstep` is a negative control: a ring that sends a chunk on only after attention to it, so
that every step takes as long as its busiest rank. `dispatch` is another: queries travel
to the owners of keys, so that the owner of the first blocks has all the work under a sink, and the queries of all ranks
in its memory.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.context_parallel import Setting, both_passes
from benchmarks.options import length
from benchmarks.record import save, spread
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.observer import AttentionTimer
from moba_train.attention.protocol import Layout, packed_layout
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.base import ShardedCall
from moba_train.parallel.context.transport.ring import ArrivedChunks, Ring
from moba_train.parallel.world import joined_world

ROUTINGS = ("sink", "uniform", "local")
STRENGTH = 16.0


class LockstepRing(Ring):
    """The negative control: sends a chunk on only after attention to it."""

    def _arriving(self, k_LKD: Tensor, v_LKD: Tensor, call: ShardedCall) -> Iterator[ArrivedChunks]:
        chunk_2LKD = torch.stack([k_LKD, v_LKD])
        for step in range(self.communicator.size):
            yield self._copied(range(step, step + 1), [chunk_2LKD], call)
            if step + 1 < self.communicator.size:
                (chunk_2LKD,) = self.communicator.send_recv(chunk_2LKD, torch.empty_like(chunk_2LKD), 1).wait()


def routed(setting: Setting, routing: str, tokens: int, block_size: int, topk: int) -> list[Tensor]:
    """q, k, v, dout for which MoBA's gate selects blocks as `routing` says."""
    q, k, v, dout = setting.inputs(tokens)
    if routing == "sink":
        q[..., 0] += STRENGTH
        k[: (topk - 1) * block_size, :, 0] += STRENGTH
    elif routing == "local":  # a direction that turns by half a circle along the sequence
        angle = torch.linspace(0, math.pi, tokens, device=setting.device)
        for x in (q, k):
            x[..., 0] += STRENGTH * angle.cos()[:, None]
            x[..., 1] += STRENGTH * angle.sin()[:, None]
    return [q, k, v, dout]


def history_blocks(engine: ContextParallel, attention: MobaAttention, shard: list[Tensor], layout: Layout) -> Tensor:
    """The history blocks that this rank's queries selected, one number for each query, head and block."""
    q, k, v, _ = shard
    *_, selection = engine.forward(q, k, v, engine.call(attention, layout))
    selected = torch.cat([x.flatten() for x in selection if x.dim() == 3])
    return selected[selected >= 0].long()


def first_blocks_fraction(history: Tensor, topk: int) -> float:
    """Fraction of selected history blocks that are among the first `topk - 1` blocks."""
    return (history < topk - 1).double().mean().item() if history.numel() else 0.0


def blocks_by_owner(history: Tensor, sequence: SequenceLayout, block_size: int) -> list[int]:
    """How many of the selected history blocks each rank owns, all of one document."""
    owners = [sequence.owner(token) for token in range(0, sequence.total, block_size)]
    return torch.tensor(owners, device=history.device)[history].bincount(minlength=sequence.ranks).tolist()


def measure(setting: Setting, name: str, cp_layout: str, tokens: int, block_size: int, topk: int) -> dict[str, Any]:
    """Measure all routings with one transport."""
    size = setting.world.size
    if name == "lockstep":
        strategy = CPStrategy(size, "ring", cp_layout, size)  # type: ignore[arg-type]  # argparse checks
        engine = ContextParallel(strategy, LockstepRing(Communicator(setting.group, setting.device), width=1))
    else:
        transport, _, depth = name.partition(":")
        strategy = CPStrategy(size, transport, cp_layout, size, int(depth) if depth else None)  # type: ignore[arg-type]
        engine = setting.engine(strategy)
    layout = packed_layout([tokens], setting.device)
    sequence = engine.sequence(tokens)
    result: dict[str, Any] = {"transport": name, "layout": cp_layout}
    for routing in ROUTINGS:
        attention = MobaAttention(MobaAttention.Options(block_size=block_size, topk=topk), setting.head_dim)
        shard = [sequence.shard(x, engine.rank) for x in routed(setting, routing, tokens, block_size, topk)]
        history = history_blocks(engine, attention, shard, layout)
        fraction = first_blocks_fraction(history, topk)
        owned = torch.tensor(setting.gather(blocks_by_owner(history, sequence, block_size))).sum(0)
        del history  # so that it counts in no peak
        both_passes(engine, attention, shard, layout)
        before = torch.cuda.memory_allocated() if setting.is_gpu else 0
        if setting.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        with engine.observe(AttentionTimer(setting.device)) as timer:
            times = setting.milliseconds(lambda: both_passes(engine, attention, shard, layout))  # noqa: B023  # called at once
        busy = setting.gather(1000 * timer.seconds() / (setting.repeats + setting.warm_ups))
        result[routing] = {
            "ms": spread([max(column) for column in zip(*setting.gather(times), strict=True)]),
            "busy_ms": busy,
            "busy_max_over_mean": max(busy) / (sum(busy) / len(busy)),
            "choices_among_first_blocks": setting.gather(fraction),
            "blocks_by_owner": (owned / owned.sum()).tolist(),
            "peak_gib": setting.gather((torch.cuda.max_memory_allocated() - before) / 2**30 if setting.is_gpu else 0.0),
        }
    result["sink_over_uniform"] = result["sink"]["ms"]["median"] / result["uniform"]["ms"]["median"]
    return result


def report(result: dict[str, Any]) -> None:
    """Print the result of one transport as one line."""
    cells = ", ".join(
        f"{name} {result[name]['ms']['median']:.2f} ms (busy max/mean {result[name]['busy_max_over_mean']:.2f})"
        for name in ROUTINGS
    )
    print(
        f"{result['transport']:>10} {result['layout']:>10}: {cells}; sink/uniform {result['sink_over_uniform']:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    transports = ["allgather", "ring", "ring:2", "ulysses", "dispatch", "lockstep"]
    parser.add_argument("--transports", nargs="+", default=transports, help="NAME, ring:BUFFERS or lockstep")
    parser.add_argument("--layouts", nargs="+", default=["contiguous"], choices=["contiguous", "zigzag"])
    parser.add_argument("--tokens", type=length, help="tokens of the sequence (default: 256K, on a CPU 2K)")
    parser.add_argument("--moba", help="BLOCK/TOPK (default: 512/8, on a CPU 32/4)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with joined_world() as world:
        setting = Setting(world, arguments.repeats)
        tokens = arguments.tokens or (2**18 if setting.is_gpu else 2048)
        moba = arguments.moba or ("512/8" if setting.is_gpu else "32/4")
        block_size, topk = map(int, moba.split("/"))
        results = []
        for layout in arguments.layouts:
            for name in arguments.transports:
                results.append(measure(setting, name, layout, tokens, block_size, topk))
                if world.is_main:
                    report(results[-1])
                    if arguments.output:
                        save(arguments.output, {"ranks": world.size, "tokens": tokens, "moba": moba}, results)


if __name__ == "__main__":
    main()
