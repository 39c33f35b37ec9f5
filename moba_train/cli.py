"""`moba-train`: parses, calls, prints. Imports what a command needs inside it, so that `--help` starts at once."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moba_train.errors import UserError


class _Commands(TyperGroup):
    """Turns a UserError of any command into its message and exit code 2; other exceptions keep their traceback."""

    def invoke(self, ctx: Any) -> Any:  # typer's Context or click's, by typer's version
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Distributed long-context pretraining with MoBA.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file of the run")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="values that win over the recipe's")
]


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, help="number of GPUs (ranks)")] = 1,
    tflops: Annotated[
        float | None,
        typer.Option(min=1.0, help="dense bf16 peak of one GPU; default: this machine's GPU, else an H100's"),
    ] = None,
    mfu: Annotated[float, typer.Option(min=0.01, max=1.0, help="share of the peak that is reached")] = 0.4,
) -> None:
    """Check a recipe and say what it costs: parameters, FLOPs, memory, time."""
    from rich.console import Console

    from moba_train.config.load import load_config
    from moba_train.config.validate import validate
    from moba_train.planning.devices import local_peak_tflops
    from moba_train.planning.plan import make_plan
    from moba_train.planning.render import print_plan

    config = load_config(recipe, overrides or ())
    validate(config, world_size=gpus)
    print_plan(make_plan(config, gpus, tflops or local_peak_tflops(), mfu), Console())


@app.command()
def config(recipe: Recipe, overrides: Overrides = None) -> None:
    """Print a recipe as YAML with everything it extends, all overrides and all defaults."""
    from moba_train.config.load import dump_config, load_config

    typer.echo(dump_config(load_config(recipe, overrides or ())), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors."""
    from moba_train.config.reference import json_schema

    typer.echo(json_schema(), nl=False)


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="folder of one checkpoint")],
) -> None:
    """Check every file of a checkpoint against its manifest."""
    from moba_train.checkpoint.publish import verify_checkpoint

    verify_checkpoint(checkpoint)
    typer.echo(f"{checkpoint}: intact")


@app.command()
def env() -> None:
    """Report versions, GPUs and optional packages, with what to install where something is missing."""
    from rich.console import Console

    from moba_train.environment import print_environment

    print_environment(Console())


if __name__ == "__main__":
    app()
