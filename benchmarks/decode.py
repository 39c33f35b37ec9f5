"""One decoded token's attention against a long context: full attention and MoBA, by how many heads share keys.

    python -m benchmarks.decode --output benchmarks/results/decode-h200.json
    python -m benchmarks.decode --contexts 128K --heads-per-kv 4 --moba 512/8

32 query heads of 128, bf16, one sequence, random queries and keys. MoBA selects for each query head or once for the
heads of a key/value head. Query heads that share keys are either independent, so that they select different blocks, the
worst case, or nearly alike. Bytes are those of the keys and values that one token needs: `distinct` counts a block once
for each key/value head, `requested` once for each query head that selects it, which the L2 cache may serve. Before a
row is timed its output is compared with float64. Times are those of a layer's attention with its gate; appending and
summarizing the new key is not included. Exit status 1 when a result is wrong.
"""

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import length, need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.timing import milliseconds
from moba_train.attention.facets import Decodes
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common.cached_keys import CachedKeys, last_tokens
from moba_train.attention.layout import TokenRange, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention

HEADS = 32
HEAD_DIM = 128
TOLERANCE = 1e-2
"""Largest allowed error relative to the largest output: bf16 has 8 bits."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A context, and how many query heads share a key/value head of it."""

    context: int
    heads_per_kv: int
    alike: bool
    """Whether the heads that share keys have nearly equal queries."""

    @property
    def kv_heads(self) -> int:
        return HEADS // self.heads_per_kv

    def inputs(self) -> tuple[Tensor, CachedKeys]:
        """The query [1, H, D] and the cache."""
        device = torch.device("cuda")
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

        k_SKD = normal(self.context, self.kv_heads, HEAD_DIM)
        v_SKD = normal(self.context, self.kv_heads, HEAD_DIM)
        q_BKGD = normal(1, self.kv_heads, self.heads_per_kv, HEAD_DIM)
        if self.alike:
            q_BKGD = q_BKGD[:, :, :1] + 0.1 * q_BKGD
        layout = last_tokens([self.context], device)
        cached = CachedKeys(k_SKD, v_SKD, (TokenRange(0, self.context),), layout, None)
        return q_BKGD.flatten(1, 2), cached


