"""One arm: the complete recipe, training and evaluation by the real programs, and what is kept of them."""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import provenance
from benchmarks.trainer_run import trainer_command
from experiments.corpus import Corpus
from experiments.estimate import config_of
from experiments.figure import Arm, Result
from experiments.multi_process import service_runs
from experiments.stop import run_to_end
from moba_train.config.health import SpikeConfig
from moba_train.evals.registry import EVALUATIONS
from moba_train.foreign_files import ROOTS
from moba_train.health.spike import RECOVERY_STEPS
from moba_train.resolve.run import resolve_unchecked
from moba_train.telemetry.jsonl import read_records
from moba_train.tools.report.scaling_runs import read_runs

CURVE_POINTS = 200
"""Points that are kept of each curve over the steps."""
STEPS_BEFORE, STEPS_AFTER = SpikeConfig().window, RECOVERY_STEPS
"""Steps around a switch of stage that are kept one by one, for the spike detector."""
_EVALUATIONS = tuple(EVALUATIONS)
_HOW_IT_RAN = ("time", "wall_time", "run_id", "checkpoint", "type")
_OF_THE_MACHINE = ("message", "dump")
"""Keys of a spike's record that name folders, which a result leaves out."""
_PROVENANCE = ("commit", "date", "device", "torch")


