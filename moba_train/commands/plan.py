"""`moba-train plan --nodes`: the best parallel layouts of a recipe on a number of nodes."""

from collections.abc import Sequence
from pathlib import Path

from moba_train.commands.shared import table_console
from moba_train.config.load import load_config
from moba_train.config.stages import resolve_stages
from moba_train.parallel.links import LINKS
from moba_train.planning.devices import Gpu
from moba_train.planning.documents import stage_documents
from moba_train.planning.layouts import best_layouts
from moba_train.planning.rates import RATES
from moba_train.planning.render import print_over_budget
from moba_train.planning.render_layouts import print_layouts
from moba_train.planning.step_time import Machine
from moba_train.training.start_warnings import print_start_warnings
from moba_train.validation.data import check_one_tokenizer
from moba_train.validation.recipe import validate
from moba_train.validation.warnings import print_recipe_warnings


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
