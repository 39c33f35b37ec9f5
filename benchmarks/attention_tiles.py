"""Times tile shapes of the attention kernels, to fill the table in moba_train/attention/kernels/common/tiles.py.

    python -m benchmarks.attention_tiles --row 128K:4096/12
    python -m benchmarks.attention_tiles --row 64K:128/8 --kernel short_backward --shapes 32x128x8x3 64x128x8x3

A shape is rows x keys x warps x stages. Each is timed in the complete forward or backward pass, with its kernels
and the difference of the results from those of the shape that ships.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_rows import Case, Row
from benchmarks.options import need_gpus
from benchmarks.timing import kernel_times, milliseconds
from moba_train.attention.protocol import BackwardState

FORWARD = ("diagonal", "forward", "short_forward")
CANDIDATES = {
    "diagonal": "128x64x8x3 128x64x4x3 128x128x8x2 64x64x4x3",
    "forward": "256x64x8x3 128x128x8x3 128x128x8x2 128x64x8x3 128x64x4x3 64x128x4x2",
    "dq": "128x64x8x3 128x64x8x2 128x128x8x2 128x32x8x3 64x64x4x3 64x128x4x2",
    "dkdv": "64x128x8x3 64x128x8x2 64x128x8x4 64x64x4x3 128x64x8x3 32x128x8x3",
    "dkdv_diagonal": "64x128x8x3 64x128x8x2 64x64x4x3 64x64x4x2 64x64x8x3 128x64x8x2 128x128x8x2",
    "short_forward": "128x128x8x3 128x128x8x2 64x128x4x2 64x128x4x3 64x128x8x3",
    "short_backward": "32x128x8x3 32x128x8x2 64x128x8x3 64x128x8x2",
}


def passes(row: Row) -> dict[bool, Callable[[], tuple[Tensor, ...]]]:
    """The forward (True) and the backward pass on this row's inputs; both look up the tile shapes again."""
    out, lse, layout, selection = row.forward()
    attention = row.attention
    inputs = (row.q, row.k, row.v)
    state = BackwardState(row.dout, *inputs, out, lse)
    return {
        True: lambda: attention.attend(*inputs, layout, selection),
        False: lambda: attention.attend_backward(state, layout, selection),
    }


def errors(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str:
    """Relative differences in norm, as text."""
    parts = zip(got, want, strict=True)
    return " ".join(f"{((a.float() - b.float()).norm() / b.float().norm()).item():.0e}" for a, b in parts)


def sweep(arguments: argparse.Namespace) -> None:
    """Time and print every shape."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    from moba_train.attention.kernels.common import call as block_call
    from moba_train.attention.kernels.common.tiles import TileShape, TileShapes, tile_shapes

    assert set(CANDIDATES) == {field.name for field in fields(TileShapes)}
    for name in arguments.row:
        row = Row(Case.parse(name))
        usual = tile_shapes(row.q.shape[2], row.block_size)
        run = passes(row)
        for kernel in arguments.kernel:
            if getattr(usual, kernel) is None:
                continue
            call = run[kernel in FORWARD]
            block_call.tile_shapes = tile_shapes
            want = call()
            for text in arguments.shapes or CANDIDATES[kernel].split():
                case = replace(usual, **{kernel: TileShape(*map(int, text.split("x")))})
                block_call.tile_shapes = lambda *_sizes, case=case: case
                label = f"{name} {kernel} {text}"
                try:
                    different = errors(call(), want)
                    ms = statistics.median(milliseconds(call, 0.0))
                except (OutOfResources, CompilationError, RuntimeError) as error:
                    print(f"{label}: {type(error).__name__} {str(error)[:80]}", flush=True)
                    continue
                times: dict[str, Any] = kernel_times(call)
                split = " ".join(f"{key} {time:.2f}" for key, time in list(times.items())[:4])
                print(f"{label}: {ms:.2f} ms ({split}), different by {different}", flush=True)
        block_call.tile_shapes = tile_shapes
        del row, run
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", default=["128K:4096/12", "64K:128/8"], help="TOKENS:BLOCK/TOPK ...")
    parser.add_argument("--kernel", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--shapes", nargs="+", help="instead of the built-in candidates")
    arguments = parser.parse_args()
    need_gpus(parser)
    sweep(arguments)


if __name__ == "__main__":
    main()
