"""Common parts of the command-line programs. Imports nothing heavy, so that `--help` answers at once."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moba_train.errors import UserError, print_error
from moba_train.terminal import outlast_output, safe_terminal

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file, or the name of a packaged recipe")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="values that win over the recipe's")
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="a checkpoint, or a run folder: its newest valid checkpoint")
]

Rates = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="rates of the GPU, by `calibrate`; default: those that are shipped for it"),
]
GpusPerNode = Annotated[int, typer.Option(min=1, help="GPUs (ranks) of each machine")]


class _Commands(TyperGroup):
    """Turns a UserError of any command into its message and exit code; other exceptions keep their traceback. A message
    of typer's about a value begins with the value. A command that writes files does so whatever becomes of the lines
    that it prints."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        found = super().resolve_command(ctx, args)
        if (command := found[1]) is not None:
            # From 0.29 on typer prints the line breaks of a docstring's later paragraphs.
            command.help = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
            if any(parameter.name == "output" for parameter in command.params):
                outlast_output()
        return found

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the program, whose output commands no terminal."""
        with safe_terminal():
            return super().main(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:  # typer's Context or click's, by typer's version
        try:
            return super().invoke(ctx)
        except UserError as error:
            print_error(error)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _discard_output()
            full = UserError(f"{error.strerror} for {error.filename or 'the output of this command'}")
            print_error(full)
            raise typer.Exit(full.exit_code) from None
        except typer.BadParameter as error:
            # From 0.29 on typer reads values with pydantic, whose messages leave them out; before, click's have them.
            if problems := getattr(error.__cause__, "errors", None):
                error.message = f"given {problems()[0]['input']}; {error.message}"
            raise error from None


def _discard_output() -> None:
    """Let this process end although what it has printed cannot be written: Python tries once more at its end."""
    if sys.stdout is not None and getattr(sys.stdout, "stream", sys.stdout) is sys.__stdout__:  # else it is captured
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def check_output_folder(folder: Path | None) -> None:
    """Raises BadParameter when `--output FOLDER` cannot be a folder: before the work whose results it is for."""
    if folder is None:
        return
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"--output: given {folder}; allowed: a folder, and {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"--output: given {folder}; allowed: a folder, but {there} cannot be written to")


def check_output_file(file: Path | None) -> None:
    """Raises BadParameter when `--output FILE` cannot be written: before the work whose results it is for."""
    if file is None:
        return
    if file.is_dir():
        raise typer.BadParameter(f"--output: given {file}, which is a folder; allowed: a file")
    if not os.access(file.absolute().parent, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"--output: given {file}; allowed: a file in a folder that can be written to")


def parse_length(text: str) -> int:
    """A number of tokens on the command line, written as a length in recipes: 4096, 4K (K, M = 1024)."""
    return _parse_tokens(text, 1024)


def parse_budget(text: str) -> int:
    """A number of tokens on the command line, written as a token budget in recipes: 60M, 10B (powers of 1000)."""
    return _parse_tokens(text, 1000)


def _parse_tokens(text: str, base: int) -> int:
    from moba_train.config.base import parse_number

    try:
        number = parse_number(text, base)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if number < 1:
        raise typer.BadParameter(f"given {text}; allowed: 1 or more tokens")
    return int(number)


def table_console() -> Any:
    """A console of rich for tables: as wide as the terminal; at least 160 columns where the output goes to a file or a
    pipe. Brackets in names and paths are printed, not taken for markup."""
    from rich.console import Console

    console = Console(markup=False)
    return console if sys.stdout.isatty() else Console(markup=False, width=max(160, console.width))


def command_group(help_text: str) -> typer.Typer:
    """A command-line program that consists of commands."""
    return typer.Typer(
        cls=_Commands, help=help_text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
