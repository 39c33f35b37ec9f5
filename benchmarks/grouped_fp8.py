"""Grouped products of experts in bf16 and in FP8 with a scale for each row, and what quantisation costs, on one GPU.

    python -m benchmarks.grouped_fp8 --output benchmarks/results/grouped-fp8-h200.json

A layer of Qwen3-30B-A3B with an uneven load; gate and up projection are one product. `dx` and `dw` are the gradients of
inputs and weights. Scales go along the summed dimension: the forward product and dx take rows of inputs, gradients and
weights, once transposed, by compiled PyTorch; dw takes columns of each expert's rows, transposed, by a Triton kernel.
FP8 needs a multiple of 16 rows for each expert, which both precisions get. Fails if FP8 is further than 5 % from bf16.

Shape suffixes: n rows, m those of one expert, E experts, A columns of inputs, B of results, C any.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.options import need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.timing import milliseconds
from moba_train.attention.kernels.table import has_triton

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
LAYER = {"experts": 128, "hidden": 2048, "width": 768, "active": 8}
SMALL = {"experts": 8, "hidden": 64, "width": 32, "active": 2}


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x [..., C] in FP8, contiguous; factor of each row, [...] in float32, which gives back x)."""
    wide = x.float()
    scale = LARGEST / wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (wide * scale).clamp(-LARGEST, LARGEST).to(FP8).contiguous(), (1 / scale).squeeze(-1).contiguous()


