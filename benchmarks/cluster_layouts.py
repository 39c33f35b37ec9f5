"""The best layouts of a recipe on clusters of several sizes, as `moba-train plan --nodes` predicts them.

python -m benchmarks.cluster_layouts                            # continue-1m on 128, 512 and 4096 GPUs
python -m benchmarks.cluster_layouts --write benchmarks/measured/planning.md
python -m benchmarks.cluster_layouts --rules --write docs/how-to/parallelism.md     # the best layout by size and length
python -m benchmarks.cluster_layouts --recipe configs/recipes/short-then-long.yaml --nodes 8 batch_tokens=8M
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import insert_tables, markdown
from moba_train.config.base import format_duration
from moba_train.config.load import load_config
from moba_train.config.mesh import MeshSizes, WorldSize
from moba_train.memory.devices import H200
from moba_train.memory.flops import stage_documents
from moba_train.memory.shortage import format_gib
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.plan.command import find_layouts
from moba_train.tools.plan.layouts import Layout, best_layouts
from moba_train.tools.plan.step_time import StageStep, make_machine

RECIPE = Path(__file__).parent.parent / "configs" / "recipes" / "continue-1m.yaml"
MARKER = "<!-- layouts -->"
RULES_MARKER = "<!-- best layouts -->"
MODELS = {"llama-1b": "1B", "llama3-8b": "8B", "llama-16b": "16B"}
LENGTHS = ("8K", "32K", "128K", "1M")
MODELS_FOLDER = RECIPE.parent.parent / "models"
RULES_RECIPE = """\
extends: {models}/{model}.yaml
name: rules
run_dir: runs/rules
data: {{tokenizer: tokenizer.json, train: [{{path: corpus}}], validation: [{{path: corpus}}]}}
attention: {{default: moba, full_layers: "last:3", moba: {{block_size: 512, topk: 8}}}}
compile: true
batch_tokens: 4M
stages: [{{name: only, seq_len: {length}, tokens: 1B}}]
"""


def table(recipe: Path, overrides: Sequence[str], nodes: Sequence[int]) -> str:
    """The best five layouts on each number of nodes of 8 H200, as a Markdown table: a row for each layout, and in it
    the stages from left to right."""
    config = load_config(recipe, overrides)
    machine = make_machine(H200, 8, 400.0, None)
    run = resolve_unchecked(config)
    documents = [stage_documents(run.samples, stage) for stage in run.stages]
    stages = " / ".join(stage.name for stage in run.stages)
    head = ["GPUs", "pp", "tp", "dp_replicate", f"cp: {stages}", "step, s", "tokens/s/GPU", "memory, GiB"]
    rows = [[*head, "in the node, GiB", "network, GiB", "all stages"]]
    for count in nodes:
        gpus = count * machine.ranks_per_node

        def accept(changes: Sequence[str], gpus: int = gpus) -> None:
            resolve(load_config(recipe, [*overrides, *changes]), WorldSize(gpus, machine.ranks_per_node))

        found = best_layouts(run, count, machine, documents, accept)
        rows += [_row(gpus, layout) for layout in found.best]
    return markdown(rows)


def rules() -> str:
    """The best layout of models of several sizes at several lengths on 8 and on 64 H200, as a Markdown table. The
    recipe has MoBA 512/8 in all but the last three layers, and batches of 4M tokens."""
    rows = [["model", "length", "8 GPUs", "tokens/s/GPU", "64 GPUs", "tokens/s/GPU"]]
    machine = make_machine(H200, 8, 400.0, None)
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        for model, size in MODELS.items():
            for length in LENGTHS:
                recipe.write_text(RULES_RECIPE.format(models=MODELS_FOLDER, model=model, length=length))
                row = [size, length]
                for nodes in (1, 8):
                    (step,) = find_layouts(recipe, (), nodes, machine, check_files=False)[1].best[0].stages
                    row += [_mesh(step.mesh), f"{step.tokens_per_second:,.0f}"]
                rows.append(row)
    return markdown(rows)


def _mesh(mesh: MeshSizes) -> str:
    """Sizes above 1, such as `dp_shard 4, cp 2`."""
    return ", ".join(f"{name} {size}" for name, size in mesh._asdict().items() if size > 1)


def _row(gpus: int, layout: Layout) -> list[str]:
    mesh = layout.stages[0].mesh

    def each(text: str, *values: float) -> str:
        return " / ".join(format(value, text) for value in values)

    steps: Sequence[StageStep] = layout.stages
    return [
        f"{gpus:,}",
        str(mesh.pp),
        str(mesh.tp),
        str(mesh.dp_replicate),
        each("d", *(step.mesh.cp for step in steps)),
        each(".2f", *(step.time.seconds for step in steps)),
        each(",.0f", *(step.tokens_per_second for step in steps)),
        format_gib(layout.largest.memory),
        each(".0f", *(step.received.node / 2**30 for step in steps)),
        each(".0f", *(step.received.network / 2**30 for step in steps)),
        format_duration(layout.seconds),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 512], help="numbers of nodes, of 8 H200 each")
    parser.add_argument("--rules", action="store_true", help="the best layout by model size and length instead")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the table between its markers")
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE")
    arguments = parser.parse_args()
    found = rules() if arguments.rules else table(arguments.recipe, arguments.overrides, arguments.nodes)
    if arguments.write:
        marker = RULES_MARKER if arguments.rules else MARKER
        arguments.write.write_text(insert_tables(arguments.write.read_text(), {marker: found}))
    print(found)


if __name__ == "__main__":
    main()
