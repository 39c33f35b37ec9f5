"""Steps of `moba-train sparsify`: each is a command of `moba-train`, done when its result is there.

A step that was interrupted runs again: training from its newest checkpoint, an evaluation from its beginning. To run a
step once more, remove its result. Steps that need nothing of each other may run side by side (places.py).
"""

import gc
import json
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import newest_first, saved_step
from moba_train.config.base import format_duration
from moba_train.config.load import load_config, parse_yaml
from moba_train.config.mesh import WorldSize
from moba_train.data.long_documents import count_samples
from moba_train.errors import CheckpointError, ConfigError, UserError
from moba_train.evals.evaluation import EvaluationSetting
from moba_train.mechanisms.by_group import ByGroupKind
from moba_train.memory.devices import local_gpu
from moba_train.model.build import build_attention
from moba_train.output_files import write_atomically, write_new
from moba_train.resolve.evaluations import evaluation_problems, sample_problems
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import resolve_unchecked
from moba_train.telemetry.jsonl import read_records
from moba_train.tools.evaluated_recipe import evaluated_setting
from moba_train.tools.plan.plan import make_plan
from moba_train.tools.plan.rates import CALIBRATE
from moba_train.tools.plan.step_time import make_machine
from moba_train.tools.sparsify import recipes
from moba_train.tools.sparsify.places import Place, here
from moba_train.tools.sparsify.recipes import Request, Source

SECONDS = "seconds.json"
"""Seconds that each finished step took in the call that finished it."""
_GROWING = ("seeds", "baseline", "equal_seconds")
"""Options that only add steps: a later call may give others."""
_DENSE = "evaluation.oracle.dense"
Runner = Callable[[Sequence[str]], int]
"""Runs `moba-train` with these words; returns its exit status."""


@dataclass(frozen=True)
class Step:
    """One command, and where its result is."""

    name: str
    words: list[str]
    """Words behind `moba-train`."""
    result: Path
    """A file that is written last; of training, the run folder."""
    needs: frozenset[str] = frozenset()
    """Names of steps that end before this one begins."""

    @property
    def command(self) -> str:
        """The command as one types it."""
        return shlex.join(["moba-train", *self.words])

    @property
    def trains(self) -> bool:
        """True if the step trains, by a recipe of its own."""
        return self.words[0] == "train"

    @property
    def charts(self) -> Path:
        """The page with charts of the result, if there is one: it takes plotly."""
        return self.result / "report.html" if self.trains else self.result.with_name("evaluation.html")

    @property
    def done(self) -> bool:
        """True if the result is there, and complete."""
        if not self.trains:
            if not (self.result.is_file() and any(word.startswith(_DENSE) for word in self.words)):
                return self.result.is_file()
            # A call with --no-baseline had nothing to compare with.
            return any(word.startswith(_DENSE) for word in read_json(self.result)["options"]["overrides"])
        if not (newest := newest_first(self.result / "checkpoints")):
            return False
        try:
            return (saved_step(read_meta(newest[0])) or 0) >= self._last_step
        except CheckpointError:
            return False  # training says what is wrong with it

    @property
    def measured(self) -> bool:
        """True if the step trained to its end, maybe on another machine, where its weights stayed."""
        metrics = self.result / "metrics.jsonl"
        if not (self.trains and metrics.is_file()):
            return False
        return any(one["step"] >= self._last_step for one in read_records(metrics) if one["type"] == "metrics")

    @property
    def _last_step(self) -> int:
        return resolve_unchecked(load_config(self.words[1], self.words[2:])).stages[-1].end_step

    def reads_weights(self, other: "Step") -> bool:
        """True if it begins with the other step's weights; of another arm, training needs the seconds alone."""
        return other.name in self.needs and (not self.trains or other.name == "extend")


