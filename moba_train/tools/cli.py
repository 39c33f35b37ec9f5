"""`moba-train`: parses, calls, prints. Imports what a command needs inside it, so that `--help` starts at once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from moba_train.tools.cli_options import (
    Checkpoint,
    GpusPerNode,
    Overrides,
    Rates,
    Recipe,
    check_output_file,
    check_output_folder,
    command_group,
    table_console,
)
from moba_train.tools.eval_commands import evaluate, generate, lm_eval, profile_spans
from moba_train.tools.launch.command import launch
from moba_train.tools.sparsify.command import sparsify

app = command_group("Distributed long-context pretraining with MoBA.")


def _print_version(wanted: bool) -> None:
    if wanted:
        from moba_train.environment import code_version, describe_code

        typer.echo(describe_code(code_version()))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the version and, in a checkout, the commit"
        ),
    ] = False,
) -> None:
    """Distributed long-context pretraining with MoBA."""


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="ranks on this machine; default: all its GPUs")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="starts after a failure; each continues from the newest checkpoint")
    ] = 0,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="begin at step 0 if no checkpoint is found, though there was one")
    ] = False,
    stop_at_step: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEP", help="save and end after this step of the run; the same command continues"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="print the resolved recipe, with all its values")] = False,
) -> None:
    """Train on this machine: torchrun with one rank per GPU. For several nodes see `launch`."""
    from moba_train.tools.launch.torchrun import main

    ranks = ["--nproc-per-node", str(gpus)] if gpus else []
    torchrun = ["--standalone", *ranks, "--max-restarts", str(restarts), "-m", "moba_train.train", str(recipe)]
    options = ["--from-scratch"] * from_scratch + ["--verbose"] * verbose
    if stop_at_step is not None:
        options += ["--stop-at-step", str(stop_at_step)]
    raise typer.Exit(main([*torchrun, *(overrides or ()), *options]))


app.command()(launch)


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="number of GPUs (ranks); default: 1")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="machines, instead of --gpus: find the best layouts on all their GPUs")
    ] = None,
    gpus_per_node: GpusPerNode = 8,
    network: Annotated[
        float, typer.Option(min=1.0, max=1e6, metavar="GBIT/S", help="of each GPU's network adapter, between nodes")
    ] = 400.0,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU that the run must fit, such as h200; default: that of --rates or this machine's "
            "(with --nodes, else h200)"
        ),
    ] = None,
    rates: Rates = None,
    no_data: Annotated[
        bool, typer.Option("--no-data", help="plan without corpora, tokenizer and init_from, which need not exist yet")
    ] = False,
) -> None:
    """Check a recipe and say what it costs: parameters, FLOPs, memory, communication, time.

    A recipe whose memory does not fit the GPU is refused, with changes that make it fit, as are missing files. FLOPs
    are counted by the documents of the corpora; with --no-data, by one document per sequence if these are absent.
    With --nodes the parallel layout is chosen: the best five by predicted time."""
    from moba_train.errors import PlanError
    from moba_train.memory.devices import local_gpu
    from moba_train.tools.plan.command import plan_nodes, plan_recipe
    from moba_train.tools.plan.rates import named_gpu
    from moba_train.tools.plan.step_time import make_machine

    if nodes is not None and gpus is not None:
        raise PlanError("--nodes and --gpus: given both; allowed: --nodes with --gpus-per-node and --gpu")
    asked = named_gpu(gpu) if gpu is not None else None
    here = local_gpu() if asked is None else None
    machine = make_machine(asked or (None if rates else here), gpus_per_node, network, rates, here is not None)
    if nodes is not None:
        plan_nodes(recipe, overrides or (), nodes, machine, not no_data)
        return
    if rates and here and here.name != machine.rates.gpu:
        here = None  # the rates are another machine's, and so is the plan, as with --nodes
    target = asked or here or (machine.gpu if rates else None)
    plan_recipe(recipe, overrides or (), gpus or 1, machine, target, here is not None, not no_data)


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="rates, for --rates FILE")] = Path(
        "rates.json"
    ),
) -> None:
    """Measure what this machine's GPU does in a second, for `plan` and `tune`.

    Matrix products, memory, blocks, loss, optimizers, attention of every kind, and links between GPUs, in under five
    minutes. benchmarks/measured/planning.md says what each number is."""
    from moba_train.output_files import write_atomically
    from moba_train.tools.plan.calibrate import calibrate as measured

    check_output_file(output)
    for rates in measured(typer.echo):  # written again and again, so that an interrupted one is not lost
        write_atomically(output, rates.to_json())
    typer.echo(f"written: {output}")


@app.command()
def tune(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="ranks on this machine; default: all its GPUs")] = None,
    steps: Annotated[int, typer.Option(min=2, help="steps of each stage; those of the second half count")] = 10,
    rates: Rates = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="write the results as JSON")
    ] = None,
) -> None:
    """Train the five best layouts of `plan --nodes 1` for some steps each, and print them in the measured order."""
    import torch

    from moba_train.errors import PlanError
    from moba_train.memory.devices import local_gpu
    from moba_train.tools.plan.step_time import make_machine
    from moba_train.tools.plan.tune import tune as measured

    check_output_file(output)
    here = local_gpu()
    if here is None and rates is None:
        raise PlanError("this machine has no GPU; `moba-train calibrate` measures its CPU in tiny shapes, for --rates")
    ranks = gpus or torch.cuda.device_count() or 1
    machine = make_machine(None if rates else here, ranks, 400.0, rates, here is not None)
    measured(recipe, overrides or (), machine, steps, output, typer.echo)


@app.command()
def config(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print a recipe as YAML with everything it extends, all overrides and all defaults."""
    import moba_train.attention.registry  # noqa: F401  # the kinds' sections
    from moba_train.config.load import dump_config, load_config

    typer.echo(dump_config(load_config(recipe, overrides or ())), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    from moba_train.tools.reference import json_schema

    typer.echo(json_schema(), nl=False)


@app.command()
def verify(
    checkpoint: Checkpoint,
) -> None:
    """Check every file of a checkpoint against its manifest."""
    from moba_train.checkpoint.manifest import MANIFEST, verify_checkpoint
    from moba_train.checkpoint.publish import find_checkpoint, hold, published

    newest = published(checkpoint / "checkpoints")[-1:]  # not the newest that looks valid: the damage is asked for
    found, _held = (newest[0][1], hold(newest[0][1])) if newest else find_checkpoint(checkpoint)
    files = verify_checkpoint(found)
    typer.echo(f"{found}: intact")
    if others := sorted({entry.name for entry in found.iterdir()} - files.keys() - {MANIFEST}):
        typer.echo(f"not in the manifest, never read: {', '.join(map(repr, others))}")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="a checkpoint, a run folder (its newest), or a metrics.jsonl")],
    b: Annotated[Path, typer.Argument(metavar="B", help="what to compare it with, of the same kind")],
    tolerance: Annotated[float, typer.Option(min=0.0, help="relative; 0: bit for bit")] = 0.0,
) -> None:
    """Name the first tensor, or the first step, that differs between two runs. Exit status 1 if any does."""
    from moba_train.tools.compare import compare as compared
    from moba_train.tools.compare import describe

    result = compared(a, b, tolerance)
    for notice in result.notices:
        typer.echo(f"note: {notice}", err=True)
    for line in describe(result):
        typer.echo(line)
    raise typer.Exit(1 if result.differing else 0)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="run folders, drawn over each other")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="default: report.html in the run folder; of several runs, here"),
    ] = None,
) -> None:
    """Write one HTML file about runs, finished or not: loss, throughput, evaluations, recipe. Needs no network."""
    from moba_train.tools.report.page import write_report

    written = write_report(runs, output)
    for notice in written.notices:
        typer.echo(f"note: {notice}", err=True)
    typer.echo(written.path)


