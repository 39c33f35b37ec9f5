"""Checkpoints from layout to layout: each resumes what the one before has saved, trains, and saves for the next.

    python -m benchmarks.checkpoint_layouts --model llama3-8b --gpus 4 --sequences 16 --rows 8K:full:full:micro1 \\
        8K:full:full:tp4:micro4 8K:full:full:tp2:cp2:micro2 8K:full:full:pp4:micro1 8K:full:full:pp2:micro1 \\
        --output benchmarks/results/checkpoint-layouts-8b-h200-x4.json

Rows are those of `benchmarks.training`, of one length; all trainings share one run folder, and the first layout comes
once more at the end. A training is killed once its save is done and the step after it, which the next layout trains
again from the checkpoint: both losses are in the result, as their difference is what resuming changed. On a CPU,
`--rows 256:full:none 256:full:none:tp2 256:full:none:cp2` with the default model. A checkpoint is deleted once the next
layout has loaded it, so that the disk of $TMPDIR holds one at a time (8B: 90 GiB).
"""

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import markdown, save
from benchmarks.trainer_run import model_shape, run_until, trainer_command, write_corpus
from benchmarks.training_rows import Row, parse_row
from moba_train.checkpoint.manifest import step_name
from moba_train.checkpoint.publish import latest_checkpoint
from moba_train.telemetry.jsonl import read_records


def run(rows: Sequence[Row], folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all rows one after the other, and the first once more. Returns what each load and save took, and saves it
    after each row."""
    corpus, metrics, checkpoints = folder / "corpus", folder / "run" / "metrics.jsonl", folder / "run" / "checkpoints"
    steps = arguments.every * (len(rows) + 2)
    tokens = 2 * steps * arguments.sequences * rows[0].seq_len
    write_corpus(corpus, tokens, model_shape(arguments.model)["vocab_size"], "long")
    results: list[dict[str, Any]] = []
    for number, row in enumerate([*rows, rows[0]]):
        saved = arguments.every * (number + 1) if number < len(rows) else None
        file = folder / "recipe.yaml"
        content = recipe(row, corpus, folder / "run", steps, arguments)
        resumed = arguments.every * number

        def enough(saved: int | None = saved, resumed: int = resumed) -> bool:
            records = since(resumed, read_records(metrics)) if metrics.exists() else []
            if records and resumed:
                shutil.rmtree(checkpoints / step_name(resumed), ignore_errors=True)
            if saved is None:
                return _loss(records, resumed + 1) is not None
            return _loss(records, saved + 1) is not None and any("checkpoint_save_s" in x for x in records)

        run_until(enough, trainer_command(content, file, arguments.gpus, *row.overrides), arguments.row_seconds)
        result = summarise(since(resumed, read_records(metrics)), resumed, saved) | {"row": row.name}
        if number:
            result |= {"from": results[-1]["row"], "loss_before": results[-1]["loss_after_save"]}
        if saved is not None and (path := latest_checkpoint(checkpoints)):
            result["checkpoint_gib"] = sum(part.stat().st_size for part in path.iterdir()) / 2**30
        results.append(result)
        print(result, flush=True)
        save(arguments.output, {key: value for key, value in vars(arguments).items() if key != "output"}, results)
    return results


def recipe(row: Row, corpus: Path, run_dir: Path, steps: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row's recipe for `steps` steps in all, with a save every few."""
    content = row.recipe(arguments.model, corpus, run_dir, arguments.gpus, 1, arguments.layers)
    batch = arguments.sequences * row.seq_len
    stage = {"name": "only", "seq_len": row.seq_len, "tokens": steps * batch}
    return content | {
        "batch_tokens": batch,
        "stages": [stage],
        "checkpoint": {"every": arguments.every, "keep_last": 1},
    }


def since(resumed: int, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records from the event on that says that a run has resumed from step `resumed`; 0: all."""
    if not resumed:
        return records
    begins = [at for at, x in enumerate(records) if x["type"] == "resume" and x["step"] == resumed]
    return records[begins[-1] :] if begins else []


def summarise(records: list[dict[str, Any]], resumed: int, saved: int | None) -> dict[str, Any]:
    """What a training took that resumed from step `resumed` (0: it began) and saved step `saved` (None: none)."""
    found: dict[str, Any] = {}
    if resumed:
        found = {"load_s": records[0]["checkpoint_load_s"], "loss_resumed": _loss(records, resumed + 1)}
    if saved is None:
        return found
    own = {x["step"]: x["step_s"] for x in records if x["type"] == "metrics" and x["step"] > resumed + 1}
    stalls = [x["checkpoint_stall_s"] for x in records if x["step"] == saved and "checkpoint_stall_s" in x]
    return found | {
        "step_s": statistics.median(seconds for step, seconds in own.items() if step <= saved),
        "stall_s": stalls[-1],
        "step_after_save_s": own[saved + 1],
        "save_s": next(x["checkpoint_save_s"] for x in reversed(records) if "checkpoint_save_s" in x),
        "loss_after_save": _loss(records, saved + 1),
    }


def _loss(records: Sequence[dict[str, Any]], step: int) -> float | None:
    """The training loss of a step; None: it is not there."""
    return next((x["loss"] for x in records if x["type"] == "metrics" and x["step"] == step), None)


def table(results: Sequence[dict[str, Any]]) -> str:
    """All layouts as a Markdown table."""
    lines = [["layout", "step, s", "stall, s", "step after, s", "save, s", "load, s", "loss before and after resuming"]]
    for result in results:
        numbers = [
            f"{result[key]:.3f}" if key in result else ""
            for key in ("step_s", "stall_s", "step_after_save_s", "save_s", "load_s")
        ]
        losses = f"{result['loss_before']:.6f}, {result['loss_resumed']:.6f}" if "from" in result else ""
        lines.append([f"`{result['row']}`", *numbers, losses])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a file of configs/models; tiny is the quick start's")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--gpus", type=int, default=2, help="ranks; on the CPU where there is no GPU")
    parser.add_argument("--rows", nargs="+", required=True, metavar="ROW", help="as benchmarks.training takes them")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of a step")
    parser.add_argument("--every", type=int, default=4, help="steps between saves, at least 3")
    parser.add_argument("--row-seconds", type=float, default=240, help="time after which a layout is given up")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        rows = [parse_row(text, Row()) for text in arguments.rows]
    except ValueError as error:
        parser.error(f"--rows: {error}")
    if arguments.every < 3:
        parser.error(f"--every: {arguments.every} given, at least 3 allowed")
    if len({row.seq_len for row in rows}) > 1 or any(row.by_torchtitan for row in rows):
        parser.error(f"--rows: {' '.join(arguments.rows)} given; rows of one length by our trainer allowed")
    with tempfile.TemporaryDirectory() as folder:
        results = run(rows, Path(folder), arguments)
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
