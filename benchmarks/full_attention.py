"""Compares kernels for dense causal attention on one GPU.

    python -m benchmarks.full_attention --output benchmarks/results/full-attention-h200.json

Shape of Llama-3-8B's attention: 32 query heads, 8 key/value heads of 128, bf16, random data. Every result is compared
with that of the first kernel in the same run. Times are medians over CUDA events.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.timing import milliseconds
from moba_train.attention.full import FullAttention
from moba_train.attention.protocol import BackwardState, Layout, packed_layout

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
Results = list[Tensor]
"""[out, lse, dq, dk, dv], or [out, lse] after a forward pass alone."""
Call = Callable[[bool], Results]
"""A kernel on fixed inputs; the argument says whether to run the backward pass too."""


def random_lengths(total: int) -> list[int]:
    """Documents of 200 to 32K tokens, short ones as likely as long ones (uniform in the logarithm); the last is cut."""
    generator = random.Random(0)
    lengths = [0]
    while sum(lengths) < total:
        length = round(math.exp(generator.uniform(math.log(200), math.log(2**15))))
        lengths.append(min(length, total - sum(lengths)))
    return lengths[1:]


def inputs(tokens: int, device: str = "cuda") -> Results:
    """q, k, v, dout."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def full(backend: str) -> FullAttention:
    """Full attention with this backend."""
    return FullAttention(FullAttention.Options.model_validate({"backend": backend}), HEAD_DIM)


def ours(backend: str) -> Callable[[Results, Layout], Call]:
    """A kernel of `KERNELS`: full attention with this backend."""

    def prepare(tensors: Results, layout: Layout) -> Call:
        attention = full(backend)
        q, k, v, dout = tensors

        def call(backward: bool) -> Results:
            out, lse = attention.attend(q, k, v, layout, ())
            grads = attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, ()) if backward else ()
            return [out, lse, *grads]

        return call

    return prepare


def cudnn_varlen(tensors: Results, layout: Layout) -> Call:
    """cuDNN with ragged offsets: documents of any lengths in one call."""
    q, k, v, dout = tensors
    edges = layout.cu_seqlens, layout.cu_seqlens, layout.max_seqlen, layout.max_seqlen
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)

    def call(backward: bool) -> Results:
        out, lse, *_ = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, *edges, True, 0.0, True, False, scale=SCALE
        )
        grads = ()
        if backward:
            grads = torch.ops.aten._cudnn_attention_backward(
                dout, q, k, v, out, lse, no_dropout, no_dropout, None, *edges, 0.0, True, scale=SCALE
            )
        return [out, lse.view(q.shape[:2]).T, *grads]

    return call


