"""The figures of REPORT.md: their arms are trained by the real trainer, side by side, and grow into one result.

    python -m experiments --list                                            figures, arms, GPU minutes
    python -m experiments scaling --corpus data/long --gpus 2            a call; run it again to go on
    python -m experiments scaling needles --longest-first --arms-per-gpu 6  arms of several figures, mixed
    python -m experiments scaling --plot                                    plots/scaling.svg and its part of REPORT.md
    python -m experiments scaling --quick                                   its smallest form, on any machine

Arms that the result file holds are not run again, every arm that ends is added to it at once, and none begins that
would not end within --seconds, so that a figure grows over several calls, sessions and machines.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.record import markdown
from experiments import page
from experiments.corpus import Corpus, OwnDocuments, open_corpus, quick_corpus
from experiments.estimate import Estimates, modelled_seconds, size_of
from experiments.figure import Arm, Figure, Result
from experiments.multi_process import multi_process_service
from experiments.registry import FIGURES, trained
from experiments.results import read_results
from experiments.schedule import Outcome, gpus_for, run_arms
from experiments.stop import is_asked, stoppable
from experiments.work import Work, asked_for
from moba_train.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, draw or list figures. Returns the exit code: 1 where an arm failed or the call was asked to end."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in FIGURES]:
        parser.error(f"NAME: given {', '.join(unknown)}; allowed: {', '.join(FIGURES)}")
    figures = [FIGURES[name] for name in dict.fromkeys(given.names)]
    if given.seconds_per_arm is not None:
        try:
            figures = [figure.with_seconds_per_arm(given.seconds_per_arm) for figure in figures]
        except UserError as error:
            parser.error(str(error))
    if given.list:
        lists = [_listed(figure) for figure in figures] or [list(map(_headline, FIGURES.values()))]
        print("\n\n".join("\n".join(lines) for lines in lists))
        return 0
    if not figures:
        parser.error(f"NAME is needed; allowed: {', '.join(FIGURES)}")
    if given.output is not None and len(figures) > 1:
        parser.error(f"--output: one file, but figures {', '.join(given.names)} were given; allowed: one figure")
    if given.plot:
        return max(_plot(figure, given) for figure in figures)
    if given.arms_per_gpu < 1:
        parser.error(f"--arms-per-gpu: given {given.arms_per_gpu}, allowed: at least 1")
    if not 0 <= given.gpus <= torch.cuda.device_count():
        parser.error(f"--gpus: given {given.gpus}, torch {torch.__version__} finds {torch.cuda.device_count()}")
    try:
        return _run(figures, given)
    except UserError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"figures: {', '.join(FIGURES)}")
    parser.add_argument("--list", action="store_true", help="what there is, with GPU minutes; with NAME: its arms")
    parser.add_argument("--plot", action="store_true", help="draw the result file and fill in experiments/REPORT.md")
    parser.add_argument("--quick", action="store_true", help="the smallest form: tiny models, text of this environment")
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="PATTERN",
        help="only these arms, in this order, or those of one seed: NAME-seed1; * matches any text",
    )
    parser.add_argument(
        "--longest-first", action="store_true", help="begin with the arms that take longest, so that all end together"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those of the complete figure, mostly 0 1")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="default: all of this machine")
    parser.add_argument("--arms-per-gpu", type=int, default=1, help="arms that share a GPU; times then say little; 1")
    parser.add_argument("--seconds", type=float, default=540, help="no arm begins that would not end by then; 540")
    parser.add_argument(
        "--seconds-per-arm", type=int, help="training seconds of each arm of a figure of equal times; default: 200"
    )
    parser.add_argument("--corpus", type=Path, default=Path("data/long"), help="folder of the tokenised corpora")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="folder of the trainer's runs")
    parser.add_argument("--output", type=Path, help="result file; default: experiments/results/NAME.json, or in --runs")
    return parser


def _output(figure: Figure, given: argparse.Namespace) -> Path:
    if given.output is not None:
        return Path(given.output)
    return given.runs / f"{trained(figure).name}-quick.json" if given.quick else page.result_file(figure)


def _run(figures: Sequence[Figure], given: argparse.Namespace) -> int:
    deadline = time.monotonic() + given.seconds
    estimates = Estimates(_finished(figures, given))
    works = {one.name: _work(one, given, estimates) for one in dict.fromkeys(map(trained, figures))}
    for pattern in given.arms or ():
        if not any(asked_for(work.arms, [pattern]) for work in works.values()):
            known = dict.fromkeys(arm.name for work in works.values() for arm in work.arms)
            raise UserError(f"--arms: given {pattern!r}, which no arm of these seeds is; there are {', '.join(known)}")
    owners = {id(arm): work for work in works.values() for arm in work.needed}
    arms = [arm for work in works.values() for arm in work.needed]
    if given.longest_first:
        arms.sort(key=lambda arm: -owners[id(arm)].chain_seconds(arm, min(given.gpus, 1)))
    with stoppable(), multi_process_service() if given.gpus and given.arms_per_gpu > 1 else nullcontext():
        outcome = run_arms(
            arms,
            given.gpus,
            deadline,
            run=lambda arm, devices: owners[id(arm)].run(arm, devices, given.arms_per_gpu),
            seconds=lambda arm, gpus, sharing: owners[id(arm)].seconds(arm, gpus, sharing),
            ready=lambda arm: owners[id(arm)].is_ready(arm),
            arms_per_gpu=given.arms_per_gpu,
            label=lambda arm: owners[id(arm)].label(arm),
        )
        stopped = is_asked()
        for figure in figures:
            _report(figure, works[trained(figure).name], given, outcome)
    return 1 if outcome.failed or stopped else 0


def _finished(figures: Sequence[Figure], given: argparse.Namespace) -> list[Result]:
    """The arms whose times are known: of the files that this call adds to, and of all that the repository has."""
    files = {_output(figure, given) for figure in figures} | {page.result_file(figure) for figure in FIGURES.values()}
    return [result for file in sorted(files) for result in read_results(file)]


def _work(figure: Figure, given: argparse.Namespace, estimates: Estimates) -> Work:
    runs = given.runs / (f"{figure.name}-quick" if given.quick else figure.name)
    seeds = given.seeds if given.seeds is not None else figure.seeds[: 1 if given.quick else None]
    corpus = _corpus(figure, given, runs)
    work = Work.from_figure(
        figure,
        corpus,
        runs,
        _output(figure, given),
        given.quick,
        seeds,
        given.arms,
        given.arms_per_gpu,
        estimates,
    )
    print(f"{figure.title}: {work.held} arms held, {len(work.needed)} to run", flush=True)
    for arm, problem in work.impossible:
        print(f"{work.label(arm)}: left out: {problem}", flush=True)
    return work


def _corpus(figure: Figure, given: argparse.Namespace, runs: Path) -> Corpus:
    """The corpus, with what the figure adds; that is kept apart for each corpus, as it may have its text."""
    if not figure.corpus:
        corpus: Corpus = OwnDocuments(runs, 0)
    else:
        corpus = quick_corpus(runs / "quick-corpus") if given.quick else open_corpus(given.corpus)
    added = runs / "corpora" / corpus.identity().get("train", "own")
    added.mkdir(parents=True, exist_ok=True)
    figure.prepare(corpus, added, given.quick)
    return replace(corpus, added=added)


def _report(figure: Figure, work: Work, given: argparse.Namespace, outcome: Outcome) -> None:
    results = read_results(work.output)
    if results:
        print("\n".join(page.summary_lines(figure, results)))
    own = set(map(id, work.needed))  # arms of two figures may be equal
    for arm, error in outcome.failed:
        if id(arm) in own:
            why = (str(error).strip() or repr(error)).splitlines()[0]
            again = f"; the same command runs it again, --arms '{arm.key}' it alone"
            print(f"failed: {work.label(arm)}: {why}{'' if isinstance(error, UserError) else again}")
    failed = {(arm.name, arm.seed) for arm, _ in outcome.failed if id(arm) in own}
    refusals = [work.figure.refusal(arm, results, given.quick) for arm in outcome.left if id(arm) in own]
    for reason, count in Counter(filter(None, refusals)).items():
        print(f"left out: {count} arms of {work.figure.name}: {reason}")
    for arm in outcome.left:
        if id(arm) in own and not work.figure.refusal(arm, results, given.quick):
            alone = f"about {work.seconds(arm, min(given.gpus, 1), 1):.0f} s alone on one device"
            orphan = f"it needs the weights of {arm.parent}" if (arm.parent, arm.seed) in failed else ""
            print(f"not finished: {work.label(arm)}, {alone}; {orphan or _what_to_do(arm, work, given)}")
    print(f"{len(results)} arms in {_shown(work.output)}")


def _what_to_do(arm: Arm, work: Work, given: argparse.Namespace) -> str:
    """What an arm that is not finished needs."""
    sharing = given.arms_per_gpu
    gpus = given.gpus if sharing == 1 else min(given.gpus, 1)
    if gpus_for(arm, gpus, given.seconds, work.seconds, sharing) is not None:
        return "the same command goes on with it"
    too_long = f"it would not end within --seconds {given.seconds:.0f}"
    if sharing > 1 and gpus_for(arm, given.gpus, given.seconds, work.seconds) is not None:
        return f"{too_long} while {sharing} share a GPU, but with --arms-per-gpu 1"
    return too_long


def _shown(path: Path) -> str:
    """The path as one would type it here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _plot(figure: Figure, given: argparse.Namespace) -> int:
    """The picture and the section, or with --output the picture alone, beside that file."""
    source = given.output or page.result_file(figure)
    if given.output is None:
        page.write_section(figure)
    if source.exists():
        plot = source.with_suffix(".svg") if given.output else page.plot_file(figure)
        results = read_results(source)
        print("\n".join(page.summary_lines(figure, results)))
        if figure.find(results).is_begun:
            page.draw(figure, source, plot)
            print(f"drawn: {_shown(plot)}")
    else:
        print(f"{_shown(source)} does not exist yet: {page.command(figure)}")
    return 0 if source.exists() or given.output is None else 1


def _headline(figure: Figure) -> str:
    name = figure.name.ljust(max(map(len, FIGURES)) + 2)
    if figure.source:
        return f"{name}{figure.title} (the arms of {figure.source})"
    arms = [arm for seed in figure.seeds for arm in figure.arms(seed, quick=False)]
    minutes = sum(map(modelled_seconds, arms)) / 60
    seeds = f"{len(figure.seeds)} seed{'s' * (len(figure.seeds) != 1)}"
    cost = f"{len(arms)} arms with {seeds}, about {minutes:.0f} GPU minutes"
    return f"{name}{figure.title} ({cost})"


def _listed(figure: Figure) -> list[str]:
    """The arms of one seed, with what they cost on one H100."""
    rows = [["arm", "parameters", "tokens", "minutes on one H100"]]
    for arm in trained(figure).arms(0, quick=False):
        parameters, tokens = size_of(arm)
        rows.append([arm.name, f"{parameters / 1e6:.1f}M", f"{tokens / 1e6:.0f}M", f"{modelled_seconds(arm) / 60:.1f}"])
    return [_headline(figure), markdown(rows)]


if __name__ == "__main__":
    sys.exit(main())
