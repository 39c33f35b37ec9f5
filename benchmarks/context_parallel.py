"""Attention with the sequence sharded over ranks: time, efficiency, hidden communication and memory.

    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --output benchmarks/results/context-parallel-h200.json
    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --tokens 256K --attention 128/8 --transports ring

It runs forward and backward of one layer of Llama-3-8B's shape in bf16 on one document of random data. The time of a
call is that of its slowest rank. Its efficiency is its rate, in pairs of query and key per second and rank, relative to
one rank alone with its own sequence of up to --alone-up-to tokens. Communication alone is the transport with an
attention that computes nothing; attention alone is that of a rank's queries with all keys in its memory. Results are
compared row by row: up to --alone-up-to tokens with those of one rank that has the unsharded sequence, beyond with
those of the first transport. `--ring-ranks-per-node 4 1` measures the ring of four ranks twice: as inside a node,
where it attends to all keys at once, and as if every rank were a node, where it attends to one chunk after the other.
On a CPU sizes are tiny and only ratios are meaningful.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.options import length
from benchmarks.record import save, spread
from benchmarks.timing import queued
from moba_train.attention.engine import OperatorEngine
from moba_train.attention.full import FullAttention
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.observer import observed
from moba_train.attention.operators import AcrossRanks
from moba_train.attention.protocol import AttentionFacts, BackwardState, Gradients, LocalAttention, Selection
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.engine import ContextParallel, context_engine
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.policy import check_sizes, predict_cost, transport_spec
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy
from moba_train.parallel.world import World, joined_world

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TOY_HEADS, TOY_KV_HEADS, TOY_HEAD_DIM = 8, 4, 16


class Setting:
    """Ranks, shapes and repetitions of a run."""

    def __init__(self, world: World, repeats: int, warm_ups: int = 2) -> None:
        self.world = world
        self.device = world.device
        self.repeats = repeats
        self.warm_ups = warm_ups
        self.is_gpu = world.device.type == "cuda"
        sizes = (HEADS, KV_HEADS, HEAD_DIM) if self.is_gpu else (TOY_HEADS, TOY_KV_HEADS, TOY_HEAD_DIM)
        self.heads, self.kv_heads, self.head_dim = sizes
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self._engines: dict[CPStrategy, ContextParallel] = {}

    @cached_property
    def communicator(self) -> Communicator:
        """The communicator of all ranks."""
        return Communicator(self.group, self.device)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def engine(self, strategy: CPStrategy) -> ContextParallel:
        """The engine of a strategy, created once: communicators take memory."""
        if strategy not in self._engines:
            self._engines[strategy] = context_engine(strategy, self.group, self.device)
        return self._engines[strategy]

    def attention(self, name: str) -> LocalAttention:
        """`dense`, or MoBA as BLOCK/TOPK."""
        if name == "dense":
            return FullAttention(FullAttention.Options(), self.head_dim)
        block_size, topk = map(int, name.split("/"))
        return MobaAttention(MobaAttention.Options(block_size=block_size, topk=topk), self.head_dim)

    def inputs(self, tokens: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, dout."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return [
            torch.randn(tokens, heads, self.head_dim, dtype=self.dtype, device=self.device, generator=generator)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]

    def milliseconds(self, call: Callable[[], Any]) -> list[float]:
        """This rank's times of single calls, after warm-up. On a GPU the calls are queued, as in training; on a CPU all
        ranks start each call at the same time."""
        for _ in range(self.warm_ups):
            call()
        dist.barrier()
        if self.is_gpu:
            return queued(call, self.repeats)
        times = []
        for _ in range(self.repeats):
            dist.barrier()
            began = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - began))
        return times

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks."""
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, value)
        return gathered

    def slowest(self, call: Callable[[], Any]) -> dict[str, float]:
        """Median and spread of the time until the slowest rank is done."""
        return spread([max(times) for times in zip(*self.gather(self.milliseconds(call)), strict=True)])


class Nothing(FullAttention):
    """Full attention that computes nothing, so that only its transport takes time."""

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) with undefined contents."""
        return torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[1::-1], dtype=torch.float32)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) with undefined contents."""
        return torch.empty_like(state.q), torch.empty_like(state.k), torch.empty_like(state.v)


