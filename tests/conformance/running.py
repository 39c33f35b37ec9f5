"""Cases on processes, many in one process group; and a failing case made smaller."""

import dataclasses
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch

from moba_train.errors import ConfigError
from moba_train.parallel.world import gather, joined_world
from tests.conformance.faults import FAULTS
from tests.conformance.layouts import SIZES, Case, differences, on_one_device, on_ranks, resolved
from tests.run.trainer_ranks import Ranks

GROUP = 8
"""Cases of a process group: `Ranks` gives them five minutes, also on a busy machine."""


def worker(lines: Sequence[str], fault: str | None, output: str) -> None:
    """What differs in each case, as JSON into `output`; with a fault of `FAULTS` on the ranks. A case that raises ends
    the process group."""
    cases = [Case.from_line(line) for line in lines]
    torch.set_default_dtype(torch.float64)
    try:
        with joined_world(timedelta(minutes=4)) as world:
            own = {index: on_one_device(cases[index]) for index in range(world.rank, len(cases), world.size)}
            wanted = {index: found for of_rank in gather(own) for index, found in of_rank.items()}
            problems = []
            for index, case in enumerate(cases):
                with FAULTS[fault]() if fault else nullcontext():
                    found = on_ranks(case, world)
                problems.append(differences(found, wanted[index]) if world.is_main else [])
            if world.is_main:
                Path(output).write_text(json.dumps(problems))
    except BaseException:
        with suppress(FileExistsError), Path(f"{output}.error").open("x") as file:  # of the first rank that fails
            file.write(traceback.format_exc())
        raise
    finally:
        torch.set_default_dtype(torch.float32)


def problems_of(cases: Sequence[Case], ranks: Ranks, folder: Path, fault: str | None = None) -> list[list[str]]:
    """What differs in each case, or the error that it ends with."""
    found: dict[int, list[str]] = {}
    for size in sorted({case.ranks for case in cases}):
        numbers = [index for index, case in enumerate(cases) if case.ranks == size]
        for first in range(0, len(numbers), GROUP):
            group = numbers[first : first + GROUP]
            answers = _of_group([cases[index] for index in group], ranks, folder, fault)
            for index, problems in zip(group, answers, strict=True):
                if problems and not fault:
                    print(f"seed {cases[index].seed} differs: {'; '.join(problems[:3])}", flush=True)
            print(f"{first + len(group)} of {len(numbers)} cases of {size} ranks are done", flush=True)
            found |= dict(zip(group, answers, strict=True))
    return [found[index] for index in range(len(cases))]


def _of_group(cases: Sequence[Case], ranks: Ranks, folder: Path, fault: str | None) -> list[list[str]]:
    output = folder / "problems.json"
    error = folder / "problems.json.error"
    error.unlink(missing_ok=True)
    try:
        ranks.work(worker, ([case.line() for case in cases], fault, str(output)), cases[0].ranks)
    except AssertionError:
        if len(cases) == 1:
            return [[error.read_text().strip() if error.exists() else "the ranks do not come back"]]
        return [problem for case in cases for problem in _of_group([case], ranks, folder, fault)]
    problems: list[list[str]] = json.loads(output.read_text())
    return problems


def shrunk(case: Case, fails: Callable[[Case], bool], most: int = 60) -> Case:
    """A smaller case that still fails: takes the first simpler one that does, as long as there is one; asks `fails` at
    most so often."""
    tried = set[str]()
    while True:
        for simpler in simpler_cases(case):
            if simpler.line() in tried or len(tried) == most:
                continue
            tried.add(simpler.line())
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def simpler_cases(case: Case) -> Iterator[Case]:
    """Cases with one thing less, which training does not refuse."""
    for simpler in _simpler(case):
        try:
            resolved(simpler)
        except ConfigError:
            continue
        yield simpler


def _simpler(case: Case) -> Iterator[Case]:
    for size in SIZES:
        if (count := case.parallel[size]) > 1 and case.ranks > 2:
            yield _with_parallel(case, {size: count // 2})
    for key in [*case.parallel.keys() - {*SIZES}]:
        yield dataclasses.replace(case, parallel={k: v for k, v in case.parallel.items() if k != key})
    for key in case.model:
        yield dataclasses.replace(case, model={k: v for k, v in case.model.items() if k != key})
    defaults = Case(0, {}, [])
    for name in (
        "checkpointing",
        "nodes",
        "trainable",
        "clip_norm",
        "optimizer",
        "documents",
        "mask",
        "micro_batch_size",
    ):
        if getattr(case, name) != getattr(defaults, name):
            yield dataclasses.replace(case, **{name: getattr(defaults, name)})
    for layer, (kind, _) in enumerate(case.attention):
        rest = [*case.attention[:layer], *case.attention[layer + 1 :]]
        if rest:
            yield dataclasses.replace(case, attention=rest)
        if kind != "full":
            yield dataclasses.replace(
                case, attention=[*case.attention[:layer], ("full", {}), *case.attention[layer + 1 :]]
            )
    if case.sequences > 1:
        yield dataclasses.replace(case, sequences=case.sequences // 2)
    if case.seq_len > 16:
        yield dataclasses.replace(case, seq_len=16)


def _with_parallel(case: Case, changes: dict[str, int]) -> Case:
    parallel = case.parallel | changes
    gone = [key for key in parallel if key.startswith("cp_") and parallel["cp"] == 1]
    gone += [key for key in parallel if key.startswith("pp_") and parallel["pp"] == 1]
    return dataclasses.replace(case, parallel={key: value for key, value in parallel.items() if key not in gone})
