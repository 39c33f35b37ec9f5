"""`moba-train sparsify --dry-run`: the steps, their recipes and the planned time of training; nothing is written."""

from collections.abc import Callable
from pathlib import Path

from moba_train.config.base import format_duration
from moba_train.config.load import load_config, parse_yaml
from moba_train.config.mesh import WorldSize
from moba_train.memory.devices import local_gpu
from moba_train.output_files import write_new
from moba_train.resolve.plan import make_plan
from moba_train.resolve.recipe import resolve
from moba_train.tools.plan.rates import peak_or_default
from moba_train.tools.sparsify import recipes
from moba_train.tools.sparsify.recipes import Request, Source
from moba_train.tools.sparsify.steps import check_sparse, steps

MFU = 0.4
"""Share of the GPU's peak, as `moba-train plan` takes it."""


def print_plan(request: Request, source: Source, output: Path, scratch: Path, say: Callable[[str], object]) -> None:
    """Print everything. scratch: an empty folder. Raises UserError for a recipe that cannot be trained, and for
    evaluations that cannot be made."""
    texts = recipes.recipes(request, source, output)
    for name, text in texts.items():
        write_new(scratch / name, text)
    evaluation = parse_yaml(texts[recipes.EVALUATION], recipes.EVALUATION)["evaluation"]
    check_sparse(scratch / recipes.SPARSE, evaluation, request, check_files=False)
    say(recipes.told(request))
    for name, text in texts.items():
        say(f"\n--- {output / 'recipes' / name}\n{text.rstrip()}")
    say("")
    gpu = local_gpu()
    for number, step in enumerate(steps(request, source, output, evaluation), 1):
        line = f"{number}. {step.name}: {step.command}"
        if step.trains:
            config = load_config(scratch / Path(step.words[1]).name, step.words[2:])
            run = resolve(config, WorldSize(request.gpus, request.gpus), None, check_files=False)
            made = make_plan(run, peak_or_default(gpu), MFU)
            each = ", ".join(f"{one.stage.name} {format_duration(one.seconds)}" for one in made.stages)
            line += f"\n   planned: {format_duration(made.seconds)} ({each})"
        say(line)
    on = gpu.name if gpu is not None else "H100 (this machine has no GPU)"
    say(f"Planned for {request.gpus} x {on} at {MFU:.0%} of its peak; evaluations are not planned.")