def steps(request: Request, source: Source, output: Path, evaluation: dict[str, Any]) -> Iterator[Step]:
    """All steps in order. evaluation: the section of that name in evaluation.yaml. Raises UserError when it lacks an
    evaluation."""
    for name in ("position_wise", "needle", "ruler", "oracle", "full_layers"):
        if not isinstance(given := evaluation.get(name), dict):
            raise UserError(f"{recipes.EVALUATION}: evaluation.{name}: given {given}; allowed: its section")
    folder = output / "recipes"
    model = Path(request.model)
    read = source
    if recipes.EXTEND in recipes.recipes(request, source, output):
        model = output / "runs" / "extend"
        read = replace(source, stage=0)
        yield Step("extend", ["train", str(folder / recipes.EXTEND)], model)
    size, topk = recipes.topk_of(request)
    data = [word for path in request.validation for word in ("--data", path)]
    common = [*data, "--seq-len", str(request.length), "--attention", "own"]
    full = _with_attention(read, {"default": "full"})
    words = [*common, *full, *recipes.sections(evaluation, ["oracle"])]
    extended = frozenset({"extend"})
    yield _evaluation("oracle", model, output / "oracle", ["oracle"], words, extended)
    # A scorer that has learnt nothing would choose the layers by chance: the ideal selection stands for it.
    choosing = "oracle" if recipes.warms_up(request.kind) else request.kind
    options = recipes.ideal(size, topk) if choosing == "oracle" else recipes.selects(choosing, size, topk)
    sparse = _with_attention(read, {"default": choosing, choosing: options})
    words = [*common, *sparse, *recipes.sections(evaluation, ["full_layers"])]
    yield _evaluation("calibrate", model, output / "calibration", ["full_layers"], words, extended)
    arms = recipes.arms(request)
    needs = {"full": extended, "sparse": extended | {"calibrate"}}
    needs["equal-seconds"] = extended | {"train full 1", "train sparse 1"}
    for seed in range(1, request.seeds + 1):
        for arm in arms:
            run = output / "runs" / f"{arm}-{seed}"
            words = ["train", str(folder / f"{arm}.yaml"), f"seed={seed}", recipes.word("run_dir", run)]
            yield Step(f"train {arm} {seed}", words, run, needs[arm])
    for seed in range(1, request.seeds + 1):
        for arm in arms:
            yield evaluation_of(f"{arm}-{seed}", output, evaluation, f"full-{seed}" if request.baseline else None)
    run = output / "runs" / "sparse-1"
    model = output / "model"
    words = ["convert", "moba-to-hf", str(run), str(model), "--with-code"]
    yield Step("export", words, model / "config.json", frozenset({"train sparse 1"}))


def _with_attention(source: Source, section: dict[str, Any]) -> list[str]:
    """Words that give all layers but those with a window this attention, whatever the recipe and its stage say."""
    values = {**section, "full_layers": "none", "overrides": source.attention.get("overrides", {})}
    keys = ("attention", f"stages.{source.stage}.attention")
    return [f"{key}.{name}={json.dumps(value)}" for key in keys for name, value in values.items()]


def evaluation_of(run: str, output: Path, evaluation: dict[str, Any], dense: str | None) -> Step:
    """Evaluation of the run of this name, such as sparse-1. dense: that of full attention; None: not trained."""
    oracle = {**evaluation["oracle"], "budgets": evaluation["oracle"]["budgets"][:1]}
    tasks = ["position_wise", "needle", "ruler"]
    words = []
    named = " ".join(run.rsplit("-", 1))
    needs = {f"train {named}"}
    if not run.startswith("equal-seconds"):
        tasks.append("oracle")
        if dense is not None and dense != run:
            words = [recipes.word(_DENSE, output / "evaluation" / dense / "evaluation.json")]
            needs.add(f"evaluate {' '.join(dense.rsplit('-', 1))}")
    asked = recipes.sections(evaluation | {"oracle": oracle}, tasks)
    model = output / "runs" / run
    results = output / "evaluation" / run
    return _evaluation(f"evaluate {named}", model, results, tasks, [*asked, *words], frozenset(needs))


def _evaluation(
    name: str, model: Path, results: Path, tasks: Sequence[str], words: Sequence[str], needs: frozenset[str]
) -> Step:
    command = ["eval", str(model), "--tasks", ",".join(tasks), "--output", str(results), *words]
    return Step(name, command, results / "evaluation.json", needs)


