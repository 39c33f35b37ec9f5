"""The figures of docs/science.md: their arms are trained by the real trainer, side by side, and grow into one result.

    python -m experiments --list                                            figures, arms, GPU minutes
    python -m experiments scaling --corpus data/long --gpus 2            a call; run it again to go on
    python -m experiments scaling --plot                                    docs/science-scaling.svg and docs/science.md
    python -m experiments scaling --quick                                   its smallest form, on any machine

Arms that the result file holds are not run again, every arm that ends is added to it at once, and none begins that
would not end within --seconds, so that a figure grows over several calls, sessions and machines.
"""

import argparse
import fnmatch
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import markdown
from experiments import page
from experiments.corpus import Corpus, open_corpus, quick_corpus
from experiments.estimate import correction, modelled_seconds, size_of
from experiments.figure import Arm, Figure
from experiments.registry import FIGURES
from experiments.results import add_result, held, read_results
from experiments.run_arm import run_arm
from experiments.schedule import Outcome, Seconds, gpus_for, run_arms
from moba_train.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, draw or list figures. Returns the exit code: 1 where an arm failed."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(_listed(FIGURES[given.name]) if given.name else map(_headline, FIGURES.values())))
        return 0
    if given.name is None:
        parser.error(f"NAME is needed; allowed: {', '.join(FIGURES)}")
    figure = FIGURES[given.name]
    if given.plot:
        return _plot(figure, given)
    if given.arms_per_gpu < 1:
        parser.error(f"--arms-per-gpu: given {given.arms_per_gpu}, allowed: at least 1")
    if given.gpus > torch.cuda.device_count():
        parser.error(f"--gpus: given {given.gpus}, torch {torch.__version__} finds {torch.cuda.device_count()}")
    try:
        return _run(figure, given)
    except UserError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", metavar="NAME", choices=FIGURES, help=f"one of {', '.join(FIGURES)}")
    parser.add_argument("--list", action="store_true", help="what there is, with GPU minutes; with NAME: its arms")
    parser.add_argument("--plot", action="store_true", help="draw the result file and fill in docs/science.md")
    parser.add_argument("--quick", action="store_true", help="the smallest form: tiny models, text of this environment")
    parser.add_argument(
        "--arms", nargs="+", metavar="PATTERN", help="only these arms, in this order; * matches any text"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those of the complete figure, 0 1 ...")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="default: all of this machine")
    parser.add_argument("--arms-per-gpu", type=int, default=1, help="arms that share a GPU; times then say little; 1")
    parser.add_argument("--seconds", type=float, default=540, help="no arm begins that would not end by then; 540")
    parser.add_argument("--corpus", type=Path, default=Path("data/long"), help="folder of the tokenised corpora")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="folder of the trainer's runs")
    parser.add_argument("--output", type=Path, help="result file; default: experiments/results/NAME.json, or in --runs")
    return parser


def _output(figure: Figure, given: argparse.Namespace) -> Path:
    if given.output is not None:
        return Path(given.output)
    return given.runs / f"{_trained(figure).name}-quick.json" if given.quick else page.result_file(figure)


def _trained(figure: Figure) -> Figure:
    """The figure whose arms this one shows."""
    return FIGURES[figure.source] if figure.source else figure


def _arms(figure: Figure, given: argparse.Namespace) -> list[Arm]:
    """All arms of the seeds asked for; those that differ by their seed alone behind one another, as arms are compared
    within a seed."""
    seeds = given.seeds if given.seeds is not None else range(1 if given.quick else _trained(figure).seeds)
    by_seed = [_trained(figure).arms(seed, given.quick) for seed in seeds]
    return [arm for alike in zip(*by_seed, strict=True) for arm in alike]


def _run(figure: Figure, given: argparse.Namespace) -> int:
    deadline = time.monotonic() + given.seconds
    trained = _trained(figure)
    runs = given.runs / (f"{trained.name}-quick" if given.quick else trained.name)
    corpus = _corpus(trained, given, runs)
    output = _output(figure, given)
    settings: dict[str, Any] = {"figure": trained.name, "quick": given.quick, "corpus": corpus.identity()}
    arms = _arms(figure, given)
    done = held(output, settings, arms)
    wanted = [arm for arm in _asked_for(arms, given.arms) if arm.key not in done]
    needed = _with_parents(wanted, arms, runs)
    parents = {f"{arm.parent}-seed{arm.seed}" for arm in arms if arm.parent}

    def run(arm: Arm, devices: Sequence[int]) -> None:
        if arm.parent is not None:
            _check_parent(figure, _parent(arm, arms), output, given.quick)
        result = run_arm(arm, corpus, runs, devices, arm.key in parents, given.arms_per_gpu)
        _finished_mark(runs, arm).touch()
        add_result(output, settings, result)
        print(f"{arm.key}: ended after {result['seconds']:.0f} s, {result['tokens_per_s']:,} tokens/s", flush=True)

    def seconds(arm: Arm, gpus: int, sharing: int) -> float:
        return modelled_seconds(arm, gpus, sharing) * correction(arm, read_results(output), arms)

    def ready(arm: Arm) -> bool:
        return arm.parent is None or _finished_mark(runs, _parent(arm, arms)).exists()

    print(f"{figure.title}: {len(done)} arms held, {len(needed)} to run", flush=True)
    outcome = run_arms(needed, given.gpus, deadline, run, seconds, ready, given.arms_per_gpu)
    _report(figure, given, output, outcome, seconds)
    return 1 if outcome.failed else 0


