"""What a plan says about the run folder: a checkpoint there that training would refuse, or start from unexpectedly.

`moba-train plan --nodes`: the best parallel layouts of a recipe on a number of nodes.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import Accept, is_finite, latest_checkpoint, newest_first, saved_step
from moba_train.checkpoint.recipe import checkpoint_folders
from moba_train.checkpoint.retention import Marks
from moba_train.config.load import load_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import resolve_stages
from moba_train.data.tokenizer import tokenizer_hash
from moba_train.errors import CheckpointError, UserError
from moba_train.memory.devices import Gpu
from moba_train.memory.flops import stage_documents
from moba_train.parallel.links import LINKS
from moba_train.resolve.data import check_one_tokenizer
from moba_train.resolve.recipe import validate
from moba_train.resolve.warnings import print_recipe_warnings
from moba_train.run.restarts import Restarts, choose_checkpoint
from moba_train.run.resumable import resumed_progress
from moba_train.tools.cli_options import table_console
from moba_train.tools.plan.layouts import best_layouts
from moba_train.tools.plan.rates import RATES
from moba_train.tools.plan.render import print_layouts, print_over_budget
from moba_train.tools.plan.step_time import Machine


def print_start_warnings(config: RunConfig) -> None:
    """Print `start_warnings`, a line each."""
    for warning in start_warnings(config):
        print(f"warning: {warning}", flush=True)


def start_warnings(config: RunConfig) -> list[str]:
    """Sentences about a start of a validated recipe in its run folder; none where there is no checkpoint, or it is
    simply resumed from. Sizes of the checkpoint's files are compared; its bytes and the corpora are not read."""
    try:
        path = _checkpoint_to_resume_from(config)
        if path is None:
            return []
        resumed_progress(config, read_meta(path), _tokenizer(config), str(path))
    except CheckpointError as error:
        return [f"training would refuse this recipe: {error}"]
    if config.init_from is None:
        return []
    return [
        f"init_from: {config.init_from} will not be read, because the run continues from its own checkpoint {path}; "
        "set run_dir to a new folder to begin with these weights"
    ]


def _checkpoint_to_resume_from(config: RunConfig) -> Path | None:
    """The checkpoint that a start takes; None where there is none. Nothing is recorded or set aside. Raises
    CheckpointError when there are some, but none can be used."""
    folders = checkpoint_folders(config)
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

    return choose_checkpoint(find, marks, Restarts(Path(config.run_dir)).blames, mark)


def _tokenizer(config: RunConfig) -> str:
    """The tokenizer's hash; empty where there is none, and where a plan without data does not find it."""
    if config.data.tokenizer is not None:
        with suppress(OSError, UserError):
            return tokenizer_hash(config.data.tokenizer)
    return ""


def plan_nodes(
    recipe: Path, overrides: Sequence[str], nodes: int, gpus_per_node: int, network: float, gpu: Gpu, check_files: bool
) -> None:
    """Print the best layouts. network: Gbit/s of each GPU's adapter. Raises UserError."""
    config = load_config(recipe, overrides)
    validate(config, check_files=check_files, gpu=gpu)
    if not check_files:
        check_one_tokenizer(config)
    links = LINKS._replace(network=network * 1e9 / 8)
    machine = Machine(gpu, gpus_per_node, links, RATES.scaled_to(gpu))
    documents = [stage_documents(config, stage) for stage in resolve_stages(config)]

    def accept(changes: Sequence[str]) -> None:
        changed = load_config(recipe, [*overrides, *changes])
        validate(changed, world_size=nodes * gpus_per_node, ranks_per_node=gpus_per_node, gpu=gpu)

    console = table_console()
    layouts = best_layouts(config, nodes, machine, documents, accept)
    print_layouts(layouts, nodes, machine, console)
    print_over_budget(config, layouts.best[0].stages, console)
    print_recipe_warnings(config)
    print_start_warnings(config)