def _missing(todo: Sequence[Step]) -> list[Step]:
    """Steps to run, in order: those that are not done. A training whose weights stayed on another machine is one of
    them if a step to run reads these; for the export alone nothing is trained again."""
    found: list[Step] = []
    elsewhere = set()
    for step in reversed(todo):
        if step.done:
            continue
        if step.measured and not any(one.reads_weights(step) for one in found if one.name != "export"):
            elsewhere.add(step.name)
        else:
            found.insert(0, step)
    return [step for step in found if not (step.name == "export" and step.needs & elsewhere)]


def run_steps(
    todo: Sequence[Step],
    guesses: Mapping[str, str],
    output: Path,
    run: Runner,
    say: Callable[[str], object],
    places: Sequence[Place] = (here,),
) -> None:
    """Run what is not done, a step at each place at a time, in order as far as steps need others. guesses: first texts
    of the recipes, some of which are replaced by what was measured.

    Raises UserError when a command fails, after those that run meanwhile have ended; the call after it goes on there.
    """
    numbers = {step.name: f"[{number}/{len(todo)}] {step.name}" for number, step in enumerate(todo, 1)}
    waiting = _missing(todo)
    for step in todo:
        if step not in waiting:
            done = step.trains or step.done
            say(f"{numbers[step.name]}: {'done before' if done else 'left out, as its weights are on another machine'}")
    free = [*places]
    running: dict[Future[int], tuple[Step, Place, float]] = {}
    problem = ""
    while running or (waiting and not problem):
        missing = {step.name for step in [*waiting, *(step for step, _, _ in running.values())]}
        ready = [step for step in waiting if not step.needs & missing]
        for step in ready[: 0 if problem else len(free)]:
            waiting.remove(step)
            if step.trains:
                _measured(step, guesses, output)
            say(f"{numbers[step.name]}: {step.command}")
            place = free.pop(0)
            began = time.time()  # before it starts, as this process may run it at once
            running[place(run, step.words, _log(step, output))] = step, place, began
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            step, place, began = running.pop(future)
            free.append(place)
            broken = isinstance(future.exception(), BrokenExecutor)
            status = 1 if broken else future.result()
            if status and step.name == "export" and not broken:
                say("the model stays a checkpoint, as no export can hold it")
            elif status or not step.done:
                how = "was killed" if broken else f"ended with status {status}" if status else "stopped before its end"
                said = f"; its output is in {_log(step, output)}" if _log(step, output).is_file() else ""
                problem = f"the step {step.name!r} {how}; the same command goes on with it{said}"
            else:
                seconds = read_json(output / SECONDS) | {step.name: round(time.time() - began, 1)}
                write_atomically(output / SECONDS, json.dumps(seconds, indent=2) + "\n")
    if problem:
        raise UserError(problem)


def _log(step: Step, output: Path) -> Path:
    """File for what a step prints beside others."""
    return output / "logs" / f"{step.name.replace(' ', '-')}.txt"


def _measured(step: Step, guesses: Mapping[str, str], output: Path) -> None:
    """Write what was measured before this step trains by it, unless that was edited meanwhile: the layers that stay
    full, with the numbers beside them; tokens that full attention trains on in the sparse arm's seconds."""
    folder = output / "recipes"
    file = folder / recipes.CALIBRATED
    if step.name.startswith("train sparse") and file.read_text() == guesses.get(recipes.CALIBRATED):
        found = read_json(output / "calibration" / "evaluation.json")["full_layers"]
        lines = ["# Layers that stay full, chosen by measurement.", *found["yaml"]]
        write_atomically(file, "\n".join(lines) + "\n")
    file = folder / recipes.EQUAL_SECONDS
    if not step.name.startswith("train equal-seconds") or recipes.EQUAL_SECONDS not in guesses:
        return
    values, first = (parse_yaml(text, file.name) for text in (file.read_text(), guesses[recipes.EQUAL_SECONDS]))
    # Not the whole text: another version may have written other keys beside the tokens, or a single stage.
    written, guess = ([stage["tokens"] for stage in one.get("stages", ())] for one in (values, first))
    if written in (guess, [sum(guess)]):
        full, sparse = (training(output / "runs" / f"{arm}-1" / "metrics.jsonl") for arm in ("full", "sparse"))
        # Not of the guess: the recipe of full attention may have been edited.
        tokens = full["tokens"] * sparse["train_s"] / full["train_s"]
        for stage in values["stages"]:
            stage["tokens"] = max(1, round(stage["tokens"] * tokens / sum(guess)))
        write_atomically(
            file, "# Tokens of full attention in the sparse arm's seconds.\n" + yaml.safe_dump(values, sort_keys=False)
        )