@app.command()
def fit_scaling(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of finished runs, three or more")],
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="losses to fit: loss (training, averaged), eval_loss, trailing_loss, or another evaluation's number",
        ),
    ] = "eval_loss",
    group_by: Annotated[
        str, typer.Option(metavar="KEY", help="runs of one fit agree in this: attention, or a key of the recipe")
    ] = "attention",
    output: Annotated[Path | None, typer.Option(help="folder for scaling.json and scaling.png")] = None,
) -> None:
    """Fit the loss of runs of different sizes as a power law of their compute, for each attention side by side.

    C is in PFLOP/s-days: 6ND, 6 x parameters outside embeddings x tokens, and real, with the output projection, and
    attention as each layer computes it. Intervals of 95 % are bootstrap percentiles."""
    from moba_train.tools.report.scaling import fit_runs
    from moba_train.tools.report.scaling_report import describe as lines_of
    from moba_train.tools.report.scaling_report import write_report
    from moba_train.tools.report.scaling_runs import COMPUTES, read_runs

    check_output_folder(output)
    metrics = list(dict.fromkeys(name.strip() for name in metric.split(",")))
    found = fit_runs(read_runs(runs, metrics, group_by), metrics, COMPUTES)
    for line in lines_of(found):
        typer.echo(line)
    for path in write_report(found, output) if output is not None else ():
        typer.echo(f"written: {path}")


