"""Times tile shapes of the attention kernels, to fill the table in moba_train/attention/moba/triton/tiles.py.

    python -m benchmarks.attention_tiles --row 128K:4096/12
    python -m benchmarks.attention_tiles --row 128K:4096/12 --kernel dkdv
    python -m benchmarks.attention_tiles --row 64K:128/8 --kernel dkdv --rows gathered --shapes 64x128x8x2 32x128x8x2

A shape is rows x keys x warps x stages. Prints TFLOP/s of the whole stage (gathers, own blocks and sums included).
dk and dv are timed with each way of reading rows (tiles.Rows), packed ones also by kernel and with their difference
from the gathered ones' result.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from benchmarks.attention_rows import Case, Row
from benchmarks.timing import milliseconds
from moba_train.attention.moba.triton import attention as kernels
from moba_train.attention.moba.triton.lists import Lists
from moba_train.attention.moba.triton.tiles import Rows, Shape, Shapes, shapes

CANDIDATES = {
    "forward": "256x64x8x3 256x64x8x2 128x128x8x2 128x128x8x3 128x64x8x3 128x64x4x2 128x64x4x3 64x128x4x2 64x64x4x3",
    "dq": "128x64x8x3 128x64x8x2 128x128x8x2 128x32x8x3 64x64x4x2 64x64x4x3 64x128x4x2",
    "dkdv": "64x128x8x3 64x128x8x2 64x128x8x4 64x64x4x2 32x64x4x2 32x64x4x3 32x128x8x3 128x64x8x2 64x128x4x2",
}
KINDS = [kind.name.lower() for kind in reversed(list(Rows))]
PARTS = ("dkdv_own", "pack", "dkdv_history")


def stages(row: Row) -> tuple[dict[str, Callable[[], Any]], tuple[Tensor, Tensor]]:
    """The three stages on this row's inputs, each reads the tile shapes anew; and where dk and dv go."""
    out, lse, layout, (chosen, entries, starts) = row.forward()
    scale, block_size = row.attention.scale, row.block_size
    inputs = (row.q, row.k, row.v, layout, chosen)
    stats = torch.stack([lse.T * kernels.LOG2_E, (out.float() * row.dout.float()).sum(-1)], -1).contiguous()
    dq, dk, dv = torch.empty_like(row.q), torch.empty_like(row.k), torch.empty_like(row.v)

    def call() -> Any:
        return kernels._Call.of(*inputs, block_size)

    lists = Lists.of(entries, starts, chosen, row.k.shape[1], call().tables.blocks)
    run = {
        "forward": lambda: kernels.attend(*inputs, entries, starts, block_size=block_size, scale=scale),
        "dq": lambda: kernels._dq(call(), row.dout, stats, dq, lists, layout, chosen, scale),
        "dkdv": lambda: kernels._dkdv(call(), row.dout, stats, dk, dv, lists, layout, scale),
    }
    return run, (dk, dv)


def use(case: Shapes) -> None:
    """Until further notice, whatever the sizes."""
    kernels.shapes = lambda head_dim, block_size: case


def by_kernel(call: Callable[[], Any]) -> str:
    """GPU time of the packed path's kernels in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / 1000 for event in profile.key_averages()}
    rest = sum(time for name, time in times.items() if name not in PARTS)
    return ", ".join([*(f"{name} {times.get(name, 0.0):.2f}" for name in PARTS), f"others {rest:.2f}"])


def difference(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str:
    """Relative errors of (dk, dv) in norm: about 0.003 in bf16 where both are right."""
    errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, want, strict=True)]
    return "dk {:.1e}, dv {:.1e} from gathered".format(*errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", default=["128K:4096/12", "64K:128/8"], help="TOKENS:BLOCK/TOPK ...")
    parser.add_argument("--kernel", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--shapes", nargs="+", help="instead of the built-in candidates")
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=KINDS, help="of dkdv only")
    arguments = parser.parse_args()
    for name in arguments.row:
        row = Row(Case.parse(name))
        (run, grads), product = stages(row), row.case.cost().product
        tflop = {"forward": 2 * product, "dq": 3 * product, "dkdv": 4 * product}
        usual = shapes(row.q.shape[2], row.block_size)
        if "dkdv" in arguments.kernel:
            gathered = replace(usual, dkdv=Shape(64, 128, 8, 2), dkdv_rows=Rows.GATHERED)
            use(gathered)
            run["dkdv"]()
            want = tuple(x.clone() for x in grads)
        for kernel in arguments.kernel:
            for kind in arguments.rows if kernel == "dkdv" else [""]:
                for text in arguments.shapes or CANDIDATES[kernel].split():
                    change: dict[str, Any] = {kernel: Shape(*map(int, text.split("x")))}
                    if kind:
                        change["dkdv_rows"] = Rows[kind.upper()]
                    case = replace(usual, **change)
                    use(case)
                    label = f"{name} {kernel} {kind} {text}"
                    try:
                        ms = statistics.median(milliseconds(run[kernel], 0.0))
                        packed = kind.startswith("packed")
                        more = f" ({by_kernel(run[kernel])}; {difference(grads, want)})" if packed else ""
                    except (OutOfResources, CompilationError, RuntimeError) as error:
                        print(f"{label}: {type(error).__name__} {str(error)[:80]}", flush=True)
                        continue
                    print(f"{label}: {ms:.2f} ms, {1000 * tflop[kernel] / ms:.0f} TFLOP/s{more}", flush=True)
        del row, run, grads
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
