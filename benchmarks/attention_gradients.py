"""MoBA's gradients of long blocks in one pass (Gluon) beside two passes (Triton), on one GPU.

    python -m benchmarks.attention_gradients --output benchmarks/results/attention-gradients-h200.json

Shape of Llama-3-8B's attention unless a row says otherwise. All paths are taken by turns, in calls that are queued,
whatever the table of kernels says of the block size; blocks up to 128 keys are one tile of keys, so they
have no two passes. `gathered`: one pass that gathers its rows, for blocks of 128. `rounded`: one pass that adds up dq
in 16 bits where it takes float32, for blocks of more than 1024 keys. A sample of results and gradients is compared with
float64 first; exit status 1 where one is wrong, or where a path does not repeat its bits. `both` is forward and
backward with selection; its peak memory counts inputs, too.
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
from moba_train.attention.protocol import BackwardState

ROWS = ["32K:512/3", "32K:1024/2", "32K:4096/3", "64K:2048/6", "128K:4096/12", "32K:128/8", "64K:128/8", "128K:128/8"]
PATHS = ("two passes", "one pass", "gathered", "rounded")
KERNELS = {
    "history": ("dkdv_history", "dq_history", "backward_history", "backward_gathered"),
    "own blocks": ("dkdv_diagonal", "dq_diagonal", "backward_diagonal"),
}
"""Kernels that multiply matrices, of all paths."""


def run(case: Case, repeats: int) -> dict[str, Any]:
    """Check and time one row by the paths that it has."""
    row = Row(case)
    out, lse, _, selection = row.forward()
    state = BackwardState(row.dout, row.q, row.k, row.v, out, lse)
    # Each on a layout of its own: launches on a layout are repeated from a record.
    backward = {
        path: partial(
            _by, path, case.block_size, partial(row.attention.attend_backward, state, row.layout(), selection)
        )
        for path in _paths(case)
    }
    both = {path: partial(_by, path, case.block_size, row.both) for path in backward}
    result: dict[str, Any] = {"row": case.name, "tflop": case.cost().backward}
    for path in backward:
        result[path] = {"errors": attention_check.errors(row, both[path]())}
        gradients = backward[path]()
        result[path]["repeats"] = all(torch.equal(a, b) for a, b in zip(gradients, backward[path](), strict=True))
        del gradients
        profiles = [kernel_times(backward[path]) for _ in range(3)][1:]
        result[path]["kernels_ms"] = min(profiles, key=lambda found: sum(found.values()))
    del out, lse, selection, state
    times: dict[str, dict[str, list[float]]] = {path: {"backward_ms": [], "both_ms": []} for path in backward}
    for _ in range(2):
        for path in backward:
            times[path]["backward_ms"] += queued(backward[path], repeats)[1:]
    backward.clear()  # with it what the forward pass kept: the peak is that of one call
    for _ in range(2):
        for path in both:
            torch.cuda.reset_peak_memory_stats()
            times[path]["both_ms"] += queued(both[path], repeats)[1:]
            result[path]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for path in both:
        result[path] |= {name: spread(values) for name, values in times[path].items()}
    return result


def _paths(case: Case) -> tuple[str, ...]:
    if case.block_size <= 128:
        return ("one pass", "gathered") if case.block_size == 128 else ("one pass",)
    return ("two passes", "one pass", "rounded") if case.block_size > 1024 else ("two passes", "one pass")


def _by(path: str, block_size: int, call: Callable[[], Any]) -> Any:
    """The result of a call, its gradients by one of the paths."""
    from moba_train.attention.kernels.common.call import BlockCall  # needs Triton
    from moba_train.attention.kernels.hopper.blocks_256_to_4096_gradients import OnePass  # needs Gluon

    one_pass = "triton/blocks_to_128.py" if block_size <= 128 else "hopper/blocks_256_to_4096_gradients.py"
    others = {"two passes": "triton/blocks_from_144_dq.py", "gathered": "hopper/blocks_128_gradients.py"}
    rounded = property(lambda launches: launches.dq.dtype) if path == "rounded" else OnePass.dq_dtype
    with (
        patch.object(BlockCall, "backward_pass", others.get(path, one_pass)),
        patch.object(OnePass, "dq_dtype", rounded),
    ):
        return call()


def _compile(row: Row) -> None:
    """Run all code of a row once."""
    for path in _paths(row.case):
        _by(path, row.case.block_size, row.both)


def table(results: list[dict[str, Any]]) -> str:
    """Times of all paths: of the gradients, of them with the forward pass, and of their kernels; peak memory."""
    lines = [
        [f"ms: {' / '.join(PATHS)}", "gradients", "both", *KERNELS, "TFLOP/s of the gradients", "peak GiB of both"]
    ]
    for result in results:
        found = [result.get(path) for path in PATHS]
        columns = [[x and x[name]["median"] for x in found] for name in ("backward_ms", "both_ms")]
        columns += [
            [x and sum(x["kernels_ms"].get(name, 0.0) for name in names) for x in found] for names in KERNELS.values()
        ]
        columns.append([x and 1000 * result["tflop"] / x["backward_ms"]["median"] for x in found])
        columns.append([x and x["peak_gib"] for x in found])
        cells = [" / ".join("–" if x is None else f"{x:.3g}" for x in numbers) for numbers in columns]
        lines.append([result["row"], *cells])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=Case.parse, default=[Case.parse(x) for x in ROWS], help=SYNTAX)
    parser.add_argument("--repeats", type=int, default=3, help="calls of each path in each of two turns")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    if arguments.repeats < 2:
        parser.error(f"--repeats {arguments.repeats} given, 2 or more needed: the first call of a turn is not counted")
    for error in compile_ahead(arguments.rows, _compile):
        print(f"compiling {error}", flush=True)
    results, bad = [], False
    for case in arguments.rows:
        result = run(case, arguments.repeats)
        results.append(result)
        for path in _paths(case):
            wrong, repeats = attention_check.wrong(result[path]["errors"]), result[path]["repeats"]
            errors = " ".join(f"{name} {error:.1e}" for name, error in result[path]["errors"].items())
            print(f"{case.name} by {path}: wrong {wrong or 'nowhere'} ({errors}), repeats its bits: {repeats}")
            print("  kernels ms: " + " ".join(f"{name} {ms:.2f}" for name, ms in result[path]["kernels_ms"].items()))
            bad |= bool(wrong) or not repeats
        print(table([result]), flush=True)
        if arguments.output:
            save(arguments.output, {"repeats": arguments.repeats}, results)
        torch.cuda.empty_cache()
    print(f"\n{table(results)}")
    sys.exit(bad)


if __name__ == "__main__":
    main()
