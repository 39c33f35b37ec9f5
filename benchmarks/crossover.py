"""Measures up to which length a dense kernel is faster than MoBA's.

    python -m benchmarks.crossover --output benchmarks/results/crossover-h200.json

Forward and backward, selection included, on about 32K tokens of equally long documents of n blocks each. With n <= topk
every block is selected and MoBA is dense attention, so `backend: auto` may take either: it should take the faster. With
more blocks only MoBA is right, and the ratio shows from which length on sparsity pays. The dense kernels are those of
`kind: full`; cuDNN's supports equally long documents only, FlashAttention-2's any.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_peers import dense_backend
from benchmarks.attention_rows import Case, Row, compile_ahead, short
from benchmarks.options import length, need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.timing import milliseconds
from moba_train.attention.full.kernels import BACKENDS

SETTINGS = "128/8 512/3 512/8 2048/4 4096/12"

Result = dict[str, Any]


def cases(setting: str, total: int) -> list[Case]:
    """Cases whose documents have topk / 2, topk, topk + 1, 2 topk and 4 topk blocks; each case has about `total` tokens
    and at least one document."""
    block_size, topk = map(int, setting.split("/"))
    found = []
    for blocks in sorted({max(1, topk // 2), topk, topk + 1, 2 * topk, 4 * topk}):
        size = blocks * block_size
        count = max(1, total // size)
        found.append(Case(count * size, block_size, topk, documents=f"{count}x{size}"))
    return found


def against_dense(case: Case, budget_s: float) -> Result:
    """Milliseconds of MoBA's Triton kernels (`auto` would take dense attention itself where it may) and of each dense
    kernel on the same documents."""
    row = Row(case)
    size = case.lengths()[0]
    blocks = size // case.block_size
    result: Result = {"row": case.name, "setting": f"{case.block_size}/{case.topk}", "length": size}
    result |= {"documents": len(case.lengths()), "blocks": blocks, "same_result": blocks <= case.topk}
    result["moba_ms"] = spread(milliseconds(row.both, budget_s))
    result["dense_ms"] = {}
    for name in BACKENDS:
        try:
            if name != "reference" and (calls := dense_backend(name, row)):
                result["dense_ms"][name] = spread(milliseconds(calls[1], budget_s))
        except RuntimeError as error:  # a kernel that fails on this shape is left out
            result.setdefault("errors", {})[name] = str(error)[:200]
    return result


def dense_table(results: list[Result]) -> str:
    """A table with a line for each case, and how often each dense kernel is the faster one where it may be taken."""
    names = list(dict.fromkeys(name for result in results for name in result["dense_ms"]))
    titles = ["block/topk", "blocks", "documents", "MoBA", *(f"dense, {name}" for name in names), "MoBA / dense", "may"]
    lines = [titles]
    for result in results:
        dense = {name: spread_["median"] for name, spread_ in result["dense_ms"].items()}
        ratios = [f"{result['moba_ms']['median'] / dense[name]:.2f}" if name in dense else "–" for name in names]
        times = [f"{dense[name]:.3g}" if name in dense else "–" for name in names]
        place = f"{result['documents']} x {short(result['length'])}"
        legal = "either" if result["same_result"] else "MoBA only"
        ours = f"{result['moba_ms']['median']:.3g}"
        lines.append([result["setting"], str(result["blocks"]), place, ours, *times, ", ".join(ratios), legal])
    free = [result for result in results if result["same_result"]]
    verdicts = []
    for name in names:
        faster = [result for result in free if name in result["dense_ms"] and _dense_is_faster(result, name)]
        known = sum(name in result["dense_ms"] for result in free)
        verdicts.append(f"{name} is faster in {len(faster)} of {known}")
    return f"{markdown(lines)}\n\nWhere either may be taken: {'; '.join(verdicts)}."


def _dense_is_faster(result: Result, name: str) -> bool:
    return result["dense_ms"][name]["median"] <= result["moba_ms"]["median"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS.split(), help="BLOCK/TOPK ...")
    parser.add_argument("--total", type=length, default=2**15, help="tokens of a case")
    parser.add_argument("--budget", type=float, default=0.15, help="seconds of GPU time per measurement")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    measured = [case for setting in arguments.settings for case in cases(setting, arguments.total)]
    for error in compile_ahead(measured):
        print(f"compiling {error}", flush=True)
    results: list[Result] = []
    settings = {"total": arguments.total, "budget_s": arguments.budget, "dtype": "bfloat16"}
    for case in measured:
        results.append(against_dense(case, arguments.budget))
        print(results[-1], flush=True)
        torch.cuda.empty_cache()
        if arguments.output:
            save(arguments.output, settings, results)
    print(f"\n{dense_table(results)}\n", flush=True)


if __name__ == "__main__":
    main()