def training(metrics: Path) -> dict[str, Any]:
    """Steps, tokens and seconds of a run; its rate without the first step of each stage, which compiles.

    `stages` has each stage's steps, median seconds of a step but the first, and mean cross-entropy in nats.
    """
    steps = [record for record in read_records(metrics) if record["type"] == "metrics"]
    first = {record["stage"]: record["step"] for record in reversed(steps)}
    steady = [record for record in steps if record["step"] != first[record["stage"]]] or steps
    stages = {}
    for name in dict.fromkeys(record["stage"] for record in steps):
        # Once each: a run that goes on from a checkpoint does the steps behind it again.
        own = [*{record["step"]: record for record in steps if record["stage"] == name}.values()]
        step_s = statistics.median(record["step_s"] for record in own[1:] or own)
        loss = statistics.mean(record.get("cross_entropy", record["loss"]) for record in own)
        stages[name] = {"steps": len(own), "step_s": step_s, "loss": loss}
    return {
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "train_s": sum(record["step_s"] for record in steps),
        "tokens_per_s": statistics.median(record["tokens_per_s"] for record in steady),
        "stages": stages,
    }


def read_json(path: Path) -> dict[str, Any]:
    """Contents of a JSON file of ours; empty if it is not there."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def begin(request: Request, texts: Mapping[str, str], output: Path) -> dict[str, Any]:
    """Write the request and those recipes of `texts` that are not there yet; returns the section `evaluation` of
    evaluation.yaml.

    Raises UserError when a step was done with other options.
    """
    folder = output / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    asked = request.model_dump(mode="json")
    file = output / "request.yaml"
    if file.is_file():
        before = parse_yaml(file.read_text(), str(file))
        is_begun = any(
            (output / name).exists() for name in ("runs", "oracle/evaluation.json", "calibration/evaluation.json")
        )
        # Batches that were made for some GPUs are kept on others.
        free = (*_GROWING, "gpus") if is_begun else _GROWING
        differing = [key for key in asked if before.get(key) != asked[key] and key not in free]
        if differing and is_begun:
            given = ", ".join(f"{key}: given {asked[key]}, before {before.get(key)}" for key in differing)
            raise UserError(
                f"{output} was begun with other options ({given}); allowed: the same ones, or another --output"
            )
        if differing:
            file.unlink()  # its recipes go with it, also if this call ends before it has written others
    is_new = not file.is_file()
    for name, text in texts.items():
        if is_new or not (folder / name).is_file():
            write_atomically(folder / name, text)
    write_atomically(file, yaml.safe_dump(asked, sort_keys=False))
    evaluation: dict[str, Any] = parse_yaml((folder / recipes.EVALUATION).read_text(), recipes.EVALUATION)["evaluation"]
    return evaluation


def kept_recipes(texts: Mapping[str, str], output: Path) -> list[str]:
    """Names of the recipes in OUTPUT that were edited, or that a call on other GPUs or an earlier version wrote."""
    measured = (recipes.CALIBRATED, recipes.EQUAL_SECONDS)
    return [name for name in texts if name not in measured and (output / "recipes" / name).read_text() != texts[name]]


def check(todo: Sequence[Step], gpus: int) -> None:
    """Raise UserError, before anything runs, for a recipe that cannot be trained on this number of ranks, and for files
    that the first one lacks; those of later ones may be made before."""
    trained = [step for step in todo if step.trains]
    for step in trained:
        config = load_config(step.words[1], step.words[2:])
        resolve(config, WorldSize(gpus, gpus), check_files=step is trained[0])


def check_sparse(recipe: Path, evaluation: dict[str, Any], request: Request) -> None:
    """Raise ConfigError for the sparse arm's recipe, evaluations of it that cannot be made, also by their files, and
    attention to more keys than the budget: hours before they would be found."""
    resolve(load_config(recipe), WorldSize(request.gpus, request.gpus), check_files=False)
    config = load_config(recipe, recipes.sections(evaluation, [*evaluation]))
    setting = evaluated_setting(config, len(config.stages) - 1)
    problems = [*evaluation_problems(config.evaluation, [setting])]
    if not problems:
        problems += sample_problems(config.evaluation, [setting])
        if not count_samples(setting.validation, request.length):
            problems.append(f"--validation: given no document longer than --length {request.length}")
    problems += _over_budget(setting, request)
    if problems:
        raise ConfigError(problems)


def _over_budget(setting: EvaluationSetting, request: Request) -> Iterator[str]:
    """Kinds with which the last query of a sequence attends to more keys than the budget."""
    for kind in build_attention(dict.fromkeys(setting.stage.attention), setting.model.head_width):
        longer, shorter = (kind.pairs(setting.model, [length]) for length in (request.length, request.length - 1))
        keys = round(longer - shorter)
        if keys > request.budget and kind.name not in ("full", "window", ByGroupKind.name):
            yield (
                f"--budget: given {request.budget}, but with --kind {kind.name} a query attends to {keys}; allowed: "
                f"smaller sizes, by overrides of attention.{kind.name}, or another --kind"
            )


def print_plan(request: Request, source: Source, output: Path, scratch: Path, say: Callable[[str], object]) -> None:
    """Print everything. scratch: an empty folder. Raises UserError for a recipe that cannot be trained,
    evaluations that cannot be made, and files that are missing."""
    texts = recipes.recipes(request, source, output)
    for name, text in texts.items():
        write_new(scratch / name, text)
    evaluation = parse_yaml(texts[recipes.EVALUATION], recipes.EVALUATION)["evaluation"]
    check_sparse(scratch / recipes.SPARSE, evaluation, request)
    say(recipes.told(request))
    for name, text in texts.items():
        say(f"\n--- {output / 'recipes' / name}\n{text.rstrip()}")
    say("")
    gpu = local_gpu()
    machine = make_machine(gpu, request.gpus, 400.0, None, gpu is not None)
    for number, step in enumerate(steps(request, source, output, evaluation), 1):
        line = f"{number}. {step.name}: {step.command}"
        if step.trains:
            config = load_config(scratch / Path(step.words[1]).name, step.words[2:])
            first = number < 4  # the others also read what it leaves
            run = resolve(config, WorldSize(request.gpus, request.gpus), None, check_files=first)
            made = make_plan(run, machine)
            each = ", ".join(f"{one.stage.name} {format_duration(one.seconds)}" for one in made.steps)
            # Without the advice to give --rates, which this command does not take.
            time = made.unpredicted.removesuffix(f"; {CALIBRATE}") or f"{format_duration(made.seconds)} ({each})"
            line += f"\n   planned: {time}"
        say(line)
    on = machine.gpu.name if gpu is not None else f"{machine.gpu.name} (this machine has no GPU)"
    say(f"Planned for {request.gpus} x {on}, by {machine.rates.told}; evaluations are not planned.")


def run_command(words: Sequence[str], gpus: int) -> int:
    """Run `moba-train` with these words, on this number of GPUs where the command knows that; returns its status.

    Signals end that command, which may save first, and this process goes on to say so."""
    ranks = ["--gpus", str(gpus)] if words[0] in ("train", "eval") else []
    with subprocess.Popen([sys.executable, "-m", "moba_train.tools.cli", *words, *ranks]) as process:
        # A terminal sends Ctrl-C to both.
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_here(words: Sequence[str]) -> int:
    """Run `moba-train` with these words in this process, on one device: nothing is imported and compiled twice."""
    from moba_train.tools.cli import app
    from moba_train.train import main

    status = main([*words[1:]]) if words[0] == "train" else int(app([*words], standalone_mode=False) or 0)
    gc.collect()  # the model before is gone before the next one comes
    torch.cuda.empty_cache()
    return status
