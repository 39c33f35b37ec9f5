"""`moba-train sparsify`: its options, and the plan that `--dry-run` prints."""

import functools
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from moba_train.tools.cli_options import check_output_folder, parse_budget, parse_length


def sparsify(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="a Hugging Face folder, a run folder or a checkpoint")],
    data: Annotated[list[str], typer.Option(metavar="CORPUS", help="corpus to train on; may be given several times")],
    validation: Annotated[
        list[str], typer.Option(metavar="CORPUS", help="corpus of held-out documents longer than --length")
    ],
    length: Annotated[
        int, typer.Option(parser=parse_length, metavar="TOKENS", help="of a sequence in training and evaluation")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY.PATH=VALUE]...",
            help="laid over the recipes: attention.*, stages.* and optim.lr_factors over the sparse arm's, "
            "evaluation.* over the evaluations, others over all",
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(parser=parse_length, metavar="KEYS", help="keys that a query attends to, in sparse layers")
    ] = 4096,
    tokens: Annotated[
        int,
        typer.Option(parser=parse_budget, metavar="COUNT", help="training tokens of each arm, all stages together"),
    ] = 15_000_000,
    kind: Annotated[
        str, typer.Option(help="attention kind that selects: msa, qsa, seer, moba or another with blocks")
    ] = "msa",
    block_size: Annotated[
        int | None, typer.Option(parser=parse_length, metavar="TOKENS", help="default: the kind's; 64 for moba")
    ] = None,
    full_layers: Annotated[
        int | None, typer.Option(min=1, help="layers that stay full; default: 3, at most a quarter")
    ] = None,
    lr: Annotated[
        float, typer.Option(min=0.0, help="peak learning rate; 5 times as high in the extension, 10 times for a scorer")
    ] = 1e-4,
    rope_theta: Annotated[
        float | None,
        typer.Option(help="RoPE's base for a --length that is new to the model; default: by the length"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each arm; three for a claim")] = 1,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline", help="also train full attention on the same data and tokens; on by default"
        ),
    ] = True,
    equal_seconds: Annotated[
        bool, typer.Option("--equal-seconds", help="also train full attention for as long as the sparse arm takes")
    ] = False,
    tokenizer: Annotated[str | None, typer.Option(metavar="FILE", help="default: the model's")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="ranks of each run, on this machine")] = 1,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="steps that run at the same time, such as other arms and seeds; each has --gpus GPUs"),
    ] = 1,
    output: Annotated[Path, typer.Option(help="folder of recipes, runs, evaluations, report and model")] = Path(
        "runs/sparsify"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the steps, their recipes and the planned minutes; write nothing")
    ] = False,
) -> None:
    """Make a trained model sparse, and compare it with full attention trained on the same data.

    Measures what the budget costs (oracle) and chooses the layers that stay full (calibration). Trains model and scorer
    with full attention, then the sparse model, which learns from its own full attention. Evaluates, and writes a report
    and the model. Each step is an ordinary command; the same command continues where the last one stopped."""
    from moba_train.tools.sparsify import page, recipes, steps
    from moba_train.tools.sparsify.places import places

    check_output_folder(output)
    request = recipes.Request.checked(
        model=str(model),
        data=data,
        validation=validation,
        tokenizer=tokenizer,
        length=length,
        budget=budget,
        tokens=tokens,
        kind=kind,
        block_size=block_size,
        full_layers=full_layers,
        seeds=seeds,
        baseline=baseline or equal_seconds,
        equal_seconds=equal_seconds,
        lr=lr,
        rope_theta=rope_theta,
        gpus=gpus,
        overrides=overrides or [],
    )
    source = recipes.Source.read(model)
    if dry_run:
        with tempfile.TemporaryDirectory() as folder:
            steps.print_plan(request, source, output, Path(folder), typer.echo)
        return
    texts = recipes.recipes(request, source, output)
    evaluation = steps.begin(request, texts, output)
    if kept := steps.kept_recipes(texts, output):
        typer.echo(f"recipes that differ from those of this call, and stay as they are: {', '.join(kept)}")
    todo = [*steps.steps(request, source, output, evaluation)]
    steps.check(todo, gpus)
    steps.check_sparse(output / "recipes" / recipes.SPARSE, evaluation, request)
    run = steps.run_here if gpus == 1 else functools.partial(steps.run_command, gpus=gpus)
    with places(jobs, gpus) as found:
        steps.run_steps(todo, texts, output, run, typer.echo, found)
    typer.echo(f"report: {page.write_page(request, output, todo)}")
