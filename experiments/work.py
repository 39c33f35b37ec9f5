"""What a call has to do for a figure: the arms that its result file lacks, and how one of them is run."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.corpus import Corpus
from experiments.estimate import Estimates
from experiments.figure import Arm, Figure
from experiments.results import add_result, held, read_results
from experiments.run_arm import run_arm
from moba_train.errors import UserError


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
        wanted = [arm for arm in missing if not figure.has_refused(arm, results, quick)]
        needed = _with_parents([arm for arm in wanted if not arm.problem(sharing)], arms, runs)
        impossible = [(arm, problem) for arm in wanted if (problem := arm.problem(sharing))]
        return Work(figure, corpus, runs, output, quick, arms, needed, impossible, len(done), estimates)

    def run(self, arm: Arm, devices: Sequence[int], sharing: int) -> None:
        """Run an arm and add its result to the file. Raises UserError where its parent's weights are not worth it."""
        if arm.parent is not None:
            self._check_parent(_parent(arm, self.arms))
        parents = {f"{one.parent}-seed{one.seed}" for one in self.arms if one.parent}
        result = run_arm(arm, self.corpus, self.runs, devices, arm.key in parents, sharing)
        add_result(self.output, _settings(self.figure, self.corpus, self.quick), result)
        _finished_mark(self.runs, arm).touch()  # last: arms that need its weights also need its result
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
        """Whether the weights that an arm needs are on this machine."""
        return arm.parent is None or _finished_mark(self.runs, _parent(arm, self.arms)).exists()

    def label(self, arm: Arm) -> str:
        """The arm among those of all figures."""
        return f"{self.figure.name}/{arm.key}"

    def _check_parent(self, parent: Arm) -> None:
        found = (one for one in read_results(self.output) if (one["name"], one["seed"]) == (parent.name, parent.seed))
        if reason := self.figure.refuses(next(found), self.quick):
            raise UserError(reason)


def _settings(figure: Figure, corpus: Corpus, quick: bool) -> dict[str, Any]:
    return {"figure": figure.name, "quick": quick, "corpus": corpus.identity()}


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


def _finished_mark(runs: Path, arm: Arm) -> Path:
    """A file of the run folder, which is made anew with every attempt."""
    return runs / arm.key / "arm-finished"


def _with_parents(wanted: Sequence[Arm], arms: Sequence[Arm], runs: Path) -> list[Arm]:
    """These arms behind those whose weights they need and which are not on this machine."""
    needed: dict[str, Arm] = {}
    for arm in wanted:
        line = [arm]
        while line[0].parent is not None and not _finished_mark(runs, parent := _parent(line[0], arms)).exists():
            line.insert(0, parent)
        needed |= {one.key: one for one in line if one.key not in needed}
    return list(needed.values())
