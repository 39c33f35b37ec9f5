"""Seconds from the command to the end of step 1, of the real trainer and of torchtitan, with an empty cache of compiled
code and with the one that such a start leaves.

    python -m benchmarks.startup --model llama3-8b --gpus 2 --rows 8K:full 8K:moba-512-3-last3 8K:torchtitan \\
        --output benchmarks/results/startup-8b-h200-x2.json

Rows are those of `benchmarks.training`, with random tokens and weights; nothing is read or saved but the corpus.
`cold`: torch's, Triton's and CUDA's caches are new folders; `warm`: the next start, with these. Files that the machine
has read before are in its memory in both. The time runs from torchrun's start to the first record of metrics;
`first_step_s` is the part of step 1, which compiles.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import training
from benchmarks.options import need_gpus
from benchmarks.record import markdown, save, spread
from benchmarks.trainer_run import model_shape, write_corpus
from benchmarks.training_rows import Row, parse_row

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
_SECONDS = ("to_first_step_s", "first_step_s")


@contextmanager
def new_caches() -> Iterator[None]:
    """Let programs that start meanwhile keep compiled code in new folders, which are gone at the end."""
    before = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({name: str(Path(folder) / name) for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value


def measure(row: Row, folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Spreads of the seconds by `cold` and `warm`; of a start that failed its `error`, and no more starts."""
    seconds: dict[str, dict[str, list[float]]] = {state: {key: [] for key in _SECONDS} for state in ("cold", "warm")}
    for _ in range(arguments.repetitions):
        with new_caches():
            for state, found in seconds.items():
                result = training.measure(replace(row, warm=1, steps=1), folder, arguments, arguments.start_seconds)
                if "error" in result:
                    return {state: {key: result[key] for key in ("error", "log")}}
                for key in _SECONDS:
                    found[key].append(result[key])
    return {state: {key: spread(values) for key, values in found.items()} for state, found in seconds.items()}


def run(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Measure the `rows` one by one, save each, and print the table."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    settings = {key: value for key, value in vars(arguments).items() if key not in ("output", "rows")}
    table = [["row", "cold, s", "of it step 1", "warm, s", "of it step 1"]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        needed = max(4 * row.sequences(arguments.gpus, arguments.sequences_per_gpu) * row.seq_len for row in rows)
        for documents in {row.documents for row in rows}:
            write_corpus(folder / documents, 2 * needed, model_shape(arguments.model)["vocab_size"], documents)
        for row in rows:
            results[row.name] = found = measure(row, folder, arguments)
            save(arguments.output, settings, results)
            failed = [state["error"][:100] for state in found.values() if "error" in state]
            medians = [f"{found[state][key]['median']:.1f}" for state in found for key in _SECONDS if not failed]
            table.append([f"`{row.name}`", *failed, *medians])
            print(f"{row.name}: {', '.join(failed) or 'done'}", flush=True)
    print(f"\n{markdown(table)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="a file of configs/models")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rows", nargs="+", default=["8K:full", "8K:torchtitan"], metavar="ROW")
    parser.add_argument("--sequences-per-gpu", type=int, default=1, help="sequences per GPU and optimizer step")
    parser.add_argument("--repetitions", type=int, default=1, help="pairs of starts, one cold and one warm")
    parser.add_argument("--start-seconds", type=float, default=400, help="time after which a start is given up")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        rows = [parse_row(text, Row(policy="budget")) for text in arguments.rows]
    except ValueError as error:
        parser.error(f"--rows: {error}")
    need_gpus(parser, arguments.gpus)
    run(rows, arguments)


if __name__ == "__main__":
    main()
