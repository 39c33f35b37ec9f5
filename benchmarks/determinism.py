"""The cost of `deterministic: true`, and whether results are then bitwise equal.

    python -m benchmarks.determinism --output benchmarks/results/determinism-h200.json

Two tables. `kernels` (on a GPU): dense attention forward and backward by each backend, with and without the switch, and
by MoBA's kernels with every block selected, which is full attention too: milliseconds, and in how many of the repeats
the gradients had other bits. `runs`: the real trainer, twice with the switch and twice without: tokens per second, and
how many tensors of the last checkpoint differ between the two.
"""

import argparse
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import length
from benchmarks.record import save, spread
from benchmarks.timing import milliseconds
from benchmarks.trainer_run import WARM_UP_STEPS, launch, model_shape, recipe, write_corpus
from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.layout import packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import LocalAttention
from moba_train.run.determinism import deterministic
from moba_train.telemetry.jsonl import read_records
from moba_train.tools.compare import compare

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
REPEATS = 5
BLOCK = 4096


def attentions(tokens: int) -> Iterator[tuple[str, LocalAttention, bool]]:
    """(name, attention, whether the switch is on)."""
    for backend, switch in (("cudnn", False), ("flash", False), ("flash", True), ("auto", True)):
        options = FullAttention.Options.model_validate({"backend": backend})
        yield f"{backend}, {'deterministic' if switch else 'as it is'}", FullAttention(options, HEAD_DIM), switch
    every = MobaAttention.Options(block_size=BLOCK, topk=max(1, -(-tokens // BLOCK)), backend="triton")
    yield "moba, every block", MobaAttention(every, HEAD_DIM), True


def gradients(attention: LocalAttention, tensors: list[Tensor], tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs the forward and the backward pass and returns (out, dq, dk, dv)."""
    q, k, v, dout = tensors
    layout = packed_layout([tokens], "cuda")

    def both() -> tuple[Tensor, ...]:
        out, _ = LOCAL_ENGINE(q, k, v, attention, layout)
        return (out, *torch.autograd.grad(out, [q, k, v], dout))

    return both


def kernels(tokens: int, budget_s: float) -> dict[str, Any]:
    """Milliseconds of each attention at this length, and the repeats whose results had other bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    like: dict[str, Any] = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "generator": generator,
        "requires_grad": True,
    }
    tensors = [torch.randn(tokens, heads, HEAD_DIM, **like) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    results: dict[str, Any] = {}
    for name, attention, switch in attentions(tokens):
        both = gradients(attention, tensors, tokens)
        with deterministic(True) if switch else nullcontext():
            first = both()
            others = [both() for _ in range(REPEATS)]
            unequal = sum(any(not torch.equal(x, y) for x, y in zip(first, other, strict=True)) for other in others)
            both_ms = spread(milliseconds(both, budget_s))
        results[name] = {"both_ms": both_ms, "repeats": REPEATS, "repeats_with_other_bits": unequal}
        print(
            f"{tokens} tokens, {name:<24} {both_ms['median']:9.3f} ms, {unequal} of {REPEATS} with other bits",
            flush=True,
        )
    return results


def train(folder: Path, switch: bool, settings: argparse.Namespace) -> Path:
    """Run the real trainer, which saves at its end; returns the run's folder."""
    own = {"attention": {"full_layers": "last:3", "moba": {"block_size": 512, "topk": 3}}, "deterministic": switch}
    sequences = settings.gpus * settings.sequences_per_gpu
    corpus = folder.parent / "corpus"
    folder.mkdir()
    launch(
        recipe(settings.model, corpus, folder / "run", settings.seq_len, sequences, settings.steps, **own),
        folder / "recipe.yaml",
        settings.gpus,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return folder / "run"


def runs(folder: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second, and the differences between two runs, with the switch and without it."""
    needed = settings.steps * settings.gpus * settings.sequences_per_gpu * settings.seq_len
    write_corpus(folder / "corpus", 2 * needed, model_shape(settings.model)["vocab_size"])
    results: dict[str, Any] = {}
    for switch in (False, True):
        one, again = (train(folder / f"{name}-{switch}", switch, settings) for name in ("one", "again"))
        rates = [
            record["tokens_per_s"]
            for run in (one, again)
            for record in read_records(run / "metrics.jsonl")
            if record["type"] == "metrics" and record["step"] > WARM_UP_STEPS
        ]
        tensors = compare(one, again)
        steps = compare(one / "metrics.jsonl", again / "metrics.jsonl")
        results["deterministic" if switch else "as it is"] = {
            "tokens_per_s": spread(rates),
            "tensors": tensors.compared,
            "tensors_that_differ": len(tensors.differing),
            "first_step_that_differs": steps.differing[0] if steps.differing else None,
        }
        print(
            f"deterministic: {str(switch).lower():<6} {statistics.median(rates):10.0f} tokens/s, between two runs "
            f"{len(tensors.differing)} of {tensors.compared} tensors differ",
            flush=True,
        )
        for run in (one, again):  # two checkpoints at a time are enough for a disk
            shutil.rmtree(run)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", help="a file of configs/models")
    parser.add_argument("--gpus", type=int, default=1, help="ranks")
    parser.add_argument("--seq-len", type=length, default=8192)
    parser.add_argument("--sequences-per-gpu", type=int, default=2, help="sequences per rank and optimizer step")
    parser.add_argument("--steps", type=int, default=20, help="of each run; 0: no runs")
    parser.add_argument("--tokens", type=length, nargs="*", default=[8192, 32768, 131072], help="lengths for `kernels`")
    parser.add_argument(
        "--budget", dest="budget_s", type=float, default=1.0, help="seconds of GPU time for each kernel"
    )
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    results: dict[str, Any] = {}
    if torch.cuda.is_available():
        results["kernels"] = {tokens: kernels(tokens, settings.budget_s) for tokens in settings.tokens}
    if settings.steps:
        with tempfile.TemporaryDirectory() as temporary:
            results["runs"] = runs(Path(temporary), settings)
    save(settings.output, {key: value for key, value in vars(settings).items() if key != "output"}, results)


if __name__ == "__main__":
    main()
