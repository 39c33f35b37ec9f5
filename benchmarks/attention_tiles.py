"""Times tile shapes of the attention kernels, to fill the table in moba_train/attention/moba/triton/tiles.py.

    python -m benchmarks.attention_tiles --row 128K:4096/12
    python -m benchmarks.attention_tiles --row 64K:128/8 --kernel dkdv --shapes 64x128x8x2 32x128x8x2

A shape is rows x keys x warps x stages. Prints TFLOP/s of the whole stage (gathers, own blocks and sums included).
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from benchmarks.attention import Row, milliseconds
from moba_train.attention.moba.triton import attention as kernels
from moba_train.attention.moba.triton.lists import Lists
from moba_train.attention.moba.triton.tiles import Shape, shapes
from moba_train.units import parse_number

CANDIDATES = {
    "forward": "256x64x8x3 256x64x8x2 128x128x8x2 128x128x8x3 128x64x8x3 128x64x4x2 128x64x4x3 64x128x4x2 64x64x4x3",
    "dq": "128x64x8x3 128x64x8x2 128x128x8x2 128x32x8x3 64x64x4x2 64x64x4x3 64x128x4x2",
    "dkdv": "64x128x8x2 64x128x8x3 32x128x8x2 32x128x8x3 64x64x4x2 64x64x4x3 32x64x4x3 128x64x8x2 128x128x8x2",
}


def stages(row: Row) -> dict[str, Callable[[], Any]]:
    """The three stages on this row's inputs; each reads the tile shapes anew."""
    out, lse, layout, (chosen, entries, starts) = row.forward()
    scale, block_size = row.attention.scale, row.block_size
    inputs = (row.q, row.k, row.v, layout, chosen)
    stats = torch.stack([lse.T * kernels.LOG2_E, (out.float() * row.dout.float()).sum(-1)], -1).contiguous()
    dq, dk, dv = torch.empty_like(row.q), torch.empty_like(row.k), torch.empty_like(row.v)

    def call() -> Any:
        return kernels._Call.of(*inputs, block_size)

    lists = Lists.of(entries, starts, chosen, row.k.shape[1], call().tables.blocks)
    return {
        "forward": lambda: kernels.attend(*inputs, entries, starts, block_size=block_size, scale=scale),
        "dq": lambda: kernels._dq(call(), row.dout, stats, dq, lists, layout, chosen, scale),
        "dkdv": lambda: kernels._dkdv(call(), row.dout, stats, dk, dv, lists, layout, scale),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", default=["128K:4096/12", "64K:128/8"], help="TOKENS:BLOCK/TOPK ...")
    parser.add_argument("--kernel", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--shapes", nargs="+", help="instead of the built-in candidates")
    arguments = parser.parse_args()
    for name in arguments.row:
        length, setting = name.split(":")
        row = Row(parse_number(length, 1024), *map(int, setting.split("/")))
        run, work = stages(row), row.tflop()
        tflop = {"forward": work["forward"], "dq": work["backward"] * 3 / 7, "dkdv": work["backward"] * 4 / 7}
        for kernel in arguments.kernel:
            for text in arguments.shapes or CANDIDATES[kernel].split():
                shape = Shape(*map(int, text.split("x")))
                kernels.shapes = lambda d, b, kernel=kernel, shape=shape: replace(shapes(d, b), **{kernel: shape})
                try:
                    ms = statistics.median(milliseconds(run[kernel], 0.0))
                except (OutOfResources, CompilationError, RuntimeError) as error:
                    print(f"{name} {kernel} {text}: {type(error).__name__} {str(error)[:80]}", flush=True)
                    continue
                rate = 1000 * tflop[kernel] / ms
                print(f"{name} {kernel} {text}: {ms:.2f} ms, {rate:.0f} TFLOP/s", flush=True)
        del row, run
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