def both_passes(
    engine: OperatorEngine, attention: LocalAttention, inputs: list[Tensor], layout: Layout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward and backward: out, dq, dk, dv."""
    q, k, v, dout = inputs
    attention = observed(attention, engine.observers)
    if isinstance(engine, AcrossRanks):
        out, lse, selection = engine.forward(q, k, v, attention, layout)
        return out, *engine.backward(BackwardState(dout, q, k, v, out, lse), selection, attention, layout)
    selection = attention.select(q, attention.summarize(k, layout), layout)
    out, lse = attention.attend(q, k, v, layout, selection)
    return out, *attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)


def row_lengths(results: tuple[Tensor, ...]) -> list[Tensor]:
    """The Euclidean length of every row of each result."""
    return [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in results]


def differing_rows(
    setting: Setting, results: tuple[Tensor, ...], sequence: SequenceLayout, other: list[Tensor]
) -> float:
    """Fraction of all ranks' rows, in the order of the sequence, whose lengths differ from `other` by more than 5 %.

    An empty `other` is filled with these lengths.
    """
    gathered = []
    for mine in row_lengths(results):
        (shards,) = setting.communicator.all_gather(mine.contiguous()).wait()
        gathered.append(sequence.to_packed(shards))
    other[:] = other or gathered
    off = [((a - b).abs() > 0.05 * torch.maximum(a, b)).double().mean() for a, b in zip(gathered, other, strict=True)]
    return max(off).item()


def local_attention(
    attention: LocalAttention, inputs: list[Tensor], layout: Layout, rank: int, sequence: SequenceLayout
) -> None:
    """Attention of a rank's queries to all keys of the sequence, forward and backward, without communication."""
    q, dout = (sequence.shard(inputs[i], rank)[: sequence.tokens(rank)] for i in (0, 3))
    k, v = inputs[1:3]
    part = layout.part(sequence.ranges_of(rank), None)
    selection = attention.select(q, attention.summarize(k, layout.part(None, None)), part)
    out, lse = attention.attend(q, k, v, part, selection)
    attention.attend_backward(BackwardState(dout, q, k, v, out, lse), part, selection)


def pairs(name: str, tokens: int) -> float:
    """Pairs of query and key that one head attends to."""
    if name == "dense":
        return tokens * (tokens + 1) / 2
    block_size, topk = map(int, name.split("/"))
    token = torch.arange(tokens, dtype=torch.float64)
    history = (token // block_size).clamp(max=topk - 1).sum().item() * block_size
    return history + (token % block_size + 1).sum().item()


def measure(
    setting: Setting, strategy: CPStrategy, name: str, tokens: int, alone: dict[str, float], rows: list[Tensor]
) -> dict[str, Any]:
    """Measure one strategy with one attention at one length. `rows`: `other` of `differing_rows`."""
    engine = setting.engine(strategy)
    layout = packed_layout([tokens], setting.device)
    attention = setting.attention(name)
    sequence = engine.sequence(tokens)
    inputs = setting.inputs(tokens)
    shard = [sequence.shard(x, engine.rank) for x in inputs]
    if setting.is_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    total = setting.slowest(lambda: both_passes(engine, attention, shard, layout))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if setting.is_gpu else 0.0
    differing = differing_rows(setting, both_passes(engine, attention, shard, layout), sequence, rows)
    communication = setting.slowest(lambda: both_passes(engine, Nothing(Nothing.Options(), HEAD_DIM), shard, layout))
    group = {"ulysses": strategy.ranks, "hierarchical": strategy.node_size}.get(strategy.transport, 1)
    sequence = sequence.merge_ranks(group)
    rank = engine.rank // group
    inputs = [x[:, : max(1, x.shape[1] // group)].contiguous() for x in inputs]  # Ulysses: some heads, more tokens
    attention_alone = setting.slowest(lambda: local_attention(attention, inputs, layout, rank, sequence))
    hidden = communication["median"] + attention_alone["median"] - total["median"]
    rate = pairs(name, tokens) / strategy.ranks / total["median"]
    return {
        "attention": name,
        "tokens": tokens,
        "transport": strategy.transport,
        "layout": strategy.layout,
        "slices": strategy.slices if transport_spec(strategy.transport).uses_slices else None,
        "chunks_per_call": strategy.chunks_per_call if strategy.transport == "ring" else None,
        "ms": total,
        "efficiency": rate / (pairs(name, int(alone["tokens"])) / alone["ms"]),
        "communication_ms": communication,
        "attention_ms": attention_alone,
        "hidden_share": max(0.0, min(1.0, hidden / communication["median"])) if strategy.ranks > 1 else 1.0,
        "peak_gib": max(setting.gather(peak)),
        "differing_rows": differing,
        "predicted_communication_ms": 1000 * predicted(setting, strategy, tokens),
    }


def predicted(setting: Setting, strategy: CPStrategy, tokens: int) -> float:
    """Seconds of communication by the cost model of `auto`, with traffic between nodes over the links of this node."""
    shape = AttentionShape(tokens, setting.heads, setting.kv_heads, setting.head_dim, setting.dtype.itemsize)
    if strategy.transport not in ("hierarchical", "ring"):
        strategy = replace(strategy, node_size=strategy.ranks)
    found = predict_cost(strategy, shape)
    # What a ring sends between nodes, it sends over the links of both.
    across = found.network_bytes if strategy.transport == "hierarchical" else 0
    return replace(found, node_bytes=found.node_bytes + across, network_bytes=0).seconds()


def alone_rate(setting: Setting, name: str, tokens: int, limit: int) -> tuple[dict[str, float], list[Tensor]]:
    """Run every rank alone with an unsharded sequence of at most `limit` tokens.

    Returns ({tokens, ms of the slowest rank's median}, `row_lengths`); if `limit` is less than `tokens`, there are no
    row lengths.
    """
    complete = tokens <= limit
    tokens = min(tokens, limit)
    layout = packed_layout([tokens], setting.device)
    attention = setting.attention(name)
    inputs = setting.inputs(tokens)
    engine = OperatorEngine()
    times = setting.milliseconds(lambda: both_passes(engine, attention, inputs, layout))
    rows = row_lengths(both_passes(engine, attention, inputs, layout)) if complete else []
    return {"tokens": tokens, "ms": max(setting.gather(statistics.median(times)))}, rows


def strategies(
    setting: Setting, transports: list[str], layouts: list[str], node: int, ring_nodes: list[int], slices: list[int]
) -> list[CPStrategy]:
    """The strategies that these ranks and heads allow; `slices` applies to transports that gather, `ring_nodes` to the
    ring in place of `node`."""
    found = []
    for transport, layout in product(transports, layouts):
        nodes = ring_nodes if transport == "ring" else [node]
        for size, number in product(nodes, slices if transport_spec(transport).uses_slices else slices[:1]):
            strategy = CPStrategy(setting.world.size, transport, layout, size, slices=number)  # type: ignore[arg-type]
            try:
                check_sizes(strategy)
                transport_spec(transport).check_attention(strategy, setting.heads, setting.kv_heads, AttentionFacts())
            except ValueError as error:
                if setting.world.is_main:
                    print(f"skipped: {error}", flush=True)
                continue
            found.append(strategy)
    return found


def report(result: dict[str, Any]) -> None:
    """Print one result as one line."""
    name = f"{result['transport']}:{result['slices'] or result['chunks_per_call'] or ''}".rstrip(":")
    print(
        f"{result['attention']:>8} {result['tokens']:>8} {name:>14} {result['layout']:>10}: "
        f"{result['ms']['median']:9.2f} ms, {100 * result['efficiency']:5.1f} % of one rank's rate; communication "
        f"alone {result['communication_ms']['median']:8.2f} (predicted {result['predicted_communication_ms']:.2f}), "
        f"attention alone {result['attention_ms']['median']:9.2f}, hidden {100 * result['hidden_share']:3.0f} %; "
        f"peak {result['peak_gib']:.2f} GiB; rows that differ {100 * result['differing_rows']:.4f} %",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    transports = ["allgather", "ring", "ulysses", "hierarchical"]
    parser.add_argument("--transports", nargs="+", default=transports, choices=transports)
    parser.add_argument("--layouts", nargs="+", default=["contiguous", "zigzag"])
    parser.add_argument("--attention", nargs="+", default=["dense", "128/8", "4096/12"], help="dense or BLOCK/TOPK")
    parser.add_argument(
        "--tokens", nargs="+", type=length, help="tokens of the sequence (default: 64K 128K 256K, on a CPU 1K)"
    )
    parser.add_argument("--alone-up-to", type=length, default=2**18, help="longest sequence that one rank runs alone")
    parser.add_argument("--ranks-per-node", type=int, help="ranks in a node, for hierarchical (default: all)")
    parser.add_argument(
        "--ring-ranks-per-node", nargs="+", type=int, help="ranks in a node, for the ring (default: all)"
    )
    parser.add_argument("--slices", nargs="+", type=int, default=[CPStrategy.slices], help="slices of keys and values")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with joined_world() as world:
        setting = Setting(world, arguments.repeats, arguments.warm_ups)
        lengths = arguments.tokens or ([2**16, 2**17, 2**18] if setting.is_gpu else [1024])
        node = arguments.ranks_per_node or world.size
        ring_nodes = arguments.ring_ranks_per_node or [world.size]
        results = []
        for name in arguments.attention:
            for tokens in lengths:
                alone, rows = alone_rate(setting, name, tokens, arguments.alone_up_to)
                for strategy in strategies(
                    setting, arguments.transports, arguments.layouts, node, ring_nodes, arguments.slices
                ):
                    results.append(measure(setting, strategy, name, tokens, alone, rows))
                    if world.is_main:
                        report(results[-1])
                        if arguments.output:
                            settings: dict[str, Any] = {
                                "ranks": world.size,
                                "heads": setting.heads,
                                "kv_heads": setting.kv_heads,
                            }
                            settings |= {"head_dim": setting.head_dim, "dtype": str(setting.dtype)}
                            save(arguments.output, settings, results)


if __name__ == "__main__":
    main()
