"""`moba-train plan`: the cost of a recipe in its own layout or, with `--nodes`, its best layouts; and warnings."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import Accept, is_finite, latest_checkpoint, newest_first, saved_step
from moba_train.checkpoint.retention import Marks
from moba_train.config.load import load_config
from moba_train.config.mesh import WorldSize
from moba_train.config.schema import RunConfig
from moba_train.data.tokenizer import tokenizer_hash
from moba_train.errors import CheckpointError, ConfigError, PlanError, UserError
from moba_train.memory.devices import Device, Gpu, local_host_memory
from moba_train.memory.flops import stage_documents
from moba_train.memory.shortage import host_shortage, shortage
from moba_train.resolve.data import tokenizer_problems
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import ResolvedRun, RunFolders
from moba_train.resolve.warnings import print_recipe_warnings
from moba_train.run.restarts import Restarts, choose_checkpoint
from moba_train.run.resumable import resumed_progress
from moba_train.tools.cli_options import table_console
from moba_train.tools.plan.changes import cheapest_changes, largest_stage
from moba_train.tools.plan.layouts import Layouts, best_layouts
from moba_train.tools.plan.plan import Plan, make_plan
from moba_train.tools.plan.render import print_changes, print_fit, print_layouts, print_over_budget, print_plan
from moba_train.tools.plan.step_time import Machine


def plan_recipe(
    recipe: Path,
    overrides: Sequence[str],
    gpus: int,
    machine: Machine,
    gpu: Gpu | None,
    is_here: bool,
    check_files: bool,
) -> None:
    """Print what a recipe costs on `gpus` GPUs.

    gpu: None: memory is not compared with any; is_here: it is this machine's, whose host counts as well

    Raises UserError; PlanError for a plan that does not fit the GPU, after printing changes that make it fit.
    """
    config = load_config(recipe, overrides)
    per_node = min(gpus, machine.ranks_per_node)
    host = local_host_memory(per_node) if gpu and is_here else None
    device = Device(gpu, host, is_here=False) if gpu else None  # packages may be missing where a run is planned
    run = resolve(config, WorldSize(gpus, per_node), device, check_files=check_files)
    if not check_files:
        _check_one_tokenizer(config)
    made = make_plan(run, machine)
    console = table_console()
    print_plan(made, console)
    print_fit(made, gpu, console)
    print_over_budget(run.memory.gpu_bytes, made.stages, console)
    print_recipe_warnings(run)
    print_start_warnings(run)
    activations = {item.stage.name: item.activations for item in made.stages}
    if host is not None and (warning := host_shortage(activations, host)):
        console.print(f"warning: {warning}", soft_wrap=True)
    if gpu is None:
        return

    def replan(changes: Sequence[str], ranks: int) -> Plan:
        changed = load_config(recipe, [*overrides, *changes])
        documents = [item.documents for item in made.stages]
        world = WorldSize(ranks, min(ranks, machine.ranks_per_node))
        return make_plan(resolve(changed, world, device), machine, documents)

    largest = largest_stage(made)
    if missing := shortage(largest.stage.name, largest.memory, gpu):
        print_changes(made, cheapest_changes(run, made, gpu, replan), console)
        raise PlanError(f"the plan does not fit: {missing}")


def print_start_warnings(run: ResolvedRun) -> None:
    """Warn of a start of a run in its folder that training would refuse, or whose `init_from` it would not read. Sizes
    of the checkpoint's files are compared; its bytes and the corpora are not read."""
    try:
        path = _checkpoint_to_resume_from(run.folders)
        if path is None:
            return
        resumed_progress(run, read_meta(path), _tokenizer_hash(run.data.tokenizer), str(path))
    except CheckpointError as error:
        print(f"warning: training would refuse this recipe: {error}", flush=True)
        return
    if run.init_from is not None and run.setup.spec.adapters is None:
        print(
            f"warning: init_from: {run.init_from} will not be read, because the run continues from its own checkpoint "
            f"{path}; set run_dir to a new folder to begin with these weights",
            flush=True,
        )


def _checkpoint_to_resume_from(run: RunFolders) -> Path | None:
    """The checkpoint that a start takes; None where there is none. Nothing is recorded or set aside. Raises
    CheckpointError when there are some, but none can be used."""
    folders = run.checkpoints
    marks = Marks.read(folders[0])

    def find(accept: Accept) -> Path | None:
        def is_wanted(meta: dict[str, Any]) -> bool:
            return is_finite(meta) and accept(meta)

        found = [path for folder in folders if (path := latest_checkpoint(folder, is_wanted)) is not None]
        if not found and newest_first(*folders):
            raise CheckpointError(f"no checkpoint in {' and '.join(map(str, folders))} is complete and finite")
        return max(found, key=lambda path: saved_step(read_meta(path)) or 0, default=None)

    def mark(meta: dict[str, Any], reason: str) -> None:
        marks.add(saved_step(meta) or 0, meta.get("save_id", ""), reason)

    return choose_checkpoint(find, marks, Restarts(run.run).blames, mark)


def _tokenizer_hash(tokenizer: str | None) -> str:
    """The tokenizer's hash; empty where there is none, and where a plan without data does not find it."""
    if tokenizer is not None:
        with suppress(OSError, UserError):
            return tokenizer_hash(tokenizer)
    return ""


def find_layouts(
    recipe: Path, overrides: Sequence[str], nodes: int, machine: Machine, check_files: bool
) -> tuple[ResolvedRun, Layouts]:
    """The run of a recipe, without layouts, and its five best layouts, each of which `moba-train launch` accepts.
    Raises UserError."""
    config = load_config(recipe, overrides)
    device = Device(machine.gpu, host_memory=None, is_here=False)
    run = resolve(config, None, device, check_files=check_files)
    if not check_files:
        _check_one_tokenizer(config)
    documents = [stage_documents(run.samples, stage) for stage in run.stages]

    def accept(changes: Sequence[str]) -> None:
        changed = load_config(recipe, [*overrides, *changes])
        resolve(changed, WorldSize(nodes * machine.ranks_per_node, machine.ranks_per_node), device)

    return run, best_layouts(run, nodes, machine, documents, accept)


def plan_nodes(recipe: Path, overrides: Sequence[str], nodes: int, machine: Machine, check_files: bool) -> None:
    """Print the best layouts. Raises UserError."""
    run, layouts = find_layouts(recipe, overrides, nodes, machine, check_files)
    console = table_console()
    print_layouts(layouts, nodes, machine, console)
    print_over_budget(run.memory.gpu_bytes, layouts.best[0].stages, console)
    print_recipe_warnings(run)
    print_start_warnings(run)


def _check_one_tokenizer(config: RunConfig) -> None:
    """Raises ConfigError when corpora that are on disk were made with other tokenizers than the recipe's."""
    if problems := list(tokenizer_problems(config.data, config.stages)):
        raise ConfigError(problems)
