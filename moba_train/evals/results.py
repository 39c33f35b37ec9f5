"""The results of `moba-train eval` as JSON, beside the checkpoint. docs/evaluation.md describes the file."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moba_train.checkpoint.recipe import SavedRun, Training, run_folder
from moba_train.config.stages import Stage
from moba_train.evals.evaluation import EvaluationContext, EvaluationResult
from moba_train.evals.options import EvaluationOptions
from moba_train.evals.variants import Layers

FORMAT = 1
FOLDER = "evaluations"
"""Folder of a run with the results of its checkpoints."""


def result_json(
    saved: SavedRun,
    training: Training,
    options: EvaluationOptions,
    context: EvaluationContext,
    results: Mapping[str, EvaluationResult],
) -> dict[str, Any]:
    """Everything that was measured by `moba-train eval`, and what it was measured on."""
    return measured_json(saved, training, options.to_json(), context.stage, context.own, context.attentions, results)


def measured_json(
    saved: SavedRun,
    training: Training,
    options: Mapping[str, Any],
    stage: Stage,
    own: str,
    attentions: Mapping[str, Layers],
    results: Mapping[str, EvaluationResult],
) -> dict[str, Any]:
    """Everything that was measured, by evaluation, and what it was measured on.

    options  of the command, as JSON values
    own      name of the attention that numbers are about
    """
    content = {
        "format": FORMAT,
        "time": time.time(),
        "run": saved.config.name,
        "checkpoint": saved.path.name,
        "step": training.step,
        "tokens": training.tokens,
        "stage": stage.name,
        "stage_index": stage.index,
        "seq_len": stage.seq_len,
        "trained_seq_len": training.seq_len,
        "attention": own,
        "attentions": {name: dict(Counter(layer.kind for layer in layers)) for name, layers in attentions.items()},
        "validation": [source.model_dump(exclude_defaults=True) for source in saved.config.data.validation],
        "tasks": list(results),
        "options": dict(options),
        "numbers": {name: number for result in results.values() for name, number in result.numbers.items()},
    }
    content |= {name: result.data for name, result in results.items()}
    plain: dict[str, Any] = finite(content)
    return plain


def write_result(content: dict[str, Any], checkpoint: Path) -> Path:
    """Write `RUN/evaluations/step_<step>-<seq_len>.json`, with a number at the end where there is such a file. Returns
    its path. Raises OSError when the folder cannot be written to."""
    folder = run_folder(checkpoint) / FOLDER
    folder.mkdir(exist_ok=True)
    stem = f"step_{content['step']:08d}-{content['seq_len']}"
    return _write_new(content, lambda count: folder / (f"{stem}.json" if count == 1 else f"{stem}-{count}.json"))


def write_output(content: dict[str, Any], folder: Path) -> Path:
    """Write `evaluation.json` into `folder`; one that is there is kept as `evaluation-1.json`, or the next number.
    Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "evaluation.json"
    if path.exists():
        number = next(count for count in range(1, 1 << 30) if not (folder / f"evaluation-{count}.json").exists())
        path.rename(folder / f"evaluation-{number}.json")
    return _write_new(content, lambda count: path if count == 1 else folder / f"evaluation-{count}.json")


def _write_new(content: dict[str, Any], name: Callable[[int], Path]) -> Path:
    """Write `content` to the first of `name(1)`, `name(2)`, ... that no file has."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    count = 1
    while True:
        path = name(count)
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError:
            count += 1
        else:
            return path


def finite(value: Any) -> Any:
    """`value` with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