def complete_recipe(arm: Arm, corpus: Corpus, runs: Path, ranks: int, saved: bool) -> dict[str, Any]:
    """The arm's recipe with all that does not tell arms apart: name, folders, seed, vocabulary, data, micro-batches of
    all sequences of a rank, and how to run on this machine.

    saved: whether the last checkpoint is needed, for evaluations or as another arm's first weights
    """
    gpu = torch.cuda.is_available()
    recipe: dict[str, Any] = json.loads(json.dumps(arm.recipe))
    data = corpus.data() | recipe.get("data", {})
    for part in ("train", "validation"):
        _locate(recipe.get("data", {}).get(part, []), corpus)
    data["train"] = [*data["train"], *_added(arm.added, data["train"], corpus)]
    for stage in recipe["stages"]:
        _locate(stage.get("train", []), corpus)
        sequences = stage.get("batch_tokens", recipe["batch_tokens"]) // stage["seq_len"]
        stage.setdefault("micro_batch_size", max(1, sequences // ranks))
    recipe |= {
        "name": arm.key,
        "run_dir": str(runs / arm.key),
        "seed": arm.seed,
        "model": {"vocab_size": corpus.vocab_size} | recipe["model"],
        "data": data,
    }
    if "init_from" in recipe:
        recipe["init_from"] = str(corpus.folder / recipe["init_from"])
    if arm.parent is not None:
        recipe["init_from"] = str(runs / f"{arm.parent}-seed{arm.seed}")
    how = {
        "compile": gpu,
        "checkpoint": {"every": 10**6 if saved else None},
        "telemetry": {"console": False, "report": False},
    }
    return how | recipe


def _added(shares: Mapping[str, float], sources: Sequence[Mapping[str, Any]], corpus: Corpus) -> list[dict[str, Any]]:
    """Sources with these shares of the blend that they make with `sources`."""
    whole = sum(source.get("weight", 1.0) for source in sources) / (1 - sum(shares.values()))
    return [{"path": corpus.find(name), "weight": share * whole} for name, share in shares.items()]


def _locate(sources: Iterable[dict[str, Any]], corpus: Corpus) -> None:
    for source in sources:
        source["path"] = corpus.find(source["path"])


def run_arm(arm: Arm, corpus: Corpus, runs: Path, devices: Sequence[int], saved: bool, sharing: int = 1) -> Result:
    """Train the arm on these GPUs (none: on the CPU), evaluate it, and return its result. Whatever an earlier attempt
    left in the arm's folder is removed. `sharing` arms have these GPUs at the same time.

    The result is that of `arm_result`, besides `seconds` and what these depend on: `gpus` of this arm, `arms_per_gpu`,
    and whether arms shared a GPU by the `multi_process_service`.

    Raises RuntimeError, with the end of what they printed, when training or an evaluation fails, and when training was
    asked to stop, StoppedError when the call is asked to end.
    """
    folder = runs / arm.key
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ranks = max(1, len(devices))
    began = time.monotonic()
    recipe = complete_recipe(arm, corpus, runs, ranks, saved or bool(arm.evaluations))
    roots = _roots(corpus, runs)
    environment = {**os.environ, ROOTS: os.pathsep.join(map(str, roots))}
    if devices:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: arms that share a machine would share its cores
        environment["CUDA_VISIBLE_DEVICES"] = _visible(devices)
    start(trainer_command(recipe, runs / f"{arm.key}.yaml", ranks), environment, runs / f"{arm.key}.log")
    check_complete(arm, read_records(folder / "metrics.jsonl"))
    evaluated = {}
    for name, arguments in arm.evaluations.items():
        output = runs / f"{arm.key}-{name}"
        shutil.rmtree(output, ignore_errors=True)
        command = [sys.executable, "-m", "moba_train.tools.cli", "eval", str(folder), "--output", str(output)]
        start([*command, *_with_corpora(arguments, corpus)], environment, runs / f"{arm.key}.log")
        evaluated[name] = _kept(json.loads((output / "evaluation.json").read_text()))
    found = arm_result(arm, folder, evaluated, roots)
    seconds = round(time.monotonic() - began, 1)
    how = {"gpus": len(devices), "arms_per_gpu": sharing, "multi_process_service": bool(devices) and service_runs()}
    return found | how | {"seconds": seconds}


def _visible(devices: Sequence[int]) -> str:
    """These GPUs of those that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = allowed.split(",") if allowed else list(map(str, range(max(devices) + 1)))
    return ",".join(names[device] for device in devices)


def _with_corpora(arguments: Sequence[str], corpus: Corpus) -> list[str]:
    """The arguments with the prefix of each corpus that `--data` names."""
    behind = ["", *arguments]
    return [corpus.find(word) if before == "--data" else word for before, word in zip(behind, arguments, strict=False)]


def _roots(corpus: Corpus, runs: Path) -> list[Path]:
    return [path.resolve() for path in (corpus.folder, corpus.added, runs) if path is not None]


def start(command: list[str], environment: Mapping[str, str], log: Path) -> None:
    """Run a command, its output added to `log`. Raises RuntimeError with the last lines when it fails."""
    status = run_to_end(command, environment, log)
    if status:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{_program(command)} ended with status {status}, its log is {log}\n{last}")


def check_complete(arm: Arm, records: Sequence[Mapping[str, Any]]) -> None:
    """Raises RuntimeError where training has stopped before its last step, as it does, with status 0, when something
    asks it to. records: of its metrics.jsonl."""
    last = resolve_unchecked(config_of(arm)).stages[-1]
    at = [record for record in records if record["type"] == "metrics"][-1]
    began = [record["step"] for record in records if record["type"] == "stage"][-1]  # an exit before makes it earlier
    end = began + last.steps
    may_exit = last.until is not None
    if at["stage"] != last.name or (at["step"] < end and not may_exit):
        raise RuntimeError(f"training was asked to stop after step {at['step']} of {end}, in stage {at['stage']}")


def _program(command: Sequence[str]) -> str:
    """What a command runs, in words."""
    return "the evaluation" if "moba_train.tools.cli" in command else "training"


def arm_result(arm: Arm, folder: Path, evaluated: Mapping[str, Any], data_roots: Sequence[Path]) -> Result:
    """What is kept of a finished run, whose corpora are below `data_roots`: enough to draw and to judge it, and small.

    `parameters` without embeddings, `compute` in PFLOP/s-days by 6ND and by real FLOPs (scaling_runs.py), median
    `tokens_per_s`; `losses` and `gradient_norms`, the mean and the maximum of equal parts of the steps; by stage, the
    last evaluation of each name with all its data (`stages`), and the numbers of every evaluation (`history`);
    `spikes` and `boundaries` as they were logged; `switches`, loss and gradient norm of every step around a switch of
    stage; `evaluations`, by name, of `moba-train eval`.
    """
    records = read_records(folder / "metrics.jsonl")
    (run,) = read_runs([folder], ["loss"], data_roots=data_roots)
    steps = [record for record in records if record["type"] == "metrics"]
    evaluations = [record for record in records if record["type"] in _EVALUATIONS]
    stages: dict[str, dict[str, Any]] = {record["stage"]: {} for record in steps}
    for record in evaluations:
        stages.setdefault(record["stage"], {})[record["type"]] = _kept(record)
    where = provenance()
    return {
        "name": arm.name,
        "seed": arm.seed,
        "recipe": json.loads(json.dumps(arm.recipe)),
        "parent": arm.parent,
        **{key: where[key] for key in _PROVENANCE},
        "parameters": run.parameters,
        "tokens": run.tokens,
        "compute": run.compute,
        "documents": run.documents,
        "tokens_per_s": round(statistics.median(record["tokens_per_s"] for record in steps[len(steps) // 2 :])),
        "last_step": steps[-1]["step"],
        "losses": _losses(steps),
        "gradient_norms": [[part[-1]["step"], max(record["grad_norm"] for record in part)] for part in _parts(steps)],
        "stages": stages,
        "history": [_numbers(record) for record in evaluations],
        "spikes": [_spike(record) for record in records if record["type"] == "spike"],
        "boundaries": [_kept(record) for record in records if record["type"] == "boundary"],
        "switches": list(_switches(steps)),
        "evaluations": dict(evaluated),
    }


def losses_of(folder: Path) -> list[list[float]]:
    """The curve `losses` that a result keeps of the run in `folder`, which tells it from other runs of its arm; empty
    where there is none."""
    file = folder / "metrics.jsonl"
    records = read_records(file) if file.is_file() else []
    return _losses([record for record in records if record["type"] == "metrics"])


def _losses(steps: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    return [[part[-1]["step"], _mean(part, "loss")] for part in _parts(steps)]


def _parts(steps: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    """Equal parts of the steps, a point of a curve each."""
    width = max(1, -(-len(steps) // CURVE_POINTS))
    return [steps[first : first + width] for first in range(0, len(steps), width)]


def _switches(steps: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every step's loss and gradient norm before and after each switch of stage."""
    for place in range(1, len(steps)):
        if steps[place]["stage"] != steps[place - 1]["stage"]:
            parts = {"before": steps[max(0, place - STEPS_BEFORE) : place], "after": steps[place : place + STEPS_AFTER]}
            curves = {
                name: {key: [round(record[key], 5) for record in part] for key in ("loss", "grad_norm")}
                for name, part in parts.items()
            }
            yield {"stage": steps[place]["stage"], "step": steps[place - 1]["step"], **curves}


def _mean(part: Sequence[Mapping[str, Any]], key: str) -> float:
    return round(statistics.mean(record[key] for record in part), 5)


def _kept(record: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says when and where it ran."""
    return {
        key: value for key, value in record.items() if key not in _HOW_IT_RAN and key not in ("options", "validation")
    }


def _spike(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _kept(record).items() if key not in _OF_THE_MACHINE}


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Step, stage, name and numbers of an evaluation, without curves and maps."""
    plain = {key: value for key, value in _kept(record).items() if isinstance(value, str | int | float | bool)}
    return {"evaluation": record["type"]} | {key: value for key, value in plain.items() if key != "message"}