def flex(tensors: Results, layout: Layout) -> Call:
    """FlexAttention, compiled, with a block mask of documents and causality, which is made and timed beforehand."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    tokens = layout.total
    document = layout.documents(torch.arange(tokens, device="cuda")).int()

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (document[query] == document[key])

    make_mask = torch.compile(create_block_mask, dynamic=False)
    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        mask = make_mask(visible, None, None, tokens, tokens, device="cuda")
        torch.cuda.synchronize()
    print(f"  FlexAttention: its block mask takes {1000 * (time.perf_counter() - start):.1f} ms", flush=True)
    q, k, v, dout = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def call(backward: bool) -> Results:
        with torch.set_grad_enabled(backward):
            out, aux = compiled(*leaves, block_mask=mask, scale=SCALE, enable_gqa=True, return_aux=AuxRequest(lse=True))
        grads = torch.autograd.grad(out, leaves, dout) if backward else ()
        out_THD, *grads_THD = (x.detach()[0].transpose(0, 1) for x in (out, *grads))
        return [out_THD, aux.lse.detach()[0], *grads_THD]

    return call


KERNELS: dict[str, Callable[[Results, Layout], Call]] = {
    "FlashAttention-2": ours("flash"),
    "cuDNN": ours("cudnn"),
    "flash-attn-4": ours("flash4"),
    "FlexAttention": flex,
    "cuDNN varlen": cudnn_varlen,
}


def differences(got: Results, want: Results) -> dict[str, float]:
    """Relative differences in norm of the results that both have; about 0.003 where both are right in bf16."""
    pairs = zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=False)
    return {name: ((a.float() - b.float()).norm() / b.float().norm()).item() for name, a, b in pairs}


def measured(call: Call, budget_s: float) -> dict[str, Any]:
    """Spreads of the milliseconds of the forward pass and of both passes."""
    return {
        "forward_ms": spread(milliseconds(lambda: call(False), budget_s)),
        "both_ms": spread(milliseconds(lambda: call(True), budget_s)),
    }


def describe(row: dict[str, Any]) -> str:
    """Median times and differences as text."""
    errors = " ".join(f"{name} {error:.1e}" for name, error in row["difference"].items())
    return f"{row['forward_ms']['median']:.2f} / {row['both_ms']['median']:.2f} ms, difference {errors}"


def compare(name: str, lengths: list[int], kernels: list[str], budget_s: float) -> dict[str, Any]:
    """Check and time these kernels on documents of these lengths."""
    layout = packed_layout(lengths, "cuda")
    tensors = inputs(sum(lengths))
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    auto = full("auto").pick(tensors[0], layout).__name__.lower()
    result: dict[str, Any] = {"case": name, "lengths": lengths, "auto": auto, "kernels": {}}
    print(f"{name}: {len(lengths)} documents, the longest of {max(lengths)}; auto takes {auto}", flush=True)
    want: Results = []
    for kernel in kernels:
        row: dict[str, Any] = {}
        result["kernels"][kernel] = row
        try:
            call = KERNELS[kernel](tensors, layout)
            got = call(True)
            want = want or got
            row["difference"] = differences(got, want)
            row["right"] = all(error < 0.02 for error in row["difference"].values())
            del got
            row |= measured(call, budget_s)
            # 2 products forward, 5 backward
            row["tflops"] = 7 * 2e-9 * HEADS * HEAD_DIM * pairs / row["both_ms"]["median"]
            print(f"  {kernel}: {describe(row)}, {row['tflops']:.0f} TFLOP/s", flush=True)
        except Exception as error:  # whatever a kernel or its compiler raises where it cannot do the case
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            print(f"  {kernel}: {row['error'][:110]}", flush=True)
        torch.cuda.empty_cache()
    return result


def times(row: dict[str, Any]) -> str:
    """A cell of the table: milliseconds forward / forward and backward."""
    if "both_ms" not in row:
        return "–"
    wrong = "" if row["right"] else " WRONG"
    return f"{row['forward_ms']['median']:.3g} / {row['both_ms']['median']:.4g}{wrong}"


def kernels_table(results: list[dict[str, Any]], kernels: list[str]) -> None:
    """Print a Markdown table with a line for each case."""
    lines = [["forward / forward and backward, ms", *kernels, "auto"]]
    for result in results:
        lines.append([result["case"], *(times(result["kernels"][kernel]) for kernel in kernels), result["auto"]])
    print(f"\n{markdown(lines)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=list(KERNELS),
        default=[name for name in KERNELS if name != "cuDNN varlen"],
        help="cuDNN varlen is wrong and can end the process (benchmarks/LOG.md)",
    )
    parser.add_argument("--budget", type=float, default=0.5, help="seconds of GPU time per measurement")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_gpus(parser)
    settings: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
    results: list[dict[str, Any]] = []

    cases = {f"{size}K": [size * 1024] for size in (8, 32, 64)}
    cases |= {"8 x 8K": [8192] * 8, "64K in random lengths": random_lengths(2**16)}
    for name, lengths in cases.items():
        results.append(compare(name, lengths, arguments.kernels, arguments.budget))
        if arguments.output:
            save(arguments.output, settings, results)
    kernels_table(results, arguments.kernels)


if __name__ == "__main__":
    main()
