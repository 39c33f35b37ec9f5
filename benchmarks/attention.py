"""MoBA's kernels against dense attention, forward and backward, selection included, on one GPU.

    python -m benchmarks.attention --output benchmarks/results/attention-h200.json
    python -m benchmarks.attention --quick                    # three rows, under a minute
    python -m benchmarks.attention --rows 128K:4096/12 --dense-up-to 0

Shape of Llama-3-8B's attention: 32 query heads, 8 key/value heads of 128, bf16, one document of random data. Before a
row is timed, a sample of its outputs and gradients is compared with float64. Times are medians over CUDA events.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import save, spread
from moba_train.attention.moba.layer import MobaAttention
from moba_train.attention.protocol import Layout, Plan, packed_layout
from moba_train.units import parse_number

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROWS = "8K:512/3 32K:512/3 32K:128/8 64K:128/8 128K:128/8 128K:4096/12 256K:128/8 256K:4096/12 512K:4096/12"
KERNELS = (
    *("_pool", "_select", "_count", "_place", "attend_own", "attend_history", "combine_out"),
    *("prepare", "dkdv", "dkdv_own", "pack", "dkdv_history", "dq_own", "dq_history", "combine_dq"),
)
QUICK = "8K:512/3 64K:128/8 128K:4096/12"


def milliseconds(call: Callable[[], Any], budget_s: float) -> list[float]:
    """GPU time of single calls after a warm-up: as many as fit the budget, 3 to 20."""
    call()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and sum(times) < 1000 * budget_s):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of GPU time by kernel, for one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / 1000 for event in profile.key_averages()}
    result = {name: times.get(name, 0.0) for name in KERNELS}
    result["others"] = sum(times.values()) - sum(result.values())
    return result


class Row:
    """One sequence length, block size and topk: inputs and the calls that are timed."""

    def __init__(self, tokens: int, block_size: int, topk: int) -> None:
        self.tokens, self.block_size, self.topk = tokens, block_size, topk
        generator = torch.Generator("cuda").manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda", generator=generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        options = MobaAttention.Options(block_size=block_size, topk=topk, backend="triton")
        self.attention = MobaAttention(options, HEAD_DIM)

    def forward(self) -> tuple[Tensor, Tensor, Layout, Plan]:
        """Everything, the document's tables included."""
        layout = packed_layout([self.tokens], "cuda")
        plan = self.attention.plan(self.q, self.attention.summarize(self.k, layout), layout)
        return (*self.attention.attend(self.q, self.k, self.v, layout, plan), layout, plan)

    def both(self) -> tuple[Tensor, Tensor, Plan, Tensor, Tensor, Tensor]:
        """Forward and backward."""
        out, lse, layout, plan = self.forward()
        grads = self.attention.attend_backward(self.dout, self.q, self.k, self.v, out, lse, layout, plan)
        return (out, lse, plan, *grads)

    def tflop(self) -> dict[str, float]:
        """Matrix work of attention itself (2 products forward, 3 + 4 backward) and of the gate."""
        token = torch.arange(self.tokens, dtype=torch.float64)
        history = (token // self.block_size).clamp(max=self.topk - 1).sum().item() * self.block_size
        own = (token % self.block_size + 1).sum().item()
        product = 2e-12 * HEADS * HEAD_DIM
        gate = product * (token // self.block_size).sum().item()
        pairs = product * (history + own)
        return {"forward": 2 * pairs, "backward": 7 * pairs, "gate": gate}

    def check(self) -> dict[str, float]:
        """Relative errors of a sample against float64, with the choice held fixed, and of the choice itself."""
        out, lse, (chosen, *_), dq, dk, dv = self.both()
        generator = torch.Generator().manual_seed(1)
        tokens = [0, *torch.randint(self.tokens, (24,), generator=generator).tolist(), self.tokens - 1]
        heads = [0, 13, HEADS - 1]
        wrong = {"choice": 0.0, "out": 0.0, "lse": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0}
        blocks = -(-self.tokens // self.block_size)
        means = torch.stack([x.double().mean(0) for x in self.k.split(self.block_size)]).bfloat16().double()
        for head in heads:
            kv_head = head // (HEADS // KV_HEADS)
            for token in tokens:
                own = token // self.block_size
                row = [block for block in chosen[head, token].tolist() if block >= 0]
                assert len(set(row)) == min(self.topk - 1, own), f"token {token} chose {row}"
                assert all(block < own for block in row), f"token {token} in block {own} chose {row}"
                q, dout = self.q[token, head].double(), self.dout[token, head].double()
                gates = means[:own, kv_head] @ q
                if row and len(row) < own:
                    left = gates.clone()
                    left[row] = -torch.inf
                    wrong["choice"] = max(wrong["choice"], (left.max() - gates[row].min()).item())
                ids = [torch.arange(b * self.block_size, (b + 1) * self.block_size) for b in row]
                keys = torch.cat([*ids, torch.arange(own * self.block_size, token + 1)]).to("cuda")
                k, v = self.k[keys, kv_head].double(), self.v[keys, kv_head].double()
                scores = k @ q * HEAD_DIM**-0.5
                p = scores.softmax(0)
                want = p @ v
                dscores = p * (v @ dout - want @ dout)
                want_dq = dscores @ k * HEAD_DIM**-0.5
                wrong["out"] = max(wrong["out"], _error(out[token, head], want))
                wrong["dq"] = max(wrong["dq"], _error(dq[token, head], want_dq) if token else 0.0)
                wrong["lse"] = max(wrong["lse"], (lse[head, token] - scores.logsumexp(0)).abs().item())
        for block in sorted({0, blocks // 3, blocks - 1}):
            kv_head = 5
            mine = slice(kv_head * 4, kv_head * 4 + 4)
            at_g, at_t = (chosen[mine] == block).any(-1).nonzero(as_tuple=True)
            first = block * self.block_size
            own_t = torch.arange(first, min(first + self.block_size, self.tokens), device="cuda")
            at_t = torch.cat([at_t, own_t.repeat(4)])
            at_h = torch.cat([at_g, torch.arange(4, device="cuda").repeat_interleave(len(own_t))]) + kv_head * 4
            keys = own_t[:: max(1, len(own_t) // 5)]
            q, dout = self.q[at_t, at_h].double(), self.dout[at_t, at_h].double()
            k, v = self.k[keys, kv_head].double(), self.v[keys, kv_head].double()
            p = (q @ k.T * HEAD_DIM**-0.5 - lse[at_h, at_t].double()[:, None]).exp() * (keys <= at_t[:, None])
            wrong["dv"] = max(wrong["dv"], _error(dv[keys, kv_head], p.T @ dout))
            delta = (out[at_t, at_h].double() * dout).sum(-1)
            dscores = p * (dout @ v.T - delta[:, None])
            wrong["dk"] = max(wrong["dk"], _error(dk[keys, kv_head], dscores.T @ q * HEAD_DIM**-0.5))
        limits = {"choice": 1e-3, "out": 1e-2, "lse": 1e-3, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2}
        bad = {name: error for name, error in wrong.items() if not error <= limits[name]}
        if bad:
            print(f"WRONG: {bad}", flush=True)
        return wrong


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def dense(kind: str, row: Row) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, forward and backward) of dense causal attention on the row's inputs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[kind]
    q, k, v, dout = (x.transpose(0, 1).unsqueeze(0).detach() for x in (row.q, row.k, row.v, row.dout))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    def forward_only() -> None:
        with torch.no_grad():
            forward()

    return forward_only, lambda: torch.autograd.grad(forward(), leaves, dout)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Check and time one row."""
    length, setting = name.split(":")
    block_size, topk = map(int, setting.split("/"))
    row = Row(parse_number(length, 1024), block_size, topk)
    result: dict[str, Any] = {"row": name, "errors": row.check(), "tflop": row.tflop()}
    torch.cuda.reset_peak_memory_stats()
    result["forward_ms"] = spread(milliseconds(row.forward, arguments.budget))
    result["both_ms"] = spread(milliseconds(row.both, arguments.budget))
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["kernels_ms"] = kernel_times(row.both)
    if row.tokens <= arguments.dense_up_to:
        for kind in ("cudnn", "flash"):
            try:
                forward, both = dense(kind, row)
                result[f"{kind}_forward_ms"] = spread(milliseconds(forward, arguments.budget))
                result[f"{kind}_both_ms"] = spread(milliseconds(both, arguments.budget))
            except RuntimeError as error:  # this backend cannot do it here: say so and go on
                result[f"{kind}_error"] = str(error)[:200]
    report(result)
    return result


def report(result: dict[str, Any]) -> None:
    """Print one row at once: a run that is cut short has then still told something."""
    both, forward = result["both_ms"]["median"], result["forward_ms"]["median"]
    errors = " ".join(f"{name} {error:.1e}" for name, error in result["errors"].items())
    stages = " ".join(f"{name} {ms:.2f}" for name, ms in result["kernels_ms"].items())
    times, work = result["kernels_ms"], result["tflop"]
    rates = {
        "gate": work["gate"] / max(times["_select"], 1e-9),
        "forward": work["forward"] / max(times["attend_own"] + times["attend_history"], 1e-9),
        "dq": work["backward"] * 3 / 7 / max(times["dq_own"] + times["dq_history"], 1e-9),
        "dkdv": work["backward"] * 4 / 7 / sum(times[name] for name in ("dkdv", "dkdv_own", "pack", "dkdv_history")),
    }
    rate = " ".join(f"{name} {1000 * value:.0f}" for name, value in rates.items())
    print(f"{result['row']}: forward {forward:.2f} ms, both {both:.2f} ms, peak {result['peak_gib']:.1f} GiB")
    print(f"  kernels ms: {stages}\n  TFLOP/s: {rate}\n  errors: {errors}", flush=True)


def table(results: list[dict[str, Any]]) -> None:
    """One line a row, forward / forward and backward in ms."""

    def cell(result: dict[str, Any], prefix: str) -> str:
        if f"{prefix}both_ms" not in result:
            return "–"
        return f"{result[f'{prefix}forward_ms']['median']:.3g} / {result[f'{prefix}both_ms']['median']:.4g}"

    print("\n| row | MoBA, triton | dense, cuDNN | dense, FlashAttention-2 | peak GiB |\n|---|---|---|---|---|")
    for result in results:
        cells = " | ".join(cell(result, prefix) for prefix in ("", "cudnn_", "flash_"))
        print(f"| {result['row']} | {cells} | {result['peak_gib']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS.split(), help="TOKENS:BLOCK/TOPK ...")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}")
    parser.add_argument(
        "--dense-up-to",
        type=lambda text: parse_number(text, 1024),
        default=2**17,
        help="longest sequence for dense attention",
    )
    parser.add_argument("--budget", type=float, default=0.5, help="seconds of GPU time per measurement")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = []
    for name in QUICK.split() if arguments.quick else arguments.rows:
        results.append(measure(name, arguments))
        if arguments.output:
            settings = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
            save(arguments.output, settings, results)
    table(results)


if __name__ == "__main__":
    main()
