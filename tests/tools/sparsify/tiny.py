"""A tiny call of `moba-train sparsify`, and its request."""

from typing import Any

from typer.testing import CliRunner

from moba_train.tools.cli import app
from moba_train.tools.sparsify.recipes import Request

LENGTH = 512
SMALL = [
    "telemetry.report=false",
    "telemetry.console=false",
    "evaluation.position_wise.sequences=2",
    *(f"evaluation.{name}.lengths=[{LENGTH}]" for name in ("needle", "ruler", "oracle")),
    *(f"evaluation.{name}.samples=1" for name in ("needle", "ruler", "full_layers")),
    *(f"evaluation.{name}.depths=[50]" for name in ("needle", "oracle", "full_layers")),
    "evaluation.ruler.tasks=[niah_single]",
    "evaluation.oracle.sequences=2",
]


def words(**options: Any) -> list[str]:
    given = {"data": "train", "validation": "valid", "length": LENGTH, "budget": 64, "block-size": 16, "tokens": 4096}
    given |= {"kind": "msa", "output": "out"} | options
    return ["sparsify", "hf", *(word for key, value in given.items() for word in (f"--{key}", str(value)))]


def call(*further: str, **options: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*words(**options), *further, *SMALL])
    return done.exit_code, done.output


def tiny_request(**changes: Any) -> Request:
    """The request of such a call, with some of its fields changed."""
    given = {"model": "hf", "data": ["train"], "validation": ["valid"], "length": LENGTH, "budget": 64, "tokens": 4096}
    return Request(**(given | {"kind": "msa", "block_size": 16} | changes))
