"""Optional GPU packages (docs/how-to/optional-packages.md) beside what runs without them: the same results, and
milliseconds.

    python -m benchmarks.packages --output benchmarks/results/packages-h200.json

Full attention at 8K and 32K tokens, MoBA composed of calls of a varlen kernel, a feed-forward layer in FP8,
and the optimizer's step of a 1B model (as `benchmarks.optimizers` times it). Forward and backward passes are timed
together. Each implementation's results are compared with the first one's of its table; one that cannot run here is
listed with the reason. On a CPU sizes are small, and only that it runs is of interest.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks import full_attention
from benchmarks.attention_rows import Case, Row
from benchmarks.optimizers import time_steps
from benchmarks.record import markdown, save, spread
from benchmarks.timing import milliseconds
from moba_train.attention.kernels import varlen
from moba_train.attention.layout import packed_layout
from moba_train.config.precision import PrecisionConfig
from moba_train.model.feed_forward import FeedForward
from moba_train.model.transformer import Transformer
from moba_train.parallel.float8 import convert_linears, float8_problem

Call = Callable[[], Sequence[Tensor]]
"""Forward and backward pass: outputs and gradients, in the same order for every implementation of a table."""
OPTIMIZERS = ["adamw", "apex", "transformer_engine", "deepspeed_cpu"]


class LeftOutError(Exception):
    """An implementation cannot run here, for the reason that it names."""


def dense_attention(tokens: int, device: str) -> Iterator[tuple[str, Call]]:
    """Causal attention to one document, 32 query heads, 8 key/value heads of 128."""
    tensors = full_attention.inputs(tokens, device)
    layout = packed_layout([tokens], device)
    for name, backend in (
        ("auto", "auto"),
        ("cuDNN", "cudnn"),
        ("torch's FlashAttention-2", "flash"),
        ("flash-attn 2", "flash2"),
    ):
        call = full_attention.ours(backend)(tensors, layout)
        yield name, partial(call, True)


def moba(tokens: int, device: str) -> Iterator[tuple[str, Call]]:
    """MoBA with blocks of 512 and topk 3, its gate included."""
    row = Row(Case(tokens, 512, 3), device)

    def both(backend: str) -> Sequence[Tensor]:
        out, _, _, *gradients = row.using(backend).both()
        return [out, *gradients]

    def composed(kernel: type[varlen.VarlenKernel]) -> Sequence[Tensor]:
        if reason := kernel.refuses(row.q):
            raise LeftOutError(reason)
        with only_kernel(kernel):
            return both("composed")

    yield "auto", lambda: both("auto")
    yield "composed, torch's FlashAttention-2", lambda: composed(varlen.TorchFlash)
    yield "composed, flash-attn 2", lambda: composed(varlen.PackagedFlash2)


@contextmanager
def only_kernel(kernel: type[varlen.VarlenKernel]) -> Iterator[None]:
    """Inside, MoBA is composed of calls of this kernel."""
    usual = varlen.KERNELS
    varlen.KERNELS = (kernel,)
    try:
        yield
    finally:
        varlen.KERNELS = usual


def feed_forward(tokens: int, device: str) -> Iterator[tuple[str, Call]]:
    """A SwiGLU layer, on a GPU of Llama-3-8B's shape: three linear layers, weights in bf16."""
    width, inner = (4096, 14336) if device == "cuda" else (64, 128)
    x, gradient = random_tensors(device, (tokens, width), (tokens, width))
    arms: dict[str, PrecisionConfig | None] = {"bf16": None, "bf16, compiled": None}
    arms |= dict.fromkeys(("torchao", "torchao, compiled"), PrecisionConfig(linear="fp8"))
    arms["transformer_engine"] = PrecisionConfig(linear="fp8", implementation="transformer_engine")
    for name, precision in arms.items():
        reason = float8_problem(precision, device) if precision else ""
        if reason := reason or _no_compiler(name, device):
            yield name, left_out(reason)
            continue
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks = nn.ModuleList([FeedForward(width, inner)])  # whose names are those of a Transformer's layers
        model.to(device, torch.bfloat16)
        if precision:
            convert_linears(cast(Transformer, model), precision)
        layer = cast(nn.ModuleList, model.blocks)[0]
        yield name, differentiated(torch.compile(layer) if name.endswith("compiled") else layer, x, gradient)


def _no_compiler(name: str, device: str) -> str:
    return "on a GPU only" if name.endswith("compiled") and device == "cpu" else ""


def random_tensors(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    """bf16 tensors of normal numbers."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) for shape in shapes]


def differentiated(module: Callable[..., Any], x: Tensor, gradient: Tensor) -> Call:
    """The module's output, and the gradients of x and of its parameters."""
    x = x.detach().requires_grad_()
    parameters = list(cast(nn.Module, module).parameters())

    def call() -> Sequence[Tensor]:
        out = module(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *parameters], gradient)]

    return call


def left_out(reason: str) -> Call:
    """A call that raises LeftOutError."""

    def call() -> Sequence[Tensor]:
        raise LeftOutError(reason)

    return call


def compare(implementations: Iterator[tuple[str, Call]], device: str, budget_s: float) -> dict[str, dict[str, Any]]:
    """For each implementation milliseconds and the largest relative difference of a result from the first one's."""
    found: dict[str, dict[str, Any]] = {}
    want: list[Tensor] = []
    for name, call in implementations:
        found[name] = {}
        try:
            got = [x.detach() for x in call()]
            want = want or got
            found[name]["difference"] = max(map(difference, got, want))
            del got
            if device == "cuda":
                found[name]["both_ms"] = spread(milliseconds(call, budget_s))
        except Exception as error:  # whatever a package or its compiler raises where it cannot do the case
            kind = "" if isinstance(error, LeftOutError) else f"{type(error).__name__}: "
            found[name]["error"] = f"{kind}{error}"[:300]
        print(f"  {name}: {found[name]}", flush=True)
    return found


def difference(got: Tensor, want: Tensor) -> float:
    """Relative difference in norm."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Every comparison, one implementation a line."""
    rows = [["what", "implementation", "ms", "difference from the first"]]
    for what, found in results.items():
        for name, row in found.items():
            if "error" in row:
                rows.append([what, name, f"left out: {row['error'][:90]}", ""])
                continue
            times = row.get("both_ms") or row.get("step_ms")
            off = row.get("difference", row.get("distance_from_torch"))
            rows.append([what, name, f"{times['median']:.4g}" if times else "-", f"{off:.1e}"])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of GPU time per measurement")
    parser.add_argument("--steps", type=int, default=5, help="steps of each optimizer; 0 leaves them out")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"full attention": [8192, 32768], "MoBA 512/3": [32768], "feed-forward": [8192]}
    kinds = {"full attention": dense_attention, "MoBA 512/3": moba, "feed-forward": feed_forward}
    settings = {"budget": arguments.budget, "steps": arguments.steps, "device": device}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for kind, lengths in sizes.items():
        for tokens in lengths if device == "cuda" else [64]:
            what = f"{kind}, {tokens} tokens"
            print(what, flush=True)
            results[what] = compare(kinds[kind](tokens, device), device, arguments.budget)
            save(arguments.output, settings, results)
            if device == "cuda":
                torch.cuda.empty_cache()
    if arguments.steps:
        model = "llama-1b" if device == "cuda" else "tiny"
        timed = time_steps(argparse.Namespace(model=model, arms=OPTIMIZERS, steps=arguments.steps))
        results[f"optimizer, {model}"] = timed
        save(arguments.output, settings, results)
    print(table(results))


if __name__ == "__main__":
    main()