def run(case: Case, moba: list[str], budget_s: float) -> list[Result]:
    """All attentions on one context."""
    q_BHD, cached = case.inputs()
    one_token = 2 * 2 * HEAD_DIM  # bytes of a key and a value of one head
    facts: Result = {"context": case.context, "heads_per_kv": case.heads_per_kv, "alike": case.alike}
    everything = case.kv_heads * case.context * one_token
    full = FullAttention(FullAttention.Options(), HEAD_DIM)
    results = [
        facts
        | {"attention": "full", "select": None, "setting": None}
        | {"distinct_bytes": everything, "requested_bytes": everything}
        | measured(full, q_BHD, cached, _full_error, budget_s)
    ]
    for setting, select in itertools.product(moba, ("head", "group")):
        block_size, topk = (int(number) for number in setting.split("/"))
        options = MobaAttention.Options(block_size=block_size, topk=topk, select=select)
        attention = MobaAttention(options, HEAD_DIM)
        with_summaries = CachedKeys(
            cached.k_RKD,
            cached.v_RKD,
            cached.ranges,
            cached.layout,
            attention.summarize(cached.k_RKD, packed_layout([case.context], cached.k_RKD.device)),
        )
        assert with_summaries.summaries is not None
        gate = with_summaries.summaries.numel() * with_summaries.summaries.element_size()
        lists = block_lists(attention, q_BHD, with_summaries)
        distinct = len({(head // case.heads_per_kv, block) for head, blocks in enumerate(lists) for block in blocks})
        requested = sum(map(len, lists)) if select == "head" else distinct
        results.append(
            facts
            | {"attention": "moba", "select": select, "setting": setting}
            | {"distinct_bytes": gate + distinct * block_size * one_token}
            | {"requested_bytes": gate + requested * block_size * one_token, "gate_bytes": gate}
            | measured(attention, q_BHD, with_summaries, _moba_error, budget_s)
        )
    return results


def block_lists(attention: MobaAttention, q_BHD: Tensor, cached: CachedKeys) -> list[list[int]]:
    """The blocks that each query head reads, its own included."""
    selection = attention.select(q_BHD, cached.summaries, cached.layout)
    own = (cached.layout.total - 1) // attention.options.block_size
    return [[*(block for block in blocks if block >= 0), own] for blocks in selection[0][:, 0].tolist()]


def measured(attention: Decodes, q_BHD: Tensor, cached: CachedKeys, error: Any, budget_s: float) -> Result:
    """Error and times: of calls that are queued, and of the GPU's work alone."""

    def call() -> Tensor:
        return attention.decode(q_BHD, cached)[0]

    found = error(attention, q_BHD, cached, call())
    times = spread(milliseconds(call, budget_s))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return {"error": found, "ms": times, "graph_ms": spread(milliseconds(graph.replay, budget_s))}


def _full_error(attention: FullAttention, q_BHD: Tensor, cached: CachedKeys, out_BHD: Tensor) -> float:
    everything = torch.arange(cached.layout.total, device=q_BHD.device)
    return _error(q_BHD, cached, out_BHD, attention.scale, lambda _head: everything)


def _moba_error(attention: MobaAttention, q_BHD: Tensor, cached: CachedKeys, out_BHD: Tensor) -> float:
    size = attention.options.block_size
    lists = block_lists(attention, q_BHD, cached)

    def read(head: int) -> Tensor:
        starts = torch.tensor(lists[head], device=q_BHD.device) * size
        tokens = (starts[:, None] + torch.arange(size, device=q_BHD.device)).flatten()
        return tokens[tokens < cached.layout.total]

    return _error(q_BHD, cached, out_BHD, attention.scale, read)


def _error(q_BHD: Tensor, cached: CachedKeys, out_BHD: Tensor, scale: float, read: Any) -> float:
    """Largest difference from float64, in units of the largest exact output."""
    heads_per_kv = HEADS // cached.k_RKD.shape[1]
    exact = []
    for head in range(HEADS):
        tokens = read(head)
        k_SD = cached.k_RKD[tokens, head // heads_per_kv].double()
        v_SD = cached.v_RKD[tokens, head // heads_per_kv].double()
        exact.append((k_SD @ q_BHD[0, head].double() * scale).softmax(0) @ v_SD)
    exact_HD = torch.stack(exact)
    return float((out_BHD[0].double() - exact_HD).abs().max() / exact_HD.abs().max())


def table(results: list[Result]) -> str:
    """A line for each attention on each context."""
    rows = [["context", "heads per key/value head", "queries", "attention", "selects per", "MB read", "ms", "of full"]]
    full = {}
    for result in results:
        key = (result["context"], result["heads_per_kv"], result["alike"])
        ms = result["graph_ms"]["median"]
        if result["attention"] == "full":
            full[key] = ms
        name = "full" if result["setting"] is None else f"MoBA {result['setting']}"
        rows.append(
            [
                f"{result['context'] // 1024}K",
                str(result["heads_per_kv"]),
                "alike" if result["alike"] else "independent",
                name,
                result["select"] or "",
                f"{result['distinct_bytes'] / 1e6:.0f}",
                f"{ms:.3f}",
                f"{ms / full[key]:.2f}",
            ]
        )
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=length, nargs="+", default=[2**17, 2**20], help="tokens, e.g. 128K")
    parser.add_argument("--heads-per-kv", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="1: MHA, 32: MQA")
    parser.add_argument("--moba", nargs="+", default=["512/8", "4096/12"], help="BLOCK/TOPK ...")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds of GPU time per measurement")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    settings = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16", "batch": 1, "budget_s": arguments.budget}
    results: list[Result] = []
    for context, heads_per_kv in itertools.product(arguments.contexts, arguments.heads_per_kv):
        for alike in (False, True) if heads_per_kv > 1 else (False,):
            results += run(Case(context, heads_per_kv, alike), arguments.moba, arguments.budget)
            torch.cuda.empty_cache()
        print(table(results[-1 - 2 * len(arguments.moba) :]), flush=True)
        if arguments.output:
            save(arguments.output, settings, results)
    print(f"\n{table(results)}\n", flush=True)
    wrong = [result for result in results if not result["error"] < TOLERANCE]
    for result in wrong:
        print(f"wrong: {result}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
