"""A timeline of one rank's GPU during forward and backward: attention on one stream, communication on the others.

torchrun --nproc-per-node 4 -m benchmarks.context_timeline --tokens 128K --attention dense --output timeline.json
python -m benchmarks.context_timeline --draw timeline.json docs/images/context-timeline.svg
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from benchmarks.context_parallel import Setting, both_passes
from benchmarks.options import length, need_gpus
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


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Plot one strip for each transport."""
    with mpl.rc_context({"svg.hashsalt": "timeline", "font.size": 9}):
        figure = Figure(figsize=(9, 1.1 * len(results) + 0.6), layout="constrained")
        for place, result in enumerate(results):
            axes = figure.add_subplot(len(results), 1, place + 1)
            for row, (kind, color) in enumerate((("communication", "#d95f02"), ("attention", "#1b9e77"))):
                axes.broken_barh(result["bars"][kind], (row - 0.4, 0.8), color=color)
            axes.set_yticks([0, 1], ["communication", "attention"])
            hidden = f"{100 * result['hidden_share']:.0f} % of communication under attention"
            axes.set_title(
                f"{result['transport']}, {result['attention']}, {result['tokens'] // 1024}K tokens: {hidden}",
                loc="left",
            )
            axes.set_xlim(left=0)
        figure.supxlabel("ms on rank 0")
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["allgather", "ring", "ulysses"])
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag"])
    parser.add_argument("--attention", nargs="+", default=["dense"], help="dense or BLOCK/TOPK")
    parser.add_argument("--tokens", type=length, default=2**17)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("JSON", "SVG"))
    arguments = parser.parse_args()
    if arguments.draw:
        source, target = arguments.draw
        draw(json.loads(source.read_text())["results"], target)
        return
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