app.command()(sparsify)
app.command(name="eval")(evaluate)
app.command()(lm_eval)
app.command()(profile_spans)


@app.command()
def inspect_spike(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run folder")],
    step: Annotated[int | None, typer.Option(help="default: the newest dump")] = None,
    documents: Annotated[int, typer.Option(min=0, help="how many documents of the batch to show")] = 10,
) -> None:
    """Show what was recorded at a loss spike: numbers, and the documents of the batch, highest loss first."""
    from moba_train.tools.inspect_spike import print_spike

    print_spike(run, step, documents, table_console())


app.command()(generate)

convert = command_group("Convert between our checkpoints and Hugging Face folders.")
app.add_typer(convert, name="convert")
InitFrom = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="the model that adapters were trained on, where it is now; default: init_from"),
]


@convert.command()
def moba_to_hf(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="new folder")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="element type of the written weights; checkpoints hold float32"),
    ] = "bfloat16",
    with_code: Annotated[
        bool,
        typer.Option(
            "--with-code",
            help="add the model's code, by which transformers runs each layer's attention without moba_train "
            "(trust_remote_code), and parameters of attention kinds",
        ),
    ] = False,
    model_type: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="MODEL_TYPE",
            help="a published family, attention included: minicpm (MiniCPM 4.1, infllm_v2 in all layers), "
            "minimax_m3_vl_text (MiniMax-M3, msa); default: the first that computes the same with full attention",
        ),
    ] = None,
    init_from: InitFrom = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder: weights, config.json, model card, and the tokenizer as AutoTokenizer
    loads it.

    The `moba` entry of config.json gives each layer's attention; software that ignores it has an ordinary model with
    full attention."""
    import torch

    from moba_train.tools.convert.hf import export_to_hf
    from moba_train.tools.saved_recipe import open_checkpoint

    saved = open_checkpoint(checkpoint, init_from)
    left_out = export_to_hf(saved, output, getattr(torch, dtype), 2**32, with_code, model_type)
    typer.echo(f"{saved.path} is now a Hugging Face model in {output}")
    for warning in left_out:
        typer.echo(f"warning: {warning}", err=True)


@convert.command()
def moba_to_peft(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="new folder")],
    init_from: InitFrom = None,
) -> None:
    """Write the adapters of a checkpoint as a folder for peft, without the model that they were trained on.

    moba-to-hf merges them into it. Attention is not part of the folder: peft runs the adapters with that of the
    model."""
    from moba_train.tools.convert.adapters import export_adapters
    from moba_train.tools.saved_recipe import open_checkpoint

    saved = open_checkpoint(checkpoint, init_from)
    export_adapters(saved, output)
    typer.echo(f"the adapters of {saved.path} are now in {output}")


@convert.command()
def hf_to_moba(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a Hugging Face model")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="new folder")],
    experts: Annotated[
        int | None, typer.Option(min=2, help="upcycle a dense model: copies of each feed-forward, as experts")
    ] = None,
    active: Annotated[
        int | None, typer.Option(min=1, help="with --experts: experts that each token passes through; else 2")
    ] = None,
) -> None:
    """Write a Hugging Face model as a checkpoint, with its tokenizer and a recipe to extend.

    For `verify`, for the recipe, and to begin with experts. Training, `generate`, `eval` and `lm-eval` read Hugging
    Face folders too."""
    from moba_train.tools.convert.hf import RECIPE, import_from_hf

    unread = import_from_hf(folder, output, experts, active)
    if unread:
        typer.echo(f"warning: config.json has keys that were not read: {', '.join(unread)}", err=True)
    typer.echo(f"{folder} is now a checkpoint in {output}; {output / RECIPE} is a recipe to extend")


@app.command()
def env() -> None:
    """Report versions, GPUs and optional packages, with a command to install what is missing."""
    from moba_train.tools.environment import print_environment

    print_environment(table_console())


if __name__ == "__main__":
    app()
