"""MoBA's forward pass over long blocks by warps that have roles (Gluon) beside the kernels in Triton, on one GPU.

    python -m benchmarks.attention_forward --output benchmarks/results/attention-forward-h200.json

Shape of Llama-3-8B's attention unless a row says otherwise. The selection is made once; both paths attend to it by
turns, in calls that are queued, whatever the table of kernels says. A sample of results and gradients is
compared with float64 first; exit status 1 where one is wrong, or where a path does not repeat its bits.
`forward_history` and `forward_diagonal` are kernels of both paths; blocks up to 128 keys have one
kernel in Triton, `forward_to_128`.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import attention_check
from benchmarks.attention_rows import SYNTAX, Case, Row, compile_ahead
from benchmarks.options import need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.timing import kernel_times, queued

ROWS = ["8K:512/3", "32K:512/3", "32K:1024/3", "32K:4096/3", "128K:512/8", "32K:512/3,documents=8x4K"]
PATHS = ("triton", "gluon")
KERNELS = ("forward_history", "forward_diagonal", "forward_to_128", "combine_out")


def run(case: Case, repeats: int) -> dict[str, Any]:
    """Check and time one row by both paths."""
    from moba_train.attention.kernels.common.call import BlockCall  # needs Triton

    row = Row(case)
    layout = row.layout()
    selection = row.attention.select(row.q, row.attention.summarize(row.k, layout), layout)
    inputs = (row.q, row.k, row.v)
    sizes = BlockCall.from_tensors(*inputs, layout, selection[0], case.block_size, row.attention.scale)
    if case.block_size % (keys := sizes.shapes.forward.keys):
        raise ValueError(f"{case.name} given, blocks of whole tiles of {keys} keys needed")
    tflop = 4 * case.head_dim * case.block_size * int((selection[0] >= 0).sum()) / 1e12
    result: dict[str, Any] = {"row": case.name, "history_tflop": tflop}
    # Each on a layout of its own: launches on a layout are repeated from a record.
    calls = {
        path: partial(_by, path, case.block_size, partial(row.attention.attend, *inputs, row.layout(), selection))
        for path in PATHS
    }
    both = {path: partial(_by, path, case.block_size, row.both) for path in PATHS}
    outs = {}
    for path in PATHS:
        result[path] = {"errors": attention_check.errors(row, both[path]())}
        outs[path] = calls[path]()
        result[path]["repeats"] = all(torch.equal(a, b) for a, b in zip(outs[path], calls[path](), strict=True))
        profiles = [kernel_times(calls[path]) for _ in range(4)][1:]
        result[path]["kernels_ms"] = {name: min(found.get(name, 0.0) for found in profiles) for name in KERNELS}
        kernels = result[path]["kernels_ms"]
        result[path]["history_tflops"] = 1000 * tflop / (kernels["forward_history"] or kernels["forward_to_128"])
    result["lse_difference"] = (outs["gluon"][1] - outs["triton"][1]).abs().max().item()
    times: dict[str, dict[str, list[float]]] = {path: {"forward_ms": [], "both_ms": []} for path in PATHS}
    for _ in range(2):
        for path in PATHS:
            times[path]["forward_ms"] += queued(calls[path], repeats)[1:]
            times[path]["both_ms"] += queued(both[path], repeats)[1:]
    for path in PATHS:
        result[path] |= {name: spread(values) for name, values in times[path].items()}
    return result


def _by(path: str, block_size: int, call: Callable[[], Any]) -> Any:
    """The result of a call by one of the paths."""
    from moba_train.attention.kernels.common.call import BlockCall  # needs Triton

    file = "hopper/blocks_from_512_forward.py"
    if path == "triton":
        file = "triton/blocks_to_128.py" if block_size <= 128 else "triton/blocks_from_144_forward.py"
    with patch.object(BlockCall, "forward_pass", file):
        return call()


def table(results: list[dict[str, Any]]) -> str:
    """Times by Triton and by Gluon, of the forward pass, of it with the gradients, and of its kernels."""
    lines = [["ms", "forward", "with gradients", *KERNELS, "TFLOP/s of history"]]
    for result in results:
        both = [result[path] for path in PATHS]
        pairs = [[x[name]["median"] for x in both] for name in ("forward_ms", "both_ms")]
        pairs += [[x["kernels_ms"][name] for x in both] for name in KERNELS]
        rates = " to ".join(f"{x['history_tflops']:.0f}" for x in both)
        lines.append([result["row"], *(" to ".join(f"{ms:.3f}" for ms in pair) for pair in pairs), rates])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Case.parse, default=[Case.parse(x) for x in ROWS], help=SYNTAX)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    compile_ahead(arguments.rows)
    results, bad = [], False
    for case in arguments.rows:
        result = run(case, arguments.repeats)
        results.append(result)
        for path in PATHS:
            found, repeats = attention_check.wrong(result[path]["errors"]), result[path]["repeats"]
            print(f"{case.name} by {path}: wrong {found or 'nowhere'}, repeats its bits: {repeats}", flush=True)
            bad |= bool(found) or not repeats
        if arguments.output:
            save(arguments.output, {"repeats": arguments.repeats}, results)
        torch.cuda.empty_cache()
    print(table(results))
    sys.exit(bad)


if __name__ == "__main__":
    main()
