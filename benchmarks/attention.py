"""MoBA's kernels against dense attention, forward and backward, selection included, on one GPU.

    python -m benchmarks.attention --output benchmarks/results/attention-h200.json   # everything, under six minutes
    python -m benchmarks.attention --quick                                            # three rows
    python -m benchmarks.attention --rows 128K:4096/12 64K:128/8,routing=sink --dense-up-to 0

Shape of Llama-3-8B's attention unless a row says otherwise: 32 query heads, 8 key/value heads of 128, bf16, one
document of random data. Before a row is timed, a sample of its outputs and gradients is compared with float64. Times
are medians over CUDA events. Exit status 1 when a result is wrong or a row of ours fails. Tables and plot are made with

    python -m benchmarks.attention_table --write benchmarks/measured/attention.md
    python -m benchmarks.pictures attention
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention_check
from benchmarks.attention_peers import Peer, dense_key, peers, versions
from benchmarks.attention_routing import routed_fraction
from benchmarks.attention_rows import SYNTAX, Case, Row, compile_ahead
from benchmarks.attention_table import Result, render, summary
from benchmarks.options import length, need_gpus
from benchmarks.record import provenance, save
from benchmarks.timing import kernel_times, measure

PLAIN = (
    "8K:512/3 32K:512/3 32K:128/8 64K:128/8 128K:128/8 128K:4096/12 256K:128/8 256K:4096/12 512K:4096/12 "
    "1M:4096/12 1M:128/8"
)
VARIED = "heads=8,kv=8 d=64 routing=sink routing=local routing=uniform"
ROWS = [*PLAIN.split(), *(f"{row},{options}" for row in ("128K:128/8", "64K:4096/12") for options in VARIED.split())]
ROWS += [f"128K:512/8,routing={routing}" for routing in ("sink", "uniform")]
ROWS += ["128K:128/8,documents=1", "256K:4096/12,documents=4x64K"]
QUICK = ["8K:512/3", "64K:128/8", "128K:4096/12"]
PROFILED_MS = 4000.0
"""Rows that take longer are not profiled: profiling costs one more call and shows nothing new at such lengths."""

Measured = dict[tuple[Any, ...], dict[str, Any]]


def run(case: Case, arguments: argparse.Namespace, others: list[Peer], dense: Measured) -> Result:
    """Check and time one row; `dense` holds the dense times of earlier rows of the same size."""
    if max(case.lengths()) <= case.topk * case.block_size:
        raise ValueError(f"documents of at most {case.topk} blocks given: `auto` takes dense attention for all")
    cost = case.cost()
    result: Result = {"row": case.name, **asdict(case)}
    result["tflop"] = {"forward": cost.forward, "backward": cost.backward, "gate": cost.gate}
    result["floor_ms"] = {"forward": cost.forward_floor_ms, "both": cost.forward_floor_ms + cost.backward_floor_ms}
    row = Row(case, backend="auto")
    outcome = row.both()
    result["errors"] = attention_check.errors(row, outcome)
    if not case.is_plain:
        result["routed"] = routed_fraction(case.routing, row.layout(), outcome[2][0], case.block_size)
    del outcome
    ours = measure(row.forward, row.both, arguments.budget, warm=True)
    if ours["both_ms"]["median"] < PROFILED_MS:
        ours["kernels_ms"] = kernel_times(row.both)
    result["backend"] = row.picked()
    columns = result["columns"] = {"auto": ours, result["backend"]: ours}
    for peer in others:
        if peer.name in columns:
            continue
        limit = arguments.dense_up_to if peer.dense and arguments.dense_up_to is not None else peer.up_to
        if case.tokens > limit or not (peer.dense or case.is_plain or case.inputs):
            continue
        key = (peer.name, *dense_key(row))
        if peer.dense and key in dense:
            columns[peer.name] = dense[key]
        elif (found := timed(peer, row, arguments.budget)) is not None:
            columns[peer.name] = found
            if peer.dense:
                dense[key] = found
    return result | summary(result)


def timed(peer: Peer, row: Row, budget_s: float) -> dict[str, Any] | None:
    """One column of one row; None where the peer cannot compute the row."""
    try:
        calls = peer.calls(row)
        return measure(*calls, budget_s) if calls else None
    except Exception as error:  # a peer that fails here is a result: say so and go on
        torch.cuda.empty_cache()
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def report(result: Result) -> None:
    """Print one row as soon as it is measured, so that an interrupted run has shown its first rows."""
    if "error" in result:
        print(f"{result['row']}: {result['error']}", flush=True)
        return
    ours = result["columns"]["auto"]
    work = result["tflop"]
    both = ours["both_ms"]["median"]
    forward = ours["forward_ms"]["median"]
    rates = (work["forward"] + work["gate"]) / forward, sum(work.values()) / both
    bar = result.get("bar")
    wanted = f", bar {bar['both_ms']:g} {'reached' if bar['reached'] else 'MISSED'}" if bar else ""
    floor = result["floor_ms"]["both"]
    times = f"forward {forward:.2f} ms, both {both:.2f} ms{wanted}, floor {floor:.1f}"
    print(f"{result['row']} by {result['backend']}: {times}")
    print("  TFLOP/s: forward {:.0f}, both {:.0f}; peak {:.1f} GiB".format(*(1e3 * x for x in rates), ours["peak_gib"]))
    for name, column in result["columns"].items():
        if "error" in column:
            print(f"  {name}: {column['error']}")
        elif name not in ("auto", result["backend"]):
            print(f"  {name}: {column['forward_ms']['median']:.2f} / {column['both_ms']['median']:.2f} ms")
    if "kernels_ms" in ours:
        print("  kernels ms: " + " ".join(f"{name} {ms:.2f}" for name, ms in ours["kernels_ms"].items()))
    if "routed" in result:
        print(f"  routed as wanted: {100 * result['routed']:.1f} %")
    errors = " ".join(f"{name} {error:.1e}" for name, error in result["errors"].items())
    bad = attention_check.wrong(result["errors"])
    print(f"  errors: {errors}" + (f"\n  WRONG: {bad}" if bad else ""), flush=True)


def case_argument(text: str) -> Case:
    """`Case.parse` for argparse, which shows the message of an ArgumentTypeError alone."""
    try:
        return Case.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=case_argument, help=f"{SYNTAX} ...; default: {' '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help=f"only {' '.join(QUICK)}")
    parser.add_argument(
        "--dense-up-to",
        type=length,
        help="longest sequence for every dense attention; default: 256K for cuDNN and FlashAttention-4, 64K for "
        "FlashAttention-2",
    )
    parser.add_argument(
        "--peers", nargs="*", metavar="NAME", help="columns beside ours, by key; default: all that are here"
    )
    parser.add_argument("--budget", type=float, default=0.25, help="seconds of GPU time per measurement")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    began = time.monotonic()
    cases = arguments.rows or [Case.parse(text) for text in (QUICK if arguments.quick else ROWS)]
    for error in compile_ahead(cases):
        print(f"compiling {error}", flush=True)
    others = {peer.name: peer for peer in peers()}
    if unknown := {*(arguments.peers or ())} - others.keys():
        parser.error(f"--peers: given {', '.join(sorted(unknown))}; here are {', '.join(others)}")
    others = {name: peer for name, peer in others.items() if arguments.peers is None or name in arguments.peers}
    settings = {"dtype": "bfloat16", "budget_s": arguments.budget, "peers": versions([*others.values()])}
    results: list[Result] = []
    dense: Measured = {}
    for case in cases:
        try:
            result = run(case, arguments, [*others.values()], dense)
        except Exception as error:  # the rows that work are still worth their time
            result = {"row": case.name, "error": f"{type(error).__name__}: {str(error)[:500]}"}
        torch.cuda.empty_cache()
        results.append(result)
        report(result)
        if arguments.output:
            save(arguments.output, settings, results)
    print(f"\n{time.monotonic() - began:.0f} s in all\n")
    print(render({**provenance(), "results": results}))
    if any("error" in result or attention_check.wrong(result["errors"]) for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
