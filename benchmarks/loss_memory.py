"""Memory of the output projection and its loss, by the fraction of tokens that carry loss: predicted and measured.

    python -m benchmarks.loss_memory --output benchmarks/results/loss-memory-h200.json

It runs forward and backward of `weighted_loss_sum` alone, in bf16, on the hidden states of one sequence. Default sizes
are those of Llama-3-8B with 128K tokens on a GPU, and a sixteenth of each on a CPU. The measurement is the peak above
the inputs: gradients, the rows with loss, logits. The table also has the prediction, and that of plain logits for all
tokens.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import save
from moba_train.model.loss import chunk_tokens, weighted_loss_sum

DENSITIES = (0.001, 0.01, 0.1, 1.0)
_BF16 = 2
_FP32 = 4


def logits_bytes(rows: int, vocab_size: int) -> int:
    """Peak bytes of the cross entropy of `rows` rows: log-probabilities, their gradient and that of the logits, all
    float32."""
    return 3 * _FP32 * rows * vocab_size


def predicted_bytes(tokens: int, rows: int, vocab_size: int, hidden_size: int) -> int:
    """Peak bytes of `weighted_loss_sum` and its backward pass above its inputs, where `rows` of `tokens` carry loss.

    The gradient of the hidden states is there from the beginning, that of the weight from the first chunk on. A chunk
    adds its rows and its logits; their float32 tensors are freed before its gradients of weight and rows come. The
    backward pass makes both gradients anew, scaled.
    """
    at_once = min(rows, chunk_tokens(vocab_size))
    hidden, weight, kept = (_BF16 * number * hidden_size for number in (tokens, vocab_size, at_once))
    chunk = kept + max(logits_bytes(at_once, vocab_size), kept + weight + _BF16 * at_once * vocab_size)
    return max(hidden + chunk + (weight if rows > at_once else 0), 2 * (hidden + weight))


def measured_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Peak bytes that `step` allocates above those that were allocated before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    held = peak = 0
    kineto = record.profiler
    assert kineto is not None
    changes = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def measure(tokens: int, rows: int, vocab_size: int, hidden_size: int, device: torch.device) -> int:
    """Measured peak bytes of `weighted_loss_sum` and its backward pass above its inputs."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return x.requires_grad_()

    hidden_TD = normal(tokens, hidden_size)
    weight_VD = normal(vocab_size, hidden_size)
    index_n = torch.arange(tokens - rows, tokens, device=device)
    labels_n = torch.randint(vocab_size, (rows,), generator=generator, device=device)
    weights_n = torch.ones(rows, device=device)

    def step() -> None:
        hidden_TD.grad = weight_VD.grad = None
        weighted_loss_sum(hidden_TD, weight_VD, labels_n, index_n, weights_n).backward()

    step()
    hidden_TD.grad = weight_VD.grad = None
    return measured_bytes(step, device)


def main() -> None:
    """Print the table and write the result file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    divisor = 1 if device.type == "cuda" else 16
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072 // divisor)
    parser.add_argument("--vocab-size", type=int, default=128256 // divisor)
    parser.add_argument("--hidden-size", type=int, default=4096 // divisor)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    tokens = arguments.tokens
    vocab_size = arguments.vocab_size
    hidden_size = arguments.hidden_size
    all_logits = logits_bytes(tokens, vocab_size)
    results: list[dict[str, Any]] = []
    print(f"{tokens} tokens, vocabulary {vocab_size}, width {hidden_size}; MiB above the inputs")
    print(f"{'density':>8} {'rows':>8} {'measured':>10} {'predicted':>10} {'all logits':>11}")
    for density in DENSITIES:
        rows = round(density * tokens)
        sizes = (tokens, rows, vocab_size, hidden_size)
        result = {"density": density, "rows": rows, "all_logits": all_logits}
        result |= {"measured": measure(*sizes, device), "predicted": predicted_bytes(*sizes)}
        results.append(result)
        shown = [result[key] / 2**20 for key in ("measured", "predicted", "all_logits")]
        print(f"{density:>8.1%} {rows:>8} {shown[0]:>10.1f} {shown[1]:>10.1f} {shown[2]:>11.1f}", flush=True)
    chunk = chunk_tokens(vocab_size)
    settings = {"tokens": tokens, "vocab_size": vocab_size, "hidden_size": hidden_size, "chunk_tokens": chunk}
    save(arguments.output, settings, results)


if __name__ == "__main__":
    main()
