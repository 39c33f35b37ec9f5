"""What the command-line programs share. Imports nothing heavy, so that `--help` answers at once."""

from typing import Any

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


def command_group(help_text: str) -> typer.Typer:
    """A program made of commands."""
    return typer.Typer(
        cls=_Commands, help=help_text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
