"""A timeline of one rank's GPU during forward and backward: attention on one stream, communication on the others.

torchrun --nproc-per-node 4 -m benchmarks.context_timeline --tokens 128K --attention dense --output timeline.json
python -m benchmarks.pictures context-timeline --results timeline.json --output timeline.svg
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.context_parallel import Setting, both_passes
from benchmarks.options import length, need_gpus
from benchmarks.plotting import BLUE, INK, PURPLE, name
from benchmarks.record import save
from moba_train.attention.layout import packed_layout
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.world import joined_world

Bar = tuple[float, float]
"""(start, duration) in ms."""


def bars(trace: dict[str, Any]) -> dict[str, list[Bar]]:
    """Bars of attention and communication kernels in a profiler's trace, relative to its first kernel."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    first = min(event["ts"] for event in kernels)
    found: dict[str, list[Bar]] = {"attention": [], "communication": []}
    for event in sorted(kernels, key=lambda event: event["ts"]):
        kind = "communication" if "nccl" in event["name"].lower() else "attention"
        found[kind].append(((event["ts"] - first) / 1000, event["dur"] / 1000))
    return found


def joined(intervals: list[Bar], gap_ms: float = 0.02) -> list[Bar]:
    """Join bars that are less than `gap_ms` apart, which a plot cannot show."""
    result: list[Bar] = []
    for start, duration in intervals:
        if result and start <= sum(result[-1]) + gap_ms:
            begin, length = result[-1]
            result[-1] = (begin, max(length, start + duration - begin))
        else:
            result.append((start, duration))
    return result


def covered(ours: list[Bar], by: list[Bar]) -> float:
    """Fraction of the time of `ours` during which a bar of `by` runs, too."""
    total = sum(duration for _, duration in ours)
    both = sum(max(0.0, min(a + la, b + lb) - max(a, b)) for a, la in joined(ours, 0.0) for b, lb in joined(by, 0.0))
    return both / total if total else 1.0


def record(setting: Setting, transport: str, layout: str, name: str, tokens: int) -> dict[str, Any]:
    """Profile one call, after two calls of warm-up."""
    strategy = CPStrategy(setting.world.size, transport, layout, setting.world.size)  # type: ignore[arg-type]  # from the options
    engine = setting.engine(strategy)
    packed = packed_layout([tokens], setting.device)
    attention = setting.attention(name)
    sequence = engine.sequence(tokens)
    shard = [sequence.shard(x, engine.rank) for x in setting.inputs(tokens)]
    for _ in range(2):
        both_passes(engine, attention, shard, packed)
    torch.distributed.barrier()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both_passes(engine, attention, shard, packed)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        found = bars(json.loads(Path(f"{folder}/trace.json").read_text()))
    hidden = covered(found["communication"], found["attention"])
    return {
        "transport": transport,
        "layout": layout,
        "attention": name,
        "tokens": tokens,
        "hidden_share": hidden,
        "bars": {kind: joined(intervals) for kind, intervals in found.items()},
    }


COLOURS = {"communication": BLUE, "attention": PURPLE}
LABELS = {"dense": "full attention"}


def draw(figure: Figure, content: dict[str, Any]) -> None:
    """A panel for each attention, in it a strip for each transport, with the share of its communication that attention
    hides."""
    attentions: dict[str, list[dict[str, Any]]] = {}
    for result in content["results"]:
        attentions.setdefault(result["attention"], []).append(result)
    panels = figure.subplots(len(attentions), squeeze=False)[:, 0]
    for axes, (attention, results) in zip(panels, attentions.items(), strict=True):
        for row, result in enumerate(results):
            for side, (kind, colour) in enumerate(COLOURS.items()):
                axes.broken_barh(result["bars"][kind], (row - 0.4 * side, 0.4), color=colour, lw=0)
            last = max(start + duration for found in result["bars"].values() for start, duration in found)
            name(axes, f"{100 * result['hidden_share']:.0f} % hidden", (last, row), INK)
        axes.set_yticks(range(len(results)), [result["transport"] for result in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.set_xlim(0, 1.15 * axes.dataLim.xmax)
        axes.set_ylabel(LABELS.get(attention, f"MoBA {attention}"))
        axes.grid(visible=False, axis="y")
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    tokens = content["results"][0]["tokens"] // 1024
    panels[-1].set_xlabel(f"ms on one of {content['settings']['ranks']} GPUs, {tokens}K tokens, forward and backward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["allgather", "ring", "ulysses"])
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag"])
    parser.add_argument("--attention", nargs="+", default=["dense"], help="dense or BLOCK/TOPK")
    parser.add_argument("--tokens", type=length, default=2**17)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    with joined_world() as world:
        setting = Setting(world, repeats=1)
        results = [
            record(setting, transport, arguments.layout, name, arguments.tokens)
            for name in arguments.attention
            for transport in arguments.transports
        ]
        if world.is_main:
            for result in results:
                print(f"{result['transport']:>12} {result['attention']}: hidden {100 * result['hidden_share']:.0f} %")
            if arguments.output:
                save(arguments.output, {"ranks": world.size}, results)


if __name__ == "__main__":
    main()
