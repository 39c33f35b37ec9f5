"""Differences between two runs: of their checkpoints tensor by tensor, or of their metrics step by step.

Checkpoints may come from different layouts: each tensor is read whole, on one process.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.publish import find_checkpoint
from moba_train.checkpoint.recipe import saved_recipe
from moba_train.errors import UserError
from moba_train.model.build import build_model
from moba_train.resolve.run import resolve_unchecked
from moba_train.telemetry.jsonl import left_out_lines, read_sound_records
from moba_train.tools.report.history import number

_CURVES = ("loss", "grad_norm")


class Comparison(NamedTuple):
    """Number of things that were compared, and a line of text for each that differs, in order."""

    what: str
    compared: int
    differing: list[str]
    notices: tuple[str, ...] = ()
    """Lines of the files that were left out of the comparison."""


def compare(a: Path, b: Path, tolerance: float = 0.0) -> Comparison:
    """Compare two metrics.jsonl, or two checkpoints; of a run folder, the newest valid checkpoint is compared.

    `tolerance` 0: bit for bit; else the relative difference up to which two numbers count as equal; for a tensor it is
    the largest difference over the largest number. Raises UserError when there is nothing to compare.
    """
    if (a.suffix == ".jsonl") != (b.suffix == ".jsonl"):
        raise UserError(f"{a} and {b}: give two metrics.jsonl, or two checkpoints or run folders")
    return compare_metrics(a, b, tolerance) if a.suffix == ".jsonl" else compare_checkpoints(a, b, tolerance)


def compare_metrics(a: Path, b: Path, tolerance: float = 0.0) -> Comparison:
    """Compare loss and gradient norm of every step."""
    ours, our_notices = _steps(a)
    theirs, their_notices = _steps(b)
    differing = []
    steps = sorted(ours.keys() | theirs.keys())
    for step in steps:
        if step not in ours or step not in theirs:
            differing.append(f"step {step}: only in {a if step in ours else b}")
            continue
        pairs = [(key, ours[step].get(key), theirs[step].get(key)) for key in _CURVES]
        unequal = [f"{key} {x!r} and {y!r}" for key, x, y in pairs if not _equal(x, y, tolerance)]
        if unequal:
            differing.append(f"step {step}: {', '.join(unequal)}")
    return Comparison("steps", len(steps), differing, our_notices + their_notices)


def compare_checkpoints(a: Path, b: Path, tolerance: float = 0.0) -> Comparison:
    """Compare weights and optimizer state in the order of the model: each parameter's weights, then its state.

    The ranks' random states are left out, because they depend on the number of ranks.
    """
    first, _held_first = find_checkpoint(a)
    second, _held_second = find_checkpoint(b)
    paths = first, second
    ours, theirs = (CheckpointReader(path) for path in paths)
    differing = []
    names = _in_model_order({*ours.tensors, *theirs.tensors}, paths[0])
    for name in names:
        if name not in ours.tensors or name not in theirs.tensors:
            differing.append(f"{name}: only in {paths[0] if name in ours.tensors else paths[1]}")
        elif text := _difference(ours.read(name), theirs.read(name), tolerance):
            differing.append(f"{name}: {text}")
    return Comparison("tensors", len(names), differing)


def _steps(path: Path) -> tuple[dict[int, dict[str, float]], tuple[str, ...]]:
    """Loss and gradient norm by step, and a note on damaged lines of the file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a run's metrics.jsonl")
    records, damaged = read_sound_records(path)
    steps = {
        record["step"]: {key: number(record, key) for key in _CURVES if record.get(key) is not None}
        for record in records
        if record["type"] == "metrics"
    }
    if not steps:
        raise UserError(f"{path}: has no step of a training; give a run's metrics.jsonl")
    return steps, (f"{path}: {left_out_lines(damaged)}",) if damaged else ()


def _equal(x: float | None, y: float | None, tolerance: float) -> bool:
    if x is None or y is None:
        return x is y
    if x == y or (math.isnan(x) and math.isnan(y)):
        return True
    return math.isfinite(x) and math.isfinite(y) and abs(x - y) <= tolerance * abs(x)


def _in_model_order(names: set[str], path: Path) -> list[str]:
    spec = resolve_unchecked(saved_recipe(path)).setup.spec
    with torch.device("meta"):
        parameters = list(build_model(spec).state_dict())
    place = {parameter: index for index, parameter in enumerate(parameters)}

    def key(name: str) -> tuple[int, bool, str]:
        kind, _, rest = name.partition(".")
        parameter = rest if kind == "model" else rest.rpartition(".")[0]
        return place.get(parameter, len(place)), kind != "model", name

    return sorted((name for name in names if not name.startswith("rng.")), key=key)


def _difference(a: Tensor, b: Tensor, tolerance: float) -> str:
    """Difference of two tensors in words; empty if they count as equal."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{list(a.shape)} {a.dtype} and {list(b.shape)} {b.dtype}"
    if torch.equal(_bits(a), _bits(b)):
        return ""
    largest = (a.double() - b.double()).abs().max().item()
    scale = a.double().abs().max().item()
    relative = largest / scale if scale else math.inf if largest else 0.0
    if tolerance and relative <= tolerance:
        return ""
    unequal = int((_bits(a) != _bits(b)).view(a.numel(), -1).any(1).sum())
    return f"differs by up to {largest:.3g}, relative {relative:.3g}, in {unequal} of {a.numel()} numbers"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


MOST_SHOWN = 10


def describe(result: Comparison) -> Iterator[str]:
    """Lines for the terminal: the number of equal things, and the first MOST_SHOWN that differ."""
    equal = result.compared - len(result.differing)
    yield f"{equal} of {result.compared} {result.what} are equal"
    if result.differing:
        yield f"first difference: {result.differing[0]}"
        yield from (f"                  {text}" for text in result.differing[1:MOST_SHOWN])
    if len(result.differing) > MOST_SHOWN:
        yield f"                  ... and {len(result.differing) - MOST_SHOWN} more"
