"""Output projection with cross entropy, forward and backward: ours beside liger-kernel's and torch's fused ones.

    python -m benchmarks.loss_compare --output benchmarks/results/loss-compare-h200-logits-once.json

Hidden states and weight in bf16, every token carries loss. Each implementation's loss and gradients are compared with
plain float32 logits of one chunk first. Milliseconds, and the peak of memory above the inputs, in GiB, gradients
included. An implementation that is not installed is left out, with a line that says so. On a CPU the sizes are a
sixteenth; only that it runs is then of interest.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_memory import measured_bytes
from benchmarks.options import length
from benchmarks.record import markdown, save, spread
from benchmarks.timing import queued
from moba_train.model import loss as ours

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Sum of the token losses of hidden states [T, D], weight [V, D] and labels int64 [T]."""


def chunked(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, of_chunk: ours.ChunkLoss = ours.chunk_loss
) -> Tensor:
    """What the trainer uses: the plain function of a chunk, or with `compile: true` the compiled one."""
    index_T = torch.arange(len(labels_T), device=labels_T.device)
    weights_T = torch.ones(len(labels_T), device=labels_T.device)
    return ours.weighted_loss_sum(hidden_TD, weight_VD, labels_T, index_T, weights_T, of_chunk)


def plain(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """All logits at once, in float32."""
    return F.cross_entropy(F.linear(hidden_TD, weight_VD).float(), labels_T, reduction="sum")


def implementations() -> dict[str, Loss | str]:
    """What can run here; for others, the reason why not."""
    compiled = partial(chunked, of_chunk=ours.CompiledChunkLoss())
    found: dict[str, Loss | str] = {"ours": chunked, "ours, compiled chunk": compiled, "plain logits": plain}
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
            result = liger_fused_linear_cross_entropy(hidden_TD, weight_VD, labels_T, reduction="sum")
            return result[0] if isinstance(result, tuple) else result

        found["liger-kernel"] = liger
    except Exception as error:  # whatever its import raises without a GPU or a fitting Triton
        found["liger-kernel"] = f"cannot be imported: {type(error).__name__}: {error}"
    fused = getattr(F, "linear_cross_entropy", None)
    found["torch"] = partial(fused, reduction="sum") if fused else f"torch {torch.__version__} has none (2.13 has)"
    return found


def gradients(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The loss, and the gradients of hidden states and weight of the mean loss."""
    hidden_TD, weight_VD, labels_T = inputs
    total = loss(hidden_TD, weight_VD, labels_T)
    return total.detach(), *torch.autograd.grad(total / len(labels_T), (hidden_TD, weight_VD))


def errors(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    """Relative errors of `gradients` against float32."""
    exact = [x.detach().float().requires_grad_() if x.is_floating_point() else x for x in inputs]
    expected = gradients(plain, (exact[0], exact[1], exact[2]))
    found = gradients(loss, inputs)
    pairs = zip(found, expected, strict=True)
    return [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]


def inputs_of(tokens: int, width: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of norm one an element, a weight that gives logits of about one, and labels."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((tokens, width, 1.0), (vocabulary, width, width**-0.5))
    hidden_TD, weight_VD = (
        (scale * torch.randn(rows, columns, generator=generator, device=device)).bfloat16().requires_grad_()
        for rows, columns, scale in shapes
    )
    return hidden_TD, weight_VD, torch.randint(vocabulary, (tokens,), generator=generator, device=device)


def measure(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], calls: int) -> dict[str, Any]:
    """Milliseconds of forward and backward (on a GPU), and peak GiB above the inputs."""

    def step() -> None:
        gradients(loss, inputs)

    device = inputs[0].device
    step()
    peak = measured_bytes(step, device) / 2**30
    times = {"both_ms": spread(queued(step, calls))} if device.type == "cuda" else {}
    return times | {"peak_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=length, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    divisor = 1 if device.type == "cuda" else 16
    width = arguments.hidden_size // divisor
    vocabulary = arguments.vocab_size // divisor
    results: dict[str, Any] = {}
    rows = [["tokens", "loss", "ms", "peak GiB", "error of loss", "of d hidden", "of d weight"]]
    settings = {key: value for key, value in vars(arguments).items() if key != "output"} | {"divisor": divisor}
    for name, loss in implementations().items():
        if isinstance(loss, str):
            print(f"{name}: {loss}", flush=True)
            results[name] = {"error": loss}
            continue
        results[name] = {}
        for tokens in (given // divisor for given in arguments.tokens):
            try:
                wrong = errors(loss, inputs_of(min(tokens, 2048), width, vocabulary, device))
                found = measure(loss, inputs_of(tokens, width, vocabulary, device), arguments.calls)
            except Exception as error:  # one that fails, for memory or at all, must not end the others
                results[name][str(tokens)] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                rows.append([str(tokens), name, type(error).__name__, *[""] * 4])
                continue
            results[name][str(tokens)] = found | {"errors": wrong}
            ms = f"{found['both_ms']['median']:.1f}" if "both_ms" in found else ""
            rows.append([str(tokens), name, ms, f"{found['peak_gib']:.2f}", *(f"{e:.1e}" for e in wrong)])
        save(arguments.output, settings, results)
    print(markdown(rows))


if __name__ == "__main__":
    main()