def _corpus(figure: Figure, given: argparse.Namespace, runs: Path) -> Corpus:
    """The corpus, with what the figure adds."""
    added = runs / "corpora"
    corpus = quick_corpus(runs / "quick-corpus", added) if given.quick else open_corpus(given.corpus, added)
    added.mkdir(parents=True, exist_ok=True)
    figure.prepare(corpus, added, given.quick)
    return corpus


def _asked_for(arms: Sequence[Arm], patterns: Sequence[str] | None) -> list[Arm]:
    """Arms whose names match any of the patterns, in the order of these; without patterns all."""
    if patterns is None:
        return list(arms)
    found = {arm.key: arm for one in patterns for arm in arms if fnmatch.fnmatchcase(arm.name, one)}
    return list(found.values())


def _parent(arm: Arm, arms: Sequence[Arm]) -> Arm:
    return next(other for other in arms if (other.name, other.seed) == (arm.parent, arm.seed))


def _check_parent(figure: Figure, parent: Arm, output: Path, quick: bool) -> None:
    """Raises UserError where the figure refuses to go on from what `parent` came to."""
    found = (one for one in read_results(output) if (one["name"], one["seed"]) == (parent.name, parent.seed))
    if reason := figure.refuses(next(found), quick):
        raise UserError(reason)


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


def _report(figure: Figure, given: argparse.Namespace, output: Path, outcome: Outcome, seconds: Seconds) -> None:
    results = read_results(output)
    if results:
        print("\n".join(page.summary_lines(figure, results)))
    for key, error in outcome.failed.items():
        print(f"failed: {key}: {str(error).splitlines()[0]}")
    for arm in outcome.left:
        never = gpus_for(arm, given.gpus, given.seconds, seconds) is None
        why = f"it would not end within --seconds {given.seconds:.0f}" if never else "the same command goes on with it"
        print(f"not begun: {arm.key}, about {seconds(arm, min(given.gpus, 1), 1):.0f} s on one device; {why}")
    print(f"{len(results)} arms in {_shown(output)}")


def _shown(path: Path) -> str:
    """The path as one would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _plot(figure: Figure, given: argparse.Namespace) -> int:
    """The picture and the section, or with --output the picture alone, beside that file."""
    source = given.output or page.result_file(figure)
    if given.output is None:
        page.write_section(figure)
    if source.exists():
        plot = source.with_suffix(".svg") if given.output else page.PAGE.parent / f"science-{figure.name}.svg"
        page.draw(figure, source, plot)
        print("\n".join([*page.summary_lines(figure, read_results(source)), f"drawn: {_shown(plot)}"]))
    else:
        print(f"{_shown(source)} does not exist yet: {page.command(figure)}")
    return 0 if source.exists() or given.output is None else 1


def _headline(figure: Figure) -> str:
    if figure.source:
        return f"{figure.name:<14}{figure.title} (the arms of {figure.source})"
    arms = [arm for seed in range(figure.seeds) for arm in figure.arms(seed, quick=False)]
    minutes = sum(map(modelled_seconds_on_one, arms)) / 60
    cost = f"{len(arms)} arms with {figure.seeds} seeds, about {minutes:.0f} GPU minutes"
    return f"{figure.name:<14}{figure.title} ({cost})"


def _listed(figure: Figure) -> list[str]:
    """The arms of one seed, with what they cost on one H200."""
    rows = [["arm", "parameters", "tokens", "minutes on one H200"]]
    for arm in _trained(figure).arms(0, quick=False):
        parameters, tokens = size_of(arm)
        rows.append(
            [arm.name, f"{parameters / 1e6:.1f}M", f"{tokens / 1e6:.0f}M", f"{modelled_seconds_on_one(arm) / 60:.1f}"]
        )
    return [_headline(figure), markdown(rows)]


def modelled_seconds_on_one(arm: Arm) -> float:
    """Seconds on one H200."""
    return modelled_seconds(arm, 1)


if __name__ == "__main__":
    sys.exit(main())
