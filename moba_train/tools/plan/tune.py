"""`moba-train tune`: the most promising layouts of a recipe, each trained for some steps on this machine's GPUs.

The layouts are those of `plan --nodes 1`. Each is trained by the ordinary trainer, under torchrun, in a folder of its
own that is removed: every stage for the same few steps, with the recipe's data, but without evaluations, checkpoints
and exit criteria. The time of a stage is the median step after the first ones, which compile.
"""

import math
import operator
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from moba_train.config.base import format_duration
from moba_train.config.stages import Stage
from moba_train.errors import PlanError
from moba_train.output_files import write_atomically
from moba_train.strict_json import to_json
from moba_train.telemetry.jsonl import read_records
from moba_train.tools.launch.torchrun import torchrun_command
from moba_train.tools.plan.command import find_layouts
from moba_train.tools.plan.layouts import Layout
from moba_train.tools.plan.render import OWN_LAYOUT
from moba_train.tools.plan.step_time import Machine


class Tried(NamedTuple):
    """A layout with the steps that it took."""

    layout: Layout
    place: int
    """Place in the predicted order, from 1."""
    step_s: tuple[float, ...]
    """Seconds of a step in each stage; empty for a layout that failed."""
    problem: str = ""
    """End of the output of a run that failed."""

    @property
    def seconds(self) -> float:
        """All steps of all stages at this pace; infinite for a layout that failed."""
        steps = [stage.stage.steps for stage in self.layout.stages]
        return sum(map(operator.mul, steps, self.step_s)) if self.step_s else math.inf


def tune(
    recipe: Path,
    overrides: Sequence[str],
    machine: Machine,
    steps: int,
    output: Path | None,
    say: Callable[[str], object],
) -> None:
    """Train the five best layouts of the recipe on one node for `steps` steps a stage, and print the measured order.

    output: file for the results as JSON. Raises UserError, PlanError if no layout could be trained.
    """
    run, layouts = find_layouts(recipe, overrides, 1, machine, check_files=True)
    tried = []
    for place, layout in enumerate(layouts.best, start=1):
        say(f"layout {place} of {len(layouts.best)}: {' '.join(layout.arguments) or OWN_LAYOUT}")
        tried.append(_try(recipe, overrides, run.stages, layout, place, machine.ranks_per_node, steps))
    tried.sort(key=lambda one: one.seconds)
    if output is not None:
        content = {"format": 1, "rates": machine.rates.gpu, "layouts": list(map(_as_json, tried))}
        write_atomically(output, to_json(content, indent=1) + "\n")
    say(f"the measured order; times are those of all stages, by {steps} steps of each:")
    for number, one in enumerate(tried, start=1):
        expected = f"predicted {format_duration(one.layout.seconds)}, as number {one.place}"
        measured = f"measured {format_duration(one.seconds)}" if one.step_s else f"failed: {one.problem}"
        say(f"  {number}. {' '.join(one.layout.arguments) or OWN_LAYOUT}    # {measured}; {expected}")
    if not tried[0].step_s:
        raise PlanError(f"no layout could be trained; the first one ended with: {tried[0].problem}")


def _try(
    recipe: Path, overrides: Sequence[str], stages: Sequence[Stage], layout: Layout, place: int, ranks: int, steps: int
) -> Tried:
    """Train a layout in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        arguments = [str(recipe), *overrides, *layout.arguments, *_shortened(stages, layout, steps, run)]
        command = [*torchrun_command(ranks), "-m", "moba_train.train", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            return Tried(layout, place, (), " | ".join(lines[-5:]))
        records = [record for record in read_records(run / "metrics.jsonl") if record["type"] == "metrics"]
        by_stage = [[one["step_s"] for one in records if one["stage"] == step.stage.name] for step in layout.stages]
        return Tried(layout, place, tuple(statistics.median(times[len(times) // 2 :]) for times in by_stage))


def _shortened(stages: Sequence[Stage], layout: Layout, steps: int, run: Path) -> list[str]:
    """Overrides that leave each of the `stages` of the recipe `steps` steps and nothing else."""
    found = [
        f"run_dir={run}",
        "init_from=null",
        "evaluation={}",
        "checkpoint={every: null}",
        "telemetry={report: false, console: false}",
        "optim.schedule={kind: constant}",
    ]
    for index, (given, step) in enumerate(zip(stages, layout.stages, strict=True)):
        found.append(f"stages.{index}.tokens={steps * step.stage.batch_tokens}")
        found += [f"stages.{index}.{key}=null" for key in ("until", "schedule") if key in given.own_keys]
    return found


def _as_json(tried: Tried) -> dict[str, Any]:
    stages = [
        {"name": step.stage.name, "mesh": step.mesh._asdict(), "predicted_step_s": step.time.seconds, "step_s": own}
        for step, own in zip_longest(tried.layout.stages, tried.step_s)
    ]
    seconds = {"predicted_s": tried.layout.seconds, "measured_s": tried.seconds if tried.step_s else None}
    place = {"arguments": tried.layout.arguments, "predicted_place": tried.place}
    return {**place, **seconds, "stages": stages, "problem": tried.problem}
