"""Our commands, run in the process of a test."""

from typing import Any

import typer
from typer.testing import CliRunner, Result


def run_app(app: typer.Typer, *arguments: object, code: int = 0, **options: Any) -> Result:
    """The output of a command, which must have ended with this exit code."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    assert done.exit_code == code, done.output
    return done