def quantize_columns(x_nC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """(x in FP8, transposed [C, n]; such a factor of each column of each expert, [E * C])."""
    inverse_EC = torch.empty(len(ends_E), x_nC.shape[1], device=x_nC.device)
    out_Cn = torch.empty(*x_nC.T.shape, device=x_nC.device, dtype=FP8)
    if x_nC.is_cuda:
        _columns[(len(ends_E), len(out_Cn) // 64)](x_nC, ends_E, out_Cn, inverse_EC, *out_Cn.shape, 128, 64)
    else:
        for expert, (end, x_mC) in enumerate(zip(ends_E.tolist(), x_nC.tensor_split(ends_E[:-1].long()), strict=True)):
            out_Cn[:, end - len(x_mC) : end], inverse_EC[expert] = quantize_rows(x_mC.T)
    return out_Cn, inverse_EC.flatten()


if has_triton():
    import triton
    import triton.language as tl

    @triton.jit
    def _columns(x, ends, out, inverse, columns, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's
        expert = tl.program_id(0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        end = tl.load(ends + expert)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        most = tl.zeros([COLUMNS], tl.float32)
        for first in range(start, end, ROWS):
            row = (first + tl.arange(0, ROWS)).to(tl.int64)
            part = tl.load(x + row[:, None] * columns + column[None, :], mask=row[:, None] < end, other=0.0)
            most = tl.maximum(most, tl.max(tl.abs(part.to(tl.float32)), axis=0))
        scale = 448.0 / tl.maximum(most, 1e-12)
        tl.store(inverse + expert * columns + column, 1.0 / scale)
        for first in range(start, end, ROWS):
            row = (first + tl.arange(0, ROWS)).to(tl.int64)
            part = tl.load(x + row[:, None] * columns + column[None, :], mask=row[:, None] < end, other=0.0)
            place = out + column[:, None].to(tl.int64) * rows + row[None, :]
            tl.store(place, tl.trans((part.to(tl.float32) * scale[None, :]).to(tl.float8e4nv)), mask=row[None, :] < end)


def product(a: Tensor, s_a: Tensor, b: Tensor, s_b: Tensor, ends_E: Tensor) -> Tensor:
    """Grouped product of a [n, C] and b [E, B, C], or of a [B, n] and b [A, n] (by expert: [E, B, A])."""
    if a.is_cuda:
        return torch._scaled_grouped_mm(a, b.mT, s_a, s_b, ends_E, out_dtype=torch.bfloat16, use_fast_accum=True)
    if b.dim() == 3:
        return F.grouped_mm(a.float() * s_a[:, None], (b.float() * s_b[..., None]).mT, offs=ends_E)
    sums_EBA = F.grouped_mm(a.float(), b.float().mT, offs=ends_E)
    return sums_EBA * s_a.view(len(ends_E), -1, 1) * s_b.view(len(ends_E), 1, -1)


def timed(call: Callable[[], Any], device: str) -> dict[str, float]:
    """Spread of the milliseconds of a call; on a CPU of one, by the clock."""
    return spread(milliseconds(call, 0.2) if device == "cuda" else [1000 * timeit(call, number=1)])


def measure(tokens: int, layer: dict[str, int], columns_in: int, columns_out: int, device: str) -> dict[str, Any]:
    """Milliseconds of each product and quantisation of a projection, and relative errors of FP8."""
    torch.compiler.reset()  # sizes are constants of the compiled code
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    shares_E = (0.4 * draw(layer["experts"])).softmax(0)
    ends_E = ((tokens * layer["active"] * shares_E / 16).int() + 1).cumsum(0).int() * 16
    x_nA = draw(int(ends_E[-1]), columns_in).bfloat16()
    dy_nB = (1e-3 * draw(len(x_nA), columns_out)).bfloat16()
    weight_EBA = (0.02 * draw(layer["experts"], columns_out, columns_in)).bfloat16()
    by_rows = torch.compile(quantize_rows, dynamic=False) if device == "cuda" else quantize_rows
    quantisations: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "rows of x": partial(by_rows, x_nA),
        "rows of dy": partial(by_rows, dy_nB),
        "weights": partial(by_rows, weight_EBA),
        "weights, transposed": partial(by_rows, weight_EBA.mT),
        "columns of x": partial(quantize_columns, x_nA, ends_E),
        "columns of dy": partial(quantize_columns, dy_nB, ends_E),
    }
    results: dict[str, Any] = {name: {"ms": timed(call, device)} for name, call in quantisations.items()}
    x, dy, weight, transposed, x_columns, dy_columns = (call() for call in quantisations.values())
    for name, in_bf16, in_fp8 in (
        ("forward", (x_nA, weight_EBA.mT), (x, weight)),
        ("dx", (dy_nB, weight_EBA), (dy, transposed)),
        ("dw", (dy_nB.mT, x_nA), (dy_columns, x_columns)),
    ):
        calls = partial(F.grouped_mm, *in_bf16, offs=ends_E), partial(product, *in_fp8[0], *in_fp8[1], ends_E)
        want, got = (call().float() for call in calls)
        if (error := float((got - want).norm() / want.norm())) > 0.05:
            raise SystemExit(f"{name} in FP8: {error:.3f} away from bf16, relatively; allowed: 0.05")
        results[f"bf16 {name}"] = {"ms": timed(calls[0], device)}
        results[f"FP8 {name}"] = {"ms": timed(calls[1], device), "error": error}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="rehearsal: few, small experts, FP8 multiplied in float32")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    need_gpus(parser, 0 if given.cpu else 1)
    layer, lengths, device = (SMALL, [1], "cpu") if given.cpu else (LAYER, [8, 64], "cuda")
    shapes = {"gate and up": (layer["hidden"], 2 * layer["width"]), "down": (layer["width"], layer["hidden"])}
    results = {}
    parts = "bf16", "FP8", "rows", "columns", "weights"
    rows = [["tokens", *(f"{part}, ms" for part in parts), "FP8 with quantisation, ms"]]
    for length in lengths:
        found = {name: measure(1024 * length, layer, *shape, device) for name, shape in shapes.items()}
        ms = [(name, case["ms"]["median"]) for cases in found.values() for name, case in cases.items()]
        sums = {part: sum(median for name, median in ms if name.startswith(part)) for part in parts}
        results[f"{length}K"] = {**found, "layer, ms": sums}
        rows.append([f"{length}K", *(f"{x:.1f}" for x in (*sums.values(), sum(sums.values()) - sums["bf16"]))])
    if given.output:
        save(given.output, layer, results)
    print(markdown(rows))


if __name__ == "__main__":
    main()
