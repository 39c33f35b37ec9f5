"""What a call has to do for a figure: the arms that its result file lacks, and how one of them is run."""

import fnmatch
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.corpus import Corpus
from experiments.estimate import Estimates
from experiments.figure import Arm, Figure, Result, key_of
from experiments.results import add_result, held, read_results
from experiments.run_arm import losses_of, run_arm
from moba_train.errors import UserError
from moba_train.tools.evaluate import finite


@dataclass(frozen=True)
class Work:
    """The arms of one figure, and where they run and are kept."""

    figure: Figure
    """That has arms of its own."""
    corpus: Corpus
    runs: Path
    """Folder of the trainer's runs of this figure."""
    output: Path
    """The result file."""
    quick: bool
    arms: list[Arm]
    """All of the seeds that were asked for."""
    needed: list[Arm]
    """Those to run, each behind the one whose weights it needs."""
    impossible: list[tuple[Arm, str]]
    """Arms that are left out, and why."""
    weights: set[str]
    """Keys of arms with which others may begin: their weights are on this machine, and are those of their results."""
    held: int
    """How many the result file has already."""
    estimates: Estimates
    """How long arms take; they learn from every arm that ends."""

    @staticmethod
    def from_figure(
        figure: Figure,
        corpus: Corpus,
        runs: Path,
        output: Path,
        quick: bool,
        seeds: Sequence[int],
        patterns: Sequence[str] | None,
        sharing: int,
        estimates: Estimates,
    ) -> "Work":
        """The work of a figure for these seeds and names of arms, `sharing` of which share a GPU. Raises UserError
        where the file has other results."""
        arms = arms_of(figure, seeds, quick)
        done = held(output, _settings(figure, corpus, quick), arms)
        results = read_results(output)
        missing = [arm for arm in asked_for(arms, patterns) if arm.key not in done]
        problems = [figure.refusal(arm, results, quick) or arm.problem(sharing) for arm in missing]
        weights = {key_of(one) for one in results if key_of(one) in _parents(arms) and _has_weights(runs, one)}
        needed = _with_parents(
            [arm for arm, problem in zip(missing, problems, strict=True) if not problem], arms, weights
        )
        impossible = [(arm, problem) for arm, problem in zip(missing, problems, strict=True) if problem]
        return Work(figure, corpus, runs, output, quick, arms, needed, impossible, weights, len(done), estimates)

    def run(self, arm: Arm, devices: Sequence[int], sharing: int) -> None:
        """Run an arm and add its result to the file. Raises UserError where the file holds the arm with other weights
        than those that others would begin with now."""
        is_parent = arm.key in _parents(self.arms)
        result = run_arm(arm, self.corpus, self.runs, devices, is_parent, sharing)
        if is_parent:
            self._check_weights(arm, result)
        _finished_mark(self.runs, arm.key).touch()  # before the result: a call that ends between them leaves no result
        add_result(self.output, _settings(self.figure, self.corpus, self.quick), result)
        if is_parent and not self.figure.refuses(result, self.quick):
            self.weights.add(arm.key)
        self.estimates.add(result)
        print(
            f"{self.label(arm)}: ended after {result['seconds']:.0f} s, {result['tokens_per_s']:,} tokens/s", flush=True
        )

    def seconds(self, arm: Arm, gpus: int, sharing: int) -> float:
        """How long an arm takes, by those that are finished."""
        return self.estimates.seconds(arm, gpus, sharing)

    def chain_seconds(self, arm: Arm, gpus: int) -> float:
        """How long an arm takes, and behind it the longest of those that need its weights."""
        children = [one for one in self.needed if one.parent == arm.name and one.seed == arm.seed]
        return self.seconds(arm, gpus, 1) + max((self.seconds(one, gpus, 1) for one in children), default=0.0)

    def is_ready(self, arm: Arm) -> bool:
        """Whether an arm can begin with the weights that it needs."""
        return arm.parent is None or _parent(arm, self.arms).key in self.weights

    def label(self, arm: Arm) -> str:
        """The arm among those of all figures."""
        return f"{self.figure.name}/{arm.key}"

    def _check_weights(self, arm: Arm, result: Result) -> None:
        """Raises UserError where the file holds another result of this arm."""
        held = [one for one in read_results(self.output) if key_of(one) == arm.key]
        if held and held[0]["losses"] != finite(result["losses"]):
            raise UserError(
                f"trained again for its weights, it has other losses than its result in {self.output}, so these are "
                f"other weights, and no arm begins with them; copy the folder {self.runs / arm.key} from the machine "
                "where the result was made, or give another --output to begin a new file"
            )


def _settings(figure: Figure, corpus: Corpus, quick: bool) -> dict[str, Any]:
    return {"figure": figure.name, "quick": quick, "corpus": corpus.identity(), **figure.settings(quick)}


def arms_of(figure: Figure, seeds: Sequence[int], quick: bool) -> list[Arm]:
    """All arms of these seeds; those that differ by their seed alone behind one another, as arms are compared within a
    seed."""
    by_seed = [figure.arms(seed, quick) for seed in seeds]
    return [arm for alike in zip(*by_seed, strict=True) for arm in alike]


def asked_for(arms: Sequence[Arm], patterns: Sequence[str] | None) -> list[Arm]:
    """Arms whose names, alone or with their seeds (`moba-seed1`), match any of the patterns, in the order of these;
    without patterns all."""
    if patterns is None:
        return list(arms)
    names = [(arm, (arm.name, arm.key)) for arm in arms]
    found = {arm.key: arm for one in patterns for arm, both in names if fnmatch.filter(both, one)}
    return list(found.values())


def _parent(arm: Arm, arms: Sequence[Arm]) -> Arm:
    return next(other for other in arms if (other.name, other.seed) == (arm.parent, arm.seed))


def _parents(arms: Iterable[Arm]) -> set[str]:
    """Keys of the arms whose weights others need."""
    return {f"{arm.parent}-seed{arm.seed}" for arm in arms if arm.parent is not None}


def _finished_mark(runs: Path, key: str) -> Path:
    """A file of the run folder, which is made anew with every attempt."""
    return runs / key / "arm-finished"


def _has_weights(runs: Path, result: Result) -> bool:
    """Whether the run folder of the result's arm has that run to its end, and not an attempt, or the run of another
    result file."""
    key = key_of(result)
    return _finished_mark(runs, key).exists() and finite(losses_of(runs / key)) == result["losses"]


def _with_parents(wanted: Sequence[Arm], arms: Sequence[Arm], weights: Container[str]) -> list[Arm]:
    """These arms behind those whose weights they need and which are not among `weights`."""
    needed: dict[str, Arm] = {}
    for arm in wanted:
        line = [arm]
        while line[0].parent is not None and (parent := _parent(line[0], arms)).key not in weights:
            line.insert(0, parent)
        needed |= {one.key: one for one in line if one.key not in needed}
    return list(needed.values())
